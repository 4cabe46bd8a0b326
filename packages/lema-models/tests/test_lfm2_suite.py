"""LFM2 through lema_core alone, against transformers and PEFT."""

from __future__ import annotations

from lema_core.testing.adapter_suite import AdapterSuite
from lema_models.lfm2 import Lfm2Adapter


class TestLfm2(AdapterSuite):
    adapter = Lfm2Adapter
    hf_config = {
        "model_type": "lfm2",
        "vocab_size": 97,
        "hidden_size": 48,
        "intermediate_size": 90,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
        "block_auto_adjust_ff_dim": False,
        "layer_types": ["conv", "full_attention", "conv"],
    }
    variants = {
        "tied": {},
        "untied": {"tie_word_embeddings": False, "layer_types": ["full_attention", "conv", "conv"]},
        "adjusted": {"block_auto_adjust_ff_dim": True, "block_multiple_of": 16, "block_ffn_dim_multiplier": 1.2},
        "biases": {"conv_bias": True, "conv_L_cache": 4},
        "wide heads": {"head_dim": 20, "num_hidden_layers": 2, "layer_types": ["conv", "full_attention"]},
    }
    buffers = {"model.rotary_emb.inv_freq": (6,)}
