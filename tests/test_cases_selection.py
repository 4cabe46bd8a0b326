"""Which tensors of every architecture train, and how many numbers that are; transformers' parameters are the oracle."""

from __future__ import annotations

import re

import pytest
import torch

from lema_core.adapter import ModelAdapter
from lema_core.plugins import get_plugin_manager
from lema_core.records import load_object
from lema_core.selection import select_tensors

SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
MODELS = {
    "llama": {"model_type": "llama", "attention_bias": True, "tie_word_embeddings": False, **SIZES},
    "llama_tied": {"model_type": "llama", "tie_word_embeddings": True, **SIZES},
    "mistral": {"model_type": "mistral", **SIZES},
    "mixtral": {"model_type": "mixtral", "num_local_experts": 3, **SIZES},
    "gpt2": {"model_type": "gpt2", "vocab_size": 64, "n_embd": 32, "n_layer": 4, "n_head": 4, "n_positions": 64},
    "lfm2": {"model_type": "lfm2", "layer_types": ["conv", "full_attention"] * 2, **SIZES},
    "lfm2_moe": {
        "model_type": "lfm2_moe",
        "layer_types": ["conv", "full_attention"] * 2,
        "num_experts": 4,
        "num_dense_layers": 1,
        "moe_intermediate_size": 24,
        **SIZES,
    },
}
LLAMA_CASES = [([], []), ([], ["last:2"]), (["q_proj", "mlp"], []), (["self_attn"], [1, 3]), (["input_layernorm"], [0])]
CASES = {
    "llama": [*LLAMA_CASES, (["q_proj.bias"], []), ([], ["head"])],
    "llama_tied": [*LLAMA_CASES, ([], ["emb"])],
    "mistral": LLAMA_CASES,
    "mixtral": [*LLAMA_CASES, (["experts"], []), (["experts.gate_up_proj"], [2]), (["mlp.gate"], ["first:2"])],
    "gpt2": [([], []), (["c_proj"], []), (["c_attn.bias"], ["last:1"]), (["attn", "ln_1"], [2]), ([], ["emb"])],
    "lfm2": [([], []), (["conv"], []), (["self_attn"], ["last:2"]), ([], ["first:1"]), (["operator_norm"], [])],
    "lfm2_moe": [([], []), ([], ["last:2"]), (["feed_forward"], []), (["experts.down_proj"], [3])],
}


def adapter_of(hf_config: dict[str, object]) -> ModelAdapter:
    architecture = get_plugin_manager().match_architecture(hf_config)
    return load_object(architecture.adapter).from_hf_config(hf_config)


def parameters_of(hf_config: dict[str, object]) -> dict[str, int]:
    """transformers' trainable tensors by name, tied ones once."""
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):
        module = AutoModelForCausalLM.from_config(AutoConfig.for_model(**hf_config))
    module.tie_weights()
    return {name: parameter.numel() for name, parameter in module.named_parameters()}


def expected(parameters: dict[str, int], modules: list[str], layers: list[object]) -> int:
    """The numbers of all parameters that have one of ``modules`` in their name, in one of ``layers``."""
    numbers = {"last:2": {2, 3}, "last:1": {3}, "first:1": {0}, "first:2": {0, 1}}
    blocks: set[int] = set().union(*(numbers.get(str(each), {each}) for each in layers))
    total = 0
    for name, count in parameters.items():
        layer = re.search(r"\.(?:layers|h)\.(\d+)\.", name)
        inside = not layers or (layer is not None and int(layer[1]) in blocks)
        if layers == ["emb"]:
            inside = re.search(r"\.(embed_tokens|wte|wpe)\.", name) is not None
        if layers == ["head"]:
            inside = "lm_head." in name
        if inside and (not modules or any(f".{module}." in f".{name}." for module in modules)):
            total += count
    return total


@pytest.mark.parametrize("name", MODELS)
def test_b28_selections_count_what_transformers_counts(name: str) -> None:
    adapter, parameters = adapter_of(MODELS[name]), parameters_of(MODELS[name])
    for modules, layers in CASES[name]:
        selection = select_tensors(adapter, modules, layers)
        assert selection.num_parameters == expected(parameters, modules, layers) > 0, (modules, layers)
        assert f"{selection.num_parameters:,} parameters" in selection.describe()


def test_b06_a_tied_head_alone_trains_what_it_shares_and_says_so() -> None:
    for name, shared in (("llama_tied", "model.embed_tokens.weight"), ("gpt2", "transformer.wte.weight")):
        selection = select_tensors(adapter_of(MODELS[name]), [], ["head"])
        assert [spec.name for spec in selection.tensors] == [shared]
        assert f"lm_head.weight is tied to {shared}" in selection.describe()
