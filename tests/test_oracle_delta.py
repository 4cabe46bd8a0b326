"""Merged deltas of every architecture, beside transformers' model with the same numbers added to its parameters."""

from __future__ import annotations

import re
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from lema import LemaConfig, LemaModel
from lema._utils._conversion import adapter_of, merge_delta
from lema_core.checkpoint import bind_tensors, read_manifest
from lema_train.base_identity import identify_base
from lema_train.delta import read_delta, write_delta

SIZES = {
    "vocab_size": 61, "hidden_size": 48, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64,
}  # fmt: skip
EXPERTS = {"num_local_experts": 3, "num_experts_per_tok": 2}
MODELS: dict[str, dict[str, Any]] = {
    "llama": SIZES | {"attention_bias": True},
    "mistral": SIZES | {"sliding_window": 4},
    "gpt2": {"vocab_size": 61, "n_embd": 48, "n_layer": 2, "n_head": 4, "n_positions": 64},
    "lfm2": SIZES | {"layer_types": ["conv", "full_attention"]},
    "mixtral": SIZES | EXPERTS,
    "lfm2_moe": SIZES
    | {"layer_types": ["conv", "full_attention"], "num_experts": 3, "num_experts_per_tok": 2}
    | {"num_dense_layers": 1, "moe_intermediate_size": 24},
    "qwen3": SIZES | {"head_dim": 20, "tie_word_embeddings": True},
}
IDS = torch.arange(24).reshape(2, 12) * 5 % 61


@pytest.fixture(autouse=True)
def setting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.set_num_threads(1)
    monkeypatch.setenv("LEMA_CACHE", str(tmp_path / "cache"))


def write_base(folder: Path, model_type: str, dtype: torch.dtype, stacked: bool) -> None:
    """``stacked``: experts as transformers has them in memory, else as it writes them, one by one."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **MODELS[model_type]))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += torch.randn(parameter.shape) * 0.1
    model.to(dtype).save_pretrained(folder)
    if stacked:
        save_file(model.state_dict(), folder / "model.safetensors", metadata={"format": "pt"})


def opened(folder: Path) -> torch.nn.Module:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def weight(model: torch.nn.Module, name: str) -> Tensor:
    """transformers' weight of a canonical name, not a copy; of an expert's, its part of the stack."""
    weights = model.state_dict()
    found = re.fullmatch(r"(.*\.experts)\.(\d+)\.(gate|up|down)_proj\.weight", name)
    if found is None:
        return weights[name]
    experts, number, which = found[1], int(found[2]), found[3]
    if which == "down":
        return weights[f"{experts}.down_proj"][number]
    gate, up = weights[f"{experts}.gate_up_proj"][number].chunk(2)
    return gate if which == "gate" else up


def logits(model: torch.nn.Module) -> Tensor:
    with torch.no_grad():
        return model(IDS).logits


def by_lema(folder: Path) -> Tensor:
    with LemaModel(LemaConfig(model_name_or_path=str(folder), strategy="resident")) as model:
        return model.logits(IDS)


def assert_close(found: Tensor, expected: Tensor, tolerance: float = 1e-5) -> None:
    """By norm."""
    assert (found - expected).norm() <= tolerance * expected.norm()


#: the others are slow
QUICK = "gpt2", "mixtral, stacked"


@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "model_type",
    [t if t in QUICK else pytest.param(t, marks=pytest.mark.slow) for t in (*MODELS, "mixtral, stacked")],
)
def test_it_is_transformers_with_the_delta_added(tmp_path: Path, model_type: str, dtype: torch.dtype) -> None:
    base, out = tmp_path / "base", tmp_path / "out"
    write_base(base, model_type.partition(",")[0], dtype, model_type.endswith("stacked"))
    manifest = read_manifest(base)
    adapter = adapter_of(manifest)
    generator = torch.Generator().manual_seed(1)
    values = {
        spec.name: torch.randn(spec.shape, generator=generator) * 0.1
        for number, spec in enumerate(adapter.tensors())
        if spec.tied_to is None and number % 5 != 4
    }
    rows = [(name, torch.float32, tuple(tensor.shape), lambda t=tensor: t) for name, tensor in values.items()]
    write_delta(tmp_path / "delta.safetensors", rows, identify_base(manifest, str(base)))

    report = merge_delta(base, tmp_path, out, say=lambda line: None)
    before, after = load_file(base / "model.safetensors"), load_file(out / "model.safetensors")
    assert after.keys() == before.keys()
    changed = {name for name in after if not torch.equal(after[name], before[name])}
    assert len(changed) == report.changed
    assert sum(before[name].numel() for name in changed) >= sum(tensor.numel() for tensor in values.values())

    live, merged = opened(base), opened(out)
    delta, bound = read_delta(tmp_path), bind_tensors(manifest, adapter)
    for spec in adapter.tensors():
        expected = weight(live, spec.name).clone()
        if spec.name in values:
            expected += values[spec.name]
        if spec.tied_to is None:
            found = delta.updated(spec.name, bound[spec.name], 0, spec.shape[0])
            assert torch.equal(found, expected), spec.name
            assert torch.equal(weight(merged, spec.name), expected.to(dtype).float()), spec.name
            assert found.numel() == prod(spec.shape)
    base_logits = logits(live)
    for name, tensor in values.items():
        weight(live, name).add_(tensor)
    if dtype == torch.float32:
        assert_close(logits(merged), logits(live))
        assert_close(by_lema(out), logits(live))
        assert (logits(live) - base_logits).norm() > 1e-2 * base_logits.norm()
