"""Llama through lema_core alone, against transformers and PEFT."""

from __future__ import annotations

from lema_core.testing.adapter_suite import AdapterSuite
from lema_models.llama import LlamaAdapter

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}


class TestLlama(AdapterSuite):
    adapter = LlamaAdapter
    hf_config = {
        "model_type": "llama",
        "vocab_size": 97,
        "hidden_size": 64,
        "intermediate_size": 90,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
    }
    variants = {
        "untied": {},
        "tied": {"tie_word_embeddings": True},
        "biases": {"attention_bias": True, "mlp_bias": True, "num_hidden_layers": 3},
        "odd heads": {
            "hidden_size": 66,
            "head_dim": 24,
            "num_attention_heads": 3,
            "num_key_value_heads": 1,
            "rms_norm_eps": 1e-2,
        },
        "no groups": {"num_key_value_heads": 4, "rope_parameters": {"rope_type": "default", "rope_theta": 500.0}},
        "llama3": {"rope_parameters": LLAMA3},
    }
    buffers = {"model.layers.0.self_attn.rotary_emb.inv_freq": (8,)}
