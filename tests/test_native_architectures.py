"""Every architecture with the native kernels: what plain torch computes, to rounding, and no bit depends on memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from lema import LemaConfig, LemaModel
from lema_core.runtime.batch import TokenBatch
from lema_core.runtime.piece_run import Level
from lema_core.runtime.runner import TrainPass
from lema_core.testing.forced import ForcedSchedule
from lema_cuda.library import refusals
from lema_cuda.testing import AMX

SIZES = {
    "vocab_size": 97, "hidden_size": 64, "intermediate_size": 80, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64,
}  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "mistral": SIZES | {"sliding_window": 5},
    "gpt2": {"vocab_size": 97, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 64, "attn_pdrop": 0.0},
    "lfm2": SIZES | {"layer_types": ["conv", "full_attention"], "block_auto_adjust_ff_dim": False},
    "mixtral": SIZES | {"num_local_experts": 5, "num_experts_per_tok": 2, "output_router_logits": True},
    "lfm2_moe": SIZES
    | {"layer_types": ["conv", "full_attention"], "num_experts": 5, "num_experts_per_tok": 3}
    | {"num_dense_layers": 1, "moe_intermediate_size": 48},
    "qwen3": SIZES | {"head_dim": 24, "tie_word_embeddings": True},
}
#: those with operations of their own run with every test, the others are slow
QUICK = "gpt2", "mixtral"
TYPES = [t if t in QUICK else pytest.param(t, marks=pytest.mark.slow) for t in MODELS]
#: rows and tokens, and where the first row is padded
SHAPES = ((2, 9, ""), (1, 13, ""), (3, 7, "left"), (1, 33, ""))
APART, TOGETHER = tuple((i,) for i in range(len(SHAPES))), (tuple(range(len(SHAPES))),)
R, K, G = Level.RECOMPUTE, Level.KEEP, Level.GRAPH


@pytest.fixture(autouse=True)
def native() -> None:
    if reasons := refusals():
        pytest.skip("; ".join(reasons))


@pytest.fixture(scope="module", params=TYPES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(request.param, **MODELS[request.param]))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += torch.randn(parameter.shape) * 0.05
    path = tmp_path_factory.mktemp(request.param)
    model.to(torch.bfloat16).save_pretrained(path)
    return path


def batches() -> list[TokenBatch]:
    generator = torch.Generator().manual_seed(3)
    found = []
    for rows, tokens, padding in SHAPES:
        ids = torch.randint(0, 97, (rows, tokens), generator=generator)
        mask = torch.ones_like(ids)
        if padding:
            mask[0, :2] = 0
        found.append(TokenBatch.of(ids, mask, ids))
    return found


def computed(folder: Path, groups: tuple, levels: tuple, **options: Any) -> dict[str, Tensor]:
    """Loss, logits and gradients of a step, and logits of an evaluation."""
    config = LemaConfig(model_name_or_path=str(folder), lora_rank=4, gradient_accumulation_steps=4, **options)
    with LemaModel(config) as model:
        model.initialize_lora()
        generator = torch.Generator().manual_seed(1)
        values = {n: torch.randn(p.shape, generator=generator) * 0.1 for n, p in model.lora.parameters().items()}
        model.lora.copy_(values)
        runner = model.runner
        runner.scheduler = ForcedSchedule(runner.scheduler.costs, groups, levels)
        logits: dict[int, Tensor] = {}
        loss = runner.train_step(batches(), TrainPass(0, seed=7), 1, logits)
        gradients = {name: parameter.grad.clone() for name, parameter in model.lora.parameters().items()}
        evaluated = runner.logits(batches()[2])
        real = batches()[2].attention_mask
    return {"loss": torch.tensor(loss), "logits": logits[0], "evaluated": evaluated[real], **gradients}


def test_it_is_what_plain_torch_computes(folder: Path, native_instructions: str) -> None:
    found, expected = (computed(folder, TOGETHER, (R, R), backend=backend) for backend in ("cpp", "python"))
    # One product agrees to 1e-6; a gradient went through a dozen of them. Sums in AMX's tiles are nearer to fp64 than
    # plain torch's are (test_native_judge.py) and share none of their roundings, which a router enlarges.
    bound = 2e-5 if native_instructions == AMX else 5e-6
    for name, tensor in expected.items():
        assert (found[name] - tensor).norm() <= bound * tensor.norm() + 1e-9, name


def test_no_schedule_and_no_window_changes_a_bit(folder: Path) -> None:
    expected = computed(folder, APART, (R, R), backend="cpp", strategy="resident")
    for groups, levels, options in (
        (TOGETHER, (K, G), {"weights_ram": "260KB"}),
        (((0, 1), (2, 3)), (G, R), {"weights_ram": "300KB"}),
    ):
        found = computed(folder, groups, levels, backend="cpp", **options)
        assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
