"""Mixtral through lema_core alone, against transformers and PEFT."""

from __future__ import annotations

from lema_core.testing.adapter_experts import ExpertAdapterSuite
from lema_models.mixtral import MixtralAdapter


class TestMixtral(ExpertAdapterSuite):
    adapter = MixtralAdapter
    hf_config = {
        "model_type": "mixtral",
        "vocab_size": 97,
        "hidden_size": 48,
        "intermediate_size": 40,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
        "num_local_experts": 5,
        "num_experts_per_tok": 2,
    }
    variants = {
        "untied": {},
        "tied": {"tie_word_embeddings": True, "num_local_experts": 4},
        "window": {"sliding_window": 5, "num_experts_per_tok": 3, "num_hidden_layers": 3},
        "odd heads": {"head_dim": 20, "num_attention_heads": 3, "num_key_value_heads": 1, "num_local_experts": 2},
    }
    buffers = {"model.layers.0.self_attn.rotary_emb.inv_freq": (6,)}
