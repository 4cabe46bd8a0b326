"""The oracle: micro-batches that pass a layer together, whatever is kept of it and whatever the windows, equal those
that pass one by one with everything resident, bit for bit; and a step holds what was expected of it."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from lema import LemaModel
from lema_core.runtime.batch import TokenBatch
from lema_core.runtime.piece_run import Level
from lema_core.runtime.runner import TrainPass
from lema_core.runtime.schedule import Groups
from lema_core.testing.allocations import peak_allocated
from lema_core.testing.forced import ForcedSchedule
from lema_cuda.library import refusals

R, K, G = Level.RECOMPUTE, Level.KEEP, Level.GRAPH
#: rows, tokens, padding
Spec = tuple[int, int, str]
#: one target, left padding, a register and a bit, nothing to learn, all full, and more than a matrix product's block
MIXED: tuple[Spec, ...] = ((1, 2, ""), (3, 7, "left"), (1, 33, ""), (1, 1, ""), (2, 16, "right"), (1, 130, ""))
LEARNING = 5
APART: Groups = ((0,), (1,), (2,), (3,), (4,))
TOGETHER: Groups = ((0, 1, 2, 3, 4),)


@pytest.fixture(params=["python", "cpp"])
def backend(request: pytest.FixtureRequest) -> str:
    if request.param == "cpp" and (reasons := refusals()):
        pytest.skip("; ".join(reasons))
    return request.param


def batch(seed: int, spec: Spec) -> TokenBatch:
    rows, tokens, padding = spec
    ids = torch.randint(0, 128, (rows, tokens), generator=torch.Generator().manual_seed(seed))
    mask = torch.ones_like(ids)
    if padding:
        mask[0, slice(0, 2) if padding == "left" else slice(-2, None)] = 0
    labels = ids.masked_fill(torch.arange(tokens) % 4 == 2, -100)
    return TokenBatch.of(ids, mask, labels)


def step(model: LemaModel, specs: Sequence[Spec], groups: Groups, levels: Sequence[Level]) -> dict[str, str]:
    """sha256 of loss, logits and every gradient of one step."""
    runner, parameters = model.runner, model.lora.parameters()
    runner.scheduler = ForcedSchedule(runner.scheduler.costs, groups, levels)
    for parameter in parameters.values():
        parameter.grad = None
    logits: dict[int, torch.Tensor] = {}
    batches = [batch(seed, spec) for seed, spec in enumerate(specs)]
    first_layer = model.lora.first_layer(model.adapter.n_layers)
    loss = runner.train_step(batches, TrainPass(first_layer, 7), 3, logits)
    digests = {f"logits {index}": digest(each) for index, each in logits.items()}
    digests |= {name: digest(parameter.grad) for name, parameter in parameters.items()}
    return digests | {"loss": digest(torch.tensor(loss, dtype=torch.float64))}


def digest(tensor: torch.Tensor) -> str:
    assert torch.isfinite(tensor).all()
    return hashlib.sha256(tensor.detach().contiguous().numpy().tobytes()).hexdigest()


@pytest.mark.parametrize(
    ("variant", "sizes", "options", "groups", "levels"),
    [
        ("untied", {}, {}, TOGETHER, (R, R, R)),
        ("untied", {"intermediate_size": 90, "hidden_size": 48}, {"lora_dropout": 0.2}, TOGETHER, (K, G, K)),
        ("biased", {"intermediate_size": 75}, {"lora_dropout": 0.2}, ((0, 1), (2,), (3, 4)), (G, K, R)),
        ("bf16", {"hidden_size": 160, "intermediate_size": 300}, {"num_threads": 2}, TOGETHER, (R, K, G)),
        ("wide_heads", {}, {"trainable_layers": ["last:1"]}, ((0, 1, 2, 3), (4,)), (R, R, K)),
        ("tied", {}, {"lora_target_modules": ["lm_head", "v_proj"]}, TOGETHER, (K, K, K)),
    ],
    ids=["recomputed", "odd sizes", "biased", "two threads", "last layer", "head"],
)
def test_no_schedule_changes_a_bit(
    backend: str,
    variant: str,
    sizes: dict[str, int],
    options: dict[str, Any],
    groups: Groups,
    levels: tuple[Level, ...],
    llamas,
    small_granules,
) -> None:
    folder = llamas.folder(variant, num_hidden_layers=3, **sizes)
    options = {"backend": backend, **options}
    resident = llamas.with_lora(folder, strategy="resident", **options)
    expected = step(resident, MIXED, APART, (R, R, R))
    resident.close()
    cut = llamas.cut(llamas.open(folder), small_granules)
    for budget in (cut.smallest_bytes, cut.smallest_bytes + 4 * cut.layout.slot_bytes):
        model = llamas.with_lora(folder, weights_ram=f"{budget}B", **options)
        assert step(model, MIXED, groups, levels) == expected
        model.close()


@pytest.mark.parametrize("lora_dropout", [0.0, 0.1])
def test_a_step_holds_what_was_expected(backend: str, lora_dropout: float, llamas) -> None:
    """What a kernel makes at its first call, and keeps, is not counted."""
    folder = llamas.folder("bf16", num_hidden_layers=3, hidden_size=128, intermediate_size=344)
    model = llamas.with_lora(folder, backend=backend, num_threads=1, lora_dropout=lora_dropout)
    runner = model.runner
    mixed = ((1, 96, ""), (2, 50, "right"), (1, 37, ""))
    for specs, groups, levels, logits in (
        (mixed, ((0, 1, 2),), (R, R, R), None),
        (mixed, ((0, 1), (2,)), (K, K, K), {}),
        (((2, 90, "left"), (1, 64, "")), ((0, 1),), (R, K, G), None),
        (((1, 250, ""),), ((0,),), (G, G, G), None),
        (((1, 250, ""),), ((0,),), (R, R, R), {}),
    ):
        runner.scheduler = forced = ForcedSchedule(runner.scheduler.costs, groups, levels)
        batches = [batch(seed, spec) for seed, spec in enumerate(specs)]

        def work(batches=batches, logits=logits) -> None:
            runner.train_step(batches, TrainPass(0, 7), 3, logits)

        work()
        taken, expected = peak_allocated(work), forced.expected_bytes
        assert taken <= expected <= 1.15 * taken, f"{specs} {groups}: {taken:,} taken, {expected:,} expected"
