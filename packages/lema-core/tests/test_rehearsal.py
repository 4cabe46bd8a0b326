"""A rehearsal computes pieces as a step does, leaves what is trained alone, and finds how much longer they take."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from lema_core.device import CpuDevice
from lema_core.ops.kernels import Kernels
from lema_core.ops.linear import LinearKernel
from lema_core.planning.hardware import Hardware
from lema_core.runtime.dry_run import DryRun
from lema_core.runtime.rehearsal import Rehearsal
from lema_core.runtime.schedule import MicroBatch, Scheduler, StepCosts, StepShape
from lema_core.store.model import StreamedModel, cut_model
from lema_core.testing.toy import ToyAdapter, ToyConfig, linear_names, toy_updates, write_toy

CONFIG = ToyConfig(n_layers=3, hidden_size=64, feed_forward=96)
RATES = Hardware("by hand", 10**9, None, 1e9, None, 1e9, ((1, 1e9),), "float32", 1e-6, "by hand")
SHAPE = StepShape((MicroBatch(2, 6, 10), MicroBatch(1, 9, 8, masks=1)), 0)


class CountingKernel(LinearKernel):
    """Remembers the weights it saw, by shape, and how many columns they were multiplied with."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[tuple[int, ...]] = set()
        self.columns: set[int] = set()

    def forward(self, weight_RK, x, out_RN, update=None, segments=()) -> None:
        assert bool(weight_RK.isfinite().all())
        self.seen.add(tuple(weight_RK.shape))
        self.columns.add(out_RN.shape[1])
        super().forward(weight_RK, x, out_RN, update, segments)


@pytest.fixture
def model(tmp_path: Path) -> StreamedModel:
    return cut_model(ToyAdapter(CONFIG), write_toy(tmp_path, CONFIG, dtypes=(torch.bfloat16,)))


def rehearse(
    model: StreamedModel, kernel: LinearKernel, updates: dict, rates: Hardware = RATES, window: int = 0
) -> float:
    adapter, kernels = ToyAdapter(CONFIG), Kernels(linear=kernel)
    costs = StepCosts(DryRun(adapter, model, updates, torch.float32, kernels))
    rehearsal = Rehearsal(adapter, model, updates, torch.float32, kernels, CpuDevice())
    return rehearsal.pace(costs, SHAPE, Scheduler(costs).choose(SHAPE), rates, window)


def test_every_product_of_a_block_and_of_the_head_is_computed(model: StreamedModel) -> None:
    kernel = CountingKernel()
    assert rehearse(model, kernel, toy_updates(CONFIG, linear_names(CONFIG))) > 0
    weights = {part.shape for parts in model.layout.parts.values() for part in parts if len(part.shape) == 2}
    assert weights <= kernel.seen
    assert kernel.columns == {12 + 9, 10 + 8}, "micro-batches pass a block together; the head sees tokens with a target"


def test_what_is_trained_stays_as_it_was(model: StreamedModel) -> None:
    updates = toy_updates(CONFIG, linear_names(CONFIG))
    before = {name: [p.detach().clone() for p in update.parameters()] for name, update in updates.items()}
    rehearse(model, LinearKernel(), updates)
    for name, update in updates.items():
        for now, then in zip(update.parameters(), before[name], strict=True):
            assert torch.equal(now, then) and now.grad is None


def test_rates_twice_as_high_make_a_pace_twice_as_long(model: StreamedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = iter(range(10**6))
    monkeypatch.setattr("lema_core.runtime.rehearsal.time.perf_counter", lambda: float(next(ticks)))
    updates = toy_updates(CONFIG, linear_names(CONFIG))
    slow = rehearse(model, LinearKernel(), updates)
    fast = replace(RATES, gemm=((1, 2e9),), memory_bytes_per_s=2e9, op_overhead_s=0.5e-6)
    assert rehearse(model, LinearKernel(), updates, fast) == pytest.approx(2 * slow)


def test_weights_are_spread_over_memory_where_a_run_has_it(model: StreamedModel) -> None:
    places: set[int] = set()

    class Placed(LinearKernel):
        def forward(self, weight_RK, x, out_RN, update=None, segments=()) -> None:
            if weight_RK.dtype == torch.bfloat16:
                places.add(weight_RK.data_ptr())
            super().forward(weight_RK, x, out_RN, update, segments)

    rehearse(model, Placed(), {}, window=0)
    few = len(places)
    places.clear()
    rehearse(model, Placed(), {}, window=1 << 20)
    assert len(places) > 5 * few
