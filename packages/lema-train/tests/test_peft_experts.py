"""LoRA on experts as files, both ways with PEFT."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from peft import LoraConfig as PeftConfig
from peft import PeftModel, get_peft_model
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

from lema_core.errors import ConfigError
from lema_core.ops.adamw import TorchAdamW
from lema_core.selection import select_modules
from lema_models.lfm2_moe import Lfm2MoeAdapter
from lema_models.mixtral import MixtralAdapter
from lema_train.lora import LoraConfig, LoraWeights
from lema_train.method import LoraMethod
from lema_train.peft_format import load_peft, save_peft

MIXTRAL = {
    "vocab_size": 61, "hidden_size": 16, "intermediate_size": 12, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "num_local_experts": 3, "num_experts_per_tok": 2,
}  # fmt: skip
LFM2 = {
    "vocab_size": 61, "hidden_size": 16, "intermediate_size": 12, "moe_intermediate_size": 10, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 1, "num_experts": 3, "num_experts_per_tok": 2,
    "num_dense_layers": 1, "layer_types": ["conv", "full_attention"],
}  # fmt: skip
ADAPTERS = {"mixtral": (MixtralAdapter, MIXTRAL), "lfm2_moe": (Lfm2MoeAdapter, LFM2)}


class Options:
    lora_rank = 2
    lora_alpha = 6.0
    lora_dropout = 0.0
    lora_target_modules: str | list[str] = "all-linear"
    use_rslora = False
    trainable_layers: tuple[str, ...] = ()
    seed = 0


def model_of(model_type: str) -> torch.nn.Module:
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **ADAPTERS[model_type][1]))


def adapter_of(model_type: str):
    adapter, config = ADAPTERS[model_type]
    return adapter.from_hf_config(AutoConfig.for_model(model_type, **config).to_dict())


@pytest.mark.parametrize("model_type", ADAPTERS)
def test_all_linear_is_what_peft_means(model_type: str, tmp_path: Path) -> None:
    """The same modules, ranks and scales, and so the same files."""
    adapter = adapter_of(model_type)
    weights = LoraMethod.create(adapter, Options(), torch.device("cpu"), TorchAdamW()).lora
    save_peft(tmp_path, weights, adapter, None)
    config = PeftConfig(r=2, lora_alpha=6, target_modules="all-linear", task_type="CAUSAL_LM")
    get_peft_model(model_of(model_type), config).save_pretrained(tmp_path / "theirs", save_embedding_layers=False)
    shapes = [
        {name: tensor.shape for name, tensor in load_file(folder / "adapter_model.safetensors").items()}
        for folder in (tmp_path, tmp_path / "theirs")
    ]
    assert shapes[0] == shapes[1]
    ours, theirs = (json.loads((f / "adapter_config.json").read_text()) for f in (tmp_path, tmp_path / "theirs"))
    assert (ours["rank_pattern"], ours["alpha_pattern"]) == (theirs["rank_pattern"], theirs["alpha_pattern"])


@pytest.mark.parametrize("model_type", ADAPTERS)
@pytest.mark.parametrize(
    "targets, layers",
    [
        (["gate_up_proj", "down_proj"], None),
        (["down_proj"], ["last:1"]),
        (["gate_up_proj", "q_proj"], [1]),
        (["gate", "experts.down_proj", "v_proj"], None),
    ],
)
def test_files_go_both_ways(model_type: str, targets: list[str], layers: list, tmp_path: Path) -> None:
    adapter = adapter_of(model_type)
    selection = select_modules(adapter, targets, layers)
    config = LoraConfig(rank=2, alpha=6.0, target_modules=targets, layers=layers)
    weights = LoraWeights(config, selection.modules)
    generator = torch.Generator().manual_seed(3)
    values = {name: torch.randn(p.shape, generator=generator) for name, p in weights.parameters().items()}
    weights.copy_(values)
    save_peft(tmp_path, weights, adapter, None)
    model = PeftModel.from_pretrained(model_of(model_type), tmp_path)
    stacked = load_file(tmp_path / "adapter_model.safetensors")
    held = {name.replace(".default", ""): p for name, p in model.named_parameters() if "lora_" in name}
    assert held.keys() == stacked.keys()
    assert all(torch.equal(held[name], tensor) for name, tensor in stacked.items())
    model.save_pretrained(tmp_path / "again", save_embedding_layers=False)
    for folder in (tmp_path, tmp_path / "again"):
        found = load_peft(folder, adapter).parameters()
        assert found.keys() == values.keys()
        assert all(torch.equal(found[name], value) for name, value in values.items())


def test_no_dropout_on_experts() -> None:
    options = Options()
    options.lora_dropout = 0.1
    with pytest.raises(ConfigError, match="lora_dropout: 0 expected where experts train"):
        LoraMethod.create(adapter_of("mixtral"), options, torch.device("cpu"), TorchAdamW())


def test_all_linear_without_what_is_excluded(tmp_path: Path) -> None:
    """A config that still says all-linear, as PEFT's callers write it, beside exclude_modules."""
    adapter = adapter_of("lfm2_moe")
    config = PeftConfig(r=2, target_modules="all-linear", exclude_modules=["in_proj"], task_type="CAUSAL_LM")
    get_peft_model(model_of("lfm2_moe"), config).save_pretrained(tmp_path, save_embedding_layers=False)
    written = json.loads((tmp_path / "adapter_config.json").read_text())
    (tmp_path / "adapter_config.json").write_text(json.dumps(written | {"target_modules": "all-linear"}))
    modules = {spec.module for spec in load_peft(tmp_path, adapter).modules}
    assert modules == {spec.module for spec in adapter.all_linear() if not spec.module.endswith("in_proj")}
