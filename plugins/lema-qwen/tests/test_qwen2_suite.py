"""Qwen2 through lema_core alone, against transformers and PEFT."""

from __future__ import annotations

import pytest
from transformers import AutoConfig

from lema_core.errors import ConfigError
from lema_core.testing.adapter_suite import AdapterSuite
from lema_qwen.qwen2 import Qwen2Adapter, Qwen2Config

SIZES = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 90,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
YARN = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 16}


@pytest.mark.slow
class TestQwen2(AdapterSuite):
    adapter = Qwen2Adapter
    hf_config = {"model_type": "qwen2", **SIZES, "max_position_embeddings": 128}
    variants = {
        "plain": {},
        "tied, yarn": {"tie_word_embeddings": True, "rope_parameters": YARN, "num_key_value_heads": 1},
        "windows above": {
            "num_hidden_layers": 3,
            "use_sliding_window": True,
            "sliding_window": 5,
            "max_window_layers": 1,
        },
        "windows by layer": {
            "hidden_size": 66,
            "head_dim": 22,
            "num_attention_heads": 3,
            "num_key_value_heads": 3,
            "use_sliding_window": True,
            "sliding_window": 4,
            "layer_types": ["sliding_attention", "full_attention"],
        },
    }
    slow = frozenset({"plain", "tied, yarn", "windows above"})
    buffers = {"model.layers.0.self_attn.rotary_emb.inv_freq": (8,)}


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"sliding_window": 32},
        {"use_sliding_window": True, "max_window_layers": 0},
        {"use_sliding_window": True, "max_window_layers": 1, "sliding_window": 32},
        {"use_sliding_window": True, "sliding_window": None, "max_window_layers": 0},
        {"use_sliding_window": True, "layer_types": ["sliding_attention", "full_attention"]},
    ],
)
def test_windows_are_where_transformers_has_them(changes) -> None:
    theirs = AutoConfig.for_model("qwen2", **SIZES, **changes)
    ours = Qwen2Config.from_hf_config({**SIZES, **changes})
    kinds = theirs.layer_types
    assert ours.windows == tuple(theirs.sliding_window if kind == "sliding_attention" else None for kind in kinds)
    assert (ours.max_positions, ours.norm_eps) == (theirs.max_position_embeddings, theirs.rms_norm_eps)
    assert ours.rope.rope_theta == theirs.rope_parameters["rope_theta"]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"layer_types": ["sliding_attention"] * 2}, "'sliding_attention', but use_sliding_window=None"),
        ({"layer_types": ["full_attention"]}, "layer_types: 2 times .* expected, 1 entries found"),
        ({"use_sliding_window": True, "sliding_window": 0}, "sliding_window=0"),
        ({"num_key_value_heads": 3}, "num_attention_heads=4 .* num_key_value_heads=3"),
    ],
)
def test_fields_that_contradict_each_other(changes, words) -> None:
    with pytest.raises(ConfigError, match=words):
        Qwen2Config.from_hf_config({**SIZES, **changes})
