"""Qwen3 through lema_core alone, against transformers and PEFT."""

from __future__ import annotations

from transformers import AutoConfig

from lema_core.testing.adapter_suite import AdapterSuite
from lema_qwen.qwen3 import Qwen3Adapter, Qwen3Config

SIZES = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 90,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


class TestQwen3(AdapterSuite):
    adapter = Qwen3Adapter
    hf_config = {"model_type": "qwen3", **SIZES, "head_dim": 24, "max_position_embeddings": 128}
    variants = {
        "plain": {"rms_norm_eps": 1e-2},
        "tied, biases": {"tie_word_embeddings": True, "attention_bias": True, "head_dim": 16},
        "windows": {"num_hidden_layers": 3, "use_sliding_window": True, "sliding_window": 5, "max_window_layers": 2},
    }
    slow = frozenset({"plain", "tied, biases"})
    buffers = {"model.layers.0.self_attn.rotary_emb.inv_freq": (8,)}


def test_what_is_left_out_means_what_it_means_to_transformers() -> None:
    """A head's size above all: it does not follow from the hidden size."""
    theirs, ours = AutoConfig.for_model("qwen3", **SIZES), Qwen3Config.from_hf_config(SIZES)
    assert ours.heads.dim == theirs.head_dim == 128
    assert ours.attention_bias == theirs.attention_bias and ours.windows == (None, None)
