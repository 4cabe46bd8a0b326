"""Gradients of weights over whole steps of the toy model: against autograd, and bit for bit among schedules."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import pytest
import torch
from torch import Tensor

from lema_core.checkpoint import TensorInfo, read_tensor
from lema_core.device import CpuDevice, Device
from lema_core.ops.low_rank import LowRankUpdate
from lema_core.runtime.batch import TokenBatch
from lema_core.runtime.piece_run import Level
from lema_core.runtime.runner import ModelRunner, TrainPass
from lema_core.runtime.schedule import Groups
from lema_core.testing.comparing import assert_all_close
from lema_core.testing.forced import ForcedSchedule
from lema_core.testing.gradients import GradientsInMemory
from lema_core.testing.toy import PlainToy, ToyAdapter, ToyConfig, granules_of, open_toy, write_toy

R, K, G = Level.RECOMPUTE, Level.KEEP, Level.GRAPH
UNTIED = ToyConfig(n_layers=3)
TIED = ToyConfig(n_layers=2, tied=True, biased=False)
GRANULE_BYTES = 1500
Toy = tuple[ToyConfig, dict[str, TensorInfo]]


@pytest.fixture(scope="module", params=[UNTIED, TIED], ids=["untied", "tied"])
def toy(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Toy:
    return request.param, write_toy(tmp_path_factory.mktemp("toy"), request.param, 3)


def weights_of(config: ToyConfig) -> list[str]:
    return [spec.name for spec in ToyAdapter(config).tensors() if spec.tied_to is None]


def opened(
    toy: Toy,
    trained: Collection[str],
    updates: dict[str, LowRankUpdate] | None = None,
    slots: int | None = 3,
    device: Device | None = None,
) -> tuple[ModelRunner, GradientsInMemory]:
    config, tensors = toy
    cut = granules_of(config, tensors, GRANULE_BYTES)
    near = None if slots is None else slots * cut.layout.slot_bytes
    ram = None if slots is None else cut.smallest_bytes - cut.layout.slot_bytes + near
    gradients = GradientsInMemory(ToyAdapter(config), trained)
    device = device or CpuDevice()
    return open_toy(config, tensors, device, updates, ram, near, GRANULE_BYTES, gradients=gradients), gradients


def batch(seed: int, rows: int, tokens: int, pad: str = "") -> TokenBatch:
    ids = torch.randint(0, 37, (rows, tokens), generator=torch.Generator().manual_seed(seed))
    mask = torch.ones_like(ids, dtype=torch.bool)
    if pad:
        mask[-1, slice(0, 2) if pad == "left" else slice(-2, None)] = False
    labels = ids.clone()
    labels[0, 1:3] = -100
    labels[-1, 2:3] = -100  # padding before it predicts nothing
    return TokenBatch.of(ids, mask, labels)


BATCHES = [batch(1, 2, 7, "right"), batch(2, 1, 5), batch(3, 3, 6, "left"), batch(4, 1, 2), batch(5, 1, 19)]
#: of these, those with a target
LEARNING = 4


def step(
    runner: ModelRunner,
    gradients: GradientsInMemory,
    batches: Sequence[TokenBatch],
    how: TrainPass,
    groups: Groups | None = None,
    levels: Sequence[Level] | None = None,
) -> tuple[float, dict[str, Tensor]]:
    gradients.begin_step()
    for parameter in (p for update in runner._ops.updates.values() for p in update.parameters()):
        parameter.grad = None
    if groups is not None:
        runner.scheduler = ForcedSchedule(runner.scheduler.costs, groups, levels)
    loss = runner.train_step(batches, how, 5)
    found = {name: total.clone() for name, total in gradients.totals.items()}
    for name, update in runner._ops.updates.items():
        found |= {f"{name}.lora_A": update.lora_A.grad.clone(), f"{name}.lora_B": update.lora_B.grad.clone()}
    return loss, found


def autograds(toy: Toy, batches: Sequence[TokenBatch], updates=None) -> tuple[float, dict[str, Tensor]]:
    config, tensors = toy
    weights = {name: read_tensor(tensors[name]).requires_grad_() for name in weights_of(config)}
    if config.tied:
        weights["head.weight"] = weights["model.tokens.weight"]
    oracle = PlainToy(config, weights, updates)
    n_targets = sum(one.n_targets for one in batches)
    loss = sum(oracle.loss_sum(b.input_ids, b.labels, b.attention_mask) for b in batches) / n_targets
    loss.backward()
    found = {name: weights[name].grad for name in weights_of(config)}
    for name, update in (updates or {}).items():
        found |= {f"{name}.lora_A": update.lora_A.grad, f"{name}.lora_B": update.lora_B.grad}
    return loss.item(), found


@pytest.mark.parametrize("level", list(Level))
def test_gradients_of_every_weight_are_autograds(toy: Toy, level: Level) -> None:
    """A tied head and its embedding get the sum of both."""
    config, _ = toy
    runner, gradients = opened(toy, weights_of(config))
    groups = (0, 1), (2, 3)
    with runner.store:
        how = TrainPass(0, 7, embeds=True)
        loss, found = step(runner, gradients, BATCHES, how, groups, [level] * config.n_layers)
    expected_loss, expected = autograds(toy, BATCHES)
    assert loss == pytest.approx(expected_loss, rel=1e-5)
    assert all(each.norm() > 0 for each in found.values())
    assert_all_close("gradients", found, expected)
    assert gradients.completed == [*reversed(range(config.n_layers)), None]
