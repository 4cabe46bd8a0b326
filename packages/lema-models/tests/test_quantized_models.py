"""Every architecture with quantized weights, in every format. Sizes are multiples of what a scale of NF4 is for."""

from __future__ import annotations

from typing import ClassVar

from lema_core.testing.adapter_quantized import QuantizedSuite
from lema_models.gpt2 import GPT2Adapter
from lema_models.lfm2 import Lfm2Adapter
from lema_models.lfm2_moe import Lfm2MoeAdapter
from lema_models.llama import LlamaAdapter
from lema_models.mistral import MistralAdapter
from lema_models.mixtral import MixtralAdapter

SIZES = {
    "vocab_size": 70,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}


class EveryFormat(QuantizedSuite):
    formats = ("int8", "int4-32", "int4-64", "int4-128", "nf4")
    slow_formats: ClassVar[frozenset[str]] = frozenset({"int4-64", "int4-128"})


class TestLlama(EveryFormat):
    adapter = LlamaAdapter
    hf_config = {"model_type": "llama", **SIZES}
    variants = {"untied": {}, "tied": {"tie_word_embeddings": True}}


class TestGPT2(EveryFormat):
    adapter = GPT2Adapter
    hf_config = {
        "model_type": "gpt2", "vocab_size": 70, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 64,
        "embd_pdrop": 0.0, "resid_pdrop": 0.0, "attn_pdrop": 0.0,
    }  # fmt: skip
    variants = {"tied": {}}


class TestMixtral(EveryFormat):
    adapter = MixtralAdapter
    hf_config = {"model_type": "mixtral", **SIZES, "num_local_experts": 4, "num_experts_per_tok": 2}
    variants = {"untied": {}}


class TestMistral(EveryFormat):
    adapter = MistralAdapter
    hf_config = {"model_type": "mistral", **SIZES, "sliding_window": 5}
    variants = {"window": {}}
    slow_formats = frozenset({"int8", "int4-64", "int4-128", "nf4"})


class TestLfm2(EveryFormat):
    adapter = Lfm2Adapter
    hf_config = {
        "model_type": "lfm2", **SIZES, "block_auto_adjust_ff_dim": False, "layer_types": ["conv", "full_attention"],
    }  # fmt: skip
    variants = {"tied": {}}
    slow_formats = frozenset({"int4-32", "int4-64", "int4-128"})


class TestLfm2Moe(EveryFormat):
    adapter = Lfm2MoeAdapter
    hf_config = {
        "model_type": "lfm2_moe", **SIZES, "moe_intermediate_size": 64, "num_experts": 4, "num_experts_per_tok": 2,
        "num_dense_layers": 1, "layer_types": ["conv", "full_attention"],
    }  # fmt: skip
    variants = {"tied": {}}
    slow_formats = frozenset({"int8", "int4-32", "int4-64", "int4-128"})
