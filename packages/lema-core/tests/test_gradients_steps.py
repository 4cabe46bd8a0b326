"""Gradients of weights over whole steps of the toy model: against autograd, and bit for bit among schedules."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor

from lema_core.checkpoint import TensorInfo, read_tensor, write_safetensors
from lema_core.device import CpuDevice, Device
from lema_core.ops.context import ForwardContext
from lema_core.ops.kernels import Kernels
from lema_core.ops.low_rank import LowRankUpdate
from lema_core.ops.streamed import StreamedOps
from lema_core.runtime.batch import TokenBatch
from lema_core.runtime.piece_run import Level
from lema_core.runtime.runner import ModelRunner, TrainPass
from lema_core.runtime.schedule import Groups
from lema_core.store.model import cut_model
from lema_core.store.store import TensorStore
from lema_core.testing.comparing import assert_all_close, assert_equal
from lema_core.testing.forced import ForcedSchedule
from lema_core.testing.gradients import GradientsInMemory
from lema_core.testing.simulated import SimulatedAccelerator
from lema_core.testing.toy import (
    PlainToy,
    ToyAdapter,
    ToyConfig,
    granules_of,
    open_toy,
    toy_tensors,
    toy_updates,
    write_toy,
)

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


@pytest.mark.parametrize("slots", [1, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("groups", "levels"),
    [
        (((0, 1, 2, 3),), (R, R, R)),
        (((0, 1, 2, 3),), (G, K, G)),
        (((0, 1), (2,), (3,)), (K, G, R)),
        (((0,), (1, 2, 3)), (K, K, K)),
    ],
)
def test_groups_levels_windows_and_devices_change_no_bit(toy: Toy, groups: Groups, levels, slots: int) -> None:
    """With LoRA on some of the linears too."""
    config, _ = toy
    n, how, modules = config.n_layers, TrainPass(0, 7, embeds=True), ["model.layers.1.q", "model.layers.0.down"]
    alone, gradients = opened(toy, weights_of(config), toy_updates(config, modules), None)
    with alone.store:
        expected = step(alone, gradients, BATCHES, how, tuple((i,) for i in range(LEARNING)), [R] * n)
    runner, gradients = opened(
        toy, weights_of(config), toy_updates(config, modules), slots, SimulatedAccelerator() if slots == 1 else None
    )
    with runner.store:
        found = step(runner, gradients, BATCHES, how, groups, levels[:n])
    assert found[0] == expected[0]
    assert_equal("gradients", found[1], expected[1])


def test_a_step_is_its_micro_batches_one_after_another(toy: Toy) -> None:
    """Each in a step of its own, with the weight of its targets, to the same accumulators."""
    config, _ = toy
    how, n_targets = TrainPass(0, 7, embeds=True), sum(one.n_targets for one in BATCHES)
    runner, gradients = opened(toy, weights_of(config))
    with runner.store:
        _, together = step(runner, gradients, BATCHES, how)
        gradients.begin_step()
        sums = {name: torch.zeros_like(total) for name, total in together.items()}
        for one in BATCHES:
            if one.n_targets:
                _, alone = step(runner, gradients, [one], how)
                for name, total in alone.items():
                    sums[name] += total * (one.n_targets / n_targets)
    assert_all_close("gradients", together, sums)


@pytest.mark.parametrize("name", ["model.layers.1.norm_2.weight", "model.layers.1.q.bias", "model.layers.1.v.weight"])
def test_one_tensor_alone(tmp_path: Path, name: str) -> None:
    """It gets what it gets among all; nothing below its block is run backward or again."""
    toy = UNTIED, write_toy(tmp_path, UNTIED, 3)
    _, expected = autograds(toy, BATCHES)
    for level in Level:
        runner, gradients = opened(toy, [name])
        with runner.store:
            _, found = step(runner, gradients, BATCHES, TrainPass(1, 7), ((0, 1, 2, 3),), [level] * 3)
        assert_all_close(f"{level.name}", found, {name: expected[name]})
        assert gradients.completed == [2, 1, None]


def test_lora_beside_trained_weights(toy: Toy) -> None:
    """On other modules of one call, and on the same one."""
    config, _ = toy
    modules, trained = ["model.layers.1.q", "model.layers.1.v", "head"], ["model.layers.1.k.weight", "head.weight"]
    trained.append("model.layers.1.v.weight")
    updates = toy_updates(config, modules)
    _, expected = autograds(toy, BATCHES, toy_updates(config, modules))
    runner, gradients = opened(toy, trained, updates)
    how = TrainPass(0, 7, embeds=True) if config.tied else TrainPass(1, 7)
    with runner.store:
        _, found = step(runner, gradients, BATCHES, how)
    assert len(found) == 2 * 3 + 3
    assert_all_close("gradients", found, {name: expected[name] for name in found})


def test_the_head_alone(toy: Toy) -> None:
    """No block is run backward, unless the head is the embedding too."""
    config, _ = toy
    runner, gradients = opened(toy, ["head.weight", "model.norm.weight"])
    how = TrainPass(0, 7, embeds=True) if config.tied else TrainPass(config.n_layers, 7)
    with runner.store:
        _, found = step(runner, gradients, BATCHES, how)
    _, expected = autograds(toy, BATCHES)
    assert_all_close("gradients", found, {name: expected[name] for name in found})
    assert gradients.completed[-1] is None and len(gradients.completed) == (config.n_layers if config.tied else 0) + 1


class DroppingToy(ToyAdapter):
    """Drops out of embeddings too, and scales them."""

    def embed(self, ops: StreamedOps, ids_BT: Tensor, ctx: ForwardContext) -> Tensor:
        scale_C = ops.vector("model.norm.weight")
        return ops.dropout(super().embed(ops, ids_BT, ctx) * scale_C, 0.5, "embedding")


@pytest.mark.parametrize("level", list(Level))
def test_the_gradient_belongs_to_the_loss_under_dropout(tmp_path: Path, level: Level) -> None:
    """B42. Along a direction in the space of all weights the loss grows as its gradient says, masks and all."""
    config = ToyConfig(n_layers=2, dropout=0.5)
    adapter, generator = DroppingToy(config), torch.Generator().manual_seed(0)
    tensors = write_toy(tmp_path, config)
    values = {name: read_tensor(tensors[name]) for name in weights_of(config)}
    ways = {name: torch.randn(value.shape, generator=generator) for name, value in values.items()}
    losses, found = {}, {}
    for shift in (0.0, 3e-3, -3e-3):
        folder = tmp_path / str(shift)
        folder.mkdir()
        moved = [
            (name, torch.float32, value.shape, partial(torch.add, value, ways[name], alpha=shift))
            for name, value in values.items()
        ]
        write_safetensors(folder / "toy-0.safetensors", moved, fsync=False)
        model, gradients = cut_model(adapter, toy_tensors(folder, config)), GradientsInMemory(adapter, values)
        with TensorStore(model, CpuDevice(), model.sizes(None, None, True)) as store:
            runner = ModelRunner(adapter, model, store, {}, Kernels(), gradients=gradients)
            how = TrainPass(0, 7, embeds=True)
            losses[shift], found[shift] = step(runner, gradients, BATCHES, how, ((0, 1), (2, 3)), [level] * 2)
    slope = sum((found[0.0][name] * ways[name]).sum().item() for name in values)
    measured = (losses[3e-3] - losses[-3e-3]) / 6e-3
    assert slope == pytest.approx(measured, rel=2e-2), f"{slope} {measured}"


def test_a_weight_that_nothing_was_added_to_stays_zero(toy: Toy) -> None:
    """Rows of an embedding that no token stands for."""
    runner, gradients = opened(toy, ["model.positions.weight"])
    with runner.store:
        step(runner, gradients, BATCHES, TrainPass(0, 7, embeds=True))
    longest = max(one.input_ids.shape[1] for one in BATCHES)
    total = gradients.totals["model.positions.weight"]
    # The last token predicts nothing, and nobody looks at it.
    assert total[: longest - 1].any(dim=1).all() and not total[longest - 1 :].any()
