"""GPT-2 through lema_core alone, against transformers and PEFT."""

from __future__ import annotations

from lema_core.testing.adapter_suite import AdapterSuite
from lema_models.gpt2 import GPT2Adapter


class TestGPT2(AdapterSuite):
    adapter = GPT2Adapter
    hf_config = {
        "model_type": "gpt2",
        "vocab_size": 97,
        "n_embd": 48,
        "n_layer": 2,
        "n_head": 4,
        "n_positions": 64,
        "embd_pdrop": 0.0,
        "resid_pdrop": 0.0,
        "attn_pdrop": 0.0,
    }
    variants = {
        "tied": {},
        "untied": {"tie_word_embeddings": False, "n_inner": 70},
        "odd heads": {"n_embd": 45, "n_head": 3, "activation_function": "gelu", "layer_norm_epsilon": 1e-2},
        "scales": {"scale_attn_by_inverse_layer_idx": True, "scale_attn_weights": False, "n_layer": 3},
    }
    dropout = {"attn_pdrop": 0.25, "embd_pdrop": 0.2, "resid_pdrop": 0.3}
    slow = frozenset({"tied", "untied", "scales"})
    buffers = {"transformer.h.0.attn.bias": (1, 1, 64, 64), "transformer.h.1.attn.masked_bias": ()}
