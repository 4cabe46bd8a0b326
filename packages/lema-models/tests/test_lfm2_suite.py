"""LFM2 through lema_core alone, against transformers and PEFT."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from lema_core.runtime.batch import TokenBatch
from lema_core.testing.adapter_suite import AdapterSuite
from lema_models.lfm2 import Lfm2Adapter


@pytest.mark.slow
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
    slow = frozenset({"tied", "untied", "adjusted", "wide heads"})
    buffers = {"model.rotary_emb.inv_freq": (6,)}

    def oracle_logits(self, model: Any, batch: TokenBatch) -> Tensor:
        """Each row without its padding where biases are: in transformers they reach from padding into the first
        tokens."""
        if not model.config.conv_bias:
            return super().oracle_logits(model, batch)
        rows = []
        for ids_T, real_T in zip(batch.input_ids, batch.attention_mask, strict=True):
            logits_NV = model(input_ids=ids_T[real_T][None], use_cache=False).logits[0]
            empty_TV = logits_NV.new_zeros(len(ids_T), logits_NV.shape[1])
            rows.append(empty_TV.index_copy(0, real_T.nonzero().squeeze(1), logits_NV))
        return torch.stack(rows)
