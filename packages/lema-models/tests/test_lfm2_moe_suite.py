"""LFM2 with experts through lema_core alone, against transformers and PEFT."""

from __future__ import annotations

from lema_core.testing.adapter_experts import ExpertAdapterSuite
from lema_models.lfm2_moe import Lfm2MoeAdapter


class TestLfm2Moe(ExpertAdapterSuite):
    adapter = Lfm2MoeAdapter
    experts = "feed_forward.experts"
    router = "feed_forward.gate"
    hf_config = {
        "model_type": "lfm2_moe",
        "vocab_size": 97,
        "hidden_size": 48,
        "intermediate_size": 60,
        "moe_intermediate_size": 24,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
        "num_experts": 6,
        "num_experts_per_tok": 3,
        "num_dense_layers": 1,
        "layer_types": ["conv", "full_attention", "conv"],
    }
    variants = {
        "tied": {},
        "untied": {"tie_word_embeddings": False, "num_experts_per_tok": 2},
        "no bias": {"use_expert_bias": False, "norm_topk_prob": False, "routed_scaling_factor": 1.5},
    }
    slow = frozenset({"untied", "no bias"})
    buffers = {"model.rotary_emb.inv_freq": (6,)}
