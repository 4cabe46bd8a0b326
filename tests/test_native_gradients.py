"""Gradients of all weights with the native kernels: what plain torch computes, to rounding, and packed as apart."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from lema_core.checkpoint import bind_tensors, read_hf_config, read_manifest
from lema_core.device import CpuDevice
from lema_core.ops.kernels import choose_kernels
from lema_core.plugins import get_plugin_manager
from lema_core.records import load_object
from lema_core.runtime.batch import TokenBatch
from lema_core.runtime.piece_run import Level
from lema_core.runtime.runner import ModelRunner, TrainPass
from lema_core.store.model import cut_model
from lema_core.store.store import TensorStore
from lema_core.testing.comparing import assert_all_close, assert_equal
from lema_core.testing.forced import ForcedSchedule
from lema_core.testing.gradients import GradientsInMemory
from lema_cuda.library import refusals

SIZES = {
    "vocab_size": 97, "hidden_size": 64, "intermediate_size": 80, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64,
}  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "llama": SIZES | {"attention_bias": True, "tie_word_embeddings": True},
    "gpt2": {"vocab_size": 97, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 64},
    "lfm2": SIZES | {"layer_types": ["conv", "full_attention"], "block_auto_adjust_ff_dim": False, "conv_bias": True},
    "mixtral": SIZES | {"num_local_experts": 5, "num_experts_per_tok": 2, "output_router_logits": True},
}
#: rows and tokens
SHAPES = (2, 9), (1, 13), (3, 7), (1, 33)
R, K, G = Level.RECOMPUTE, Level.KEEP, Level.GRAPH


@pytest.fixture(autouse=True)
def native() -> None:
    if reasons := refusals():
        pytest.skip("; ".join(reasons))


@pytest.fixture(scope="module", params=list(MODELS))
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(request.param, **MODELS[request.param]))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += torch.randn(parameter.shape) * 0.05
    path = tmp_path_factory.mktemp(request.param)
    model.to(torch.bfloat16).save_pretrained(path)
    return path


def gradients(folder: Path, backend: str, groups: tuple, levels: tuple) -> dict[str, Tensor]:
    """Of every weight, and the loss."""
    hf_config = read_hf_config(folder)
    adapter = load_object(get_plugin_manager().match_architecture(hf_config).adapter).from_hf_config(hf_config)
    model = cut_model(adapter, bind_tensors(read_manifest(folder), adapter), 9_000)
    weights = GradientsInMemory(adapter, [spec.name for spec in adapter.tensors()])
    batches = []
    for seed, shape in enumerate(SHAPES):
        ids = torch.randint(0, 97, shape, generator=torch.Generator().manual_seed(seed))
        batches.append(TokenBatch.of(ids, None, ids))
    with TensorStore(model, CpuDevice(), model.sizes(None, None, True)) as store:
        kernels = choose_kernels(backend, "cpu")
        runner = ModelRunner(adapter, model, store, {}, kernels, gradients=weights)
        runner.scheduler = ForcedSchedule(runner.scheduler.costs, groups, levels)
        loss = runner.train_step(batches, TrainPass(0, 7, embeds=True), 1)
    return {"loss": torch.tensor(loss), **weights.totals}


def test_native_kernels_give_what_plain_torch_gives(folder: Path) -> None:
    together = ((0, 1, 2, 3),)
    found, expected = (gradients(folder, backend, together, (R, R)) for backend in ("cpp", "python"))
    assert_all_close("gradients", found, expected)


def test_no_schedule_changes_a_bit(folder: Path) -> None:
    expected = gradients(folder, "cpp", ((0,), (1,), (2,), (3,)), (R, R))
    for groups, levels in ((((0, 1, 2, 3),), (K, G)), (((0, 1), (2, 3)), (G, R))):
        assert_equal(f"{groups} {levels}", gradients(folder, "cpp", groups, levels), expected)
