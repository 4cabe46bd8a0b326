"""Predicted steps against cases by hand, and against the engine itself on a clock that only its own events move."""

from __future__ import annotations

import ctypes
import random
from dataclasses import replace
from pathlib import Path

import pytest
from torch import Tensor

from lema_core.checkpoint import TensorInfo
from lema_core.device import CpuDevice, Device
from lema_core.errors import BudgetError
from lema_core.planning.hardware import Hardware
from lema_core.planning.predict import (
    Span,
    compute_s,
    floor_s,
    predict_step,
    smallest_memory,
    steady_step,
    what_next_gb_buys,
)
from lema_core.store.granules import Granule, Part, Read
from lema_core.store.model import WindowSizes
from lema_core.store.planner import Load, TierPlan
from lema_core.store.step_plan import StepPlan, plan_step
from lema_core.store.store import TensorStore
from lema_core.store.trace import Trace, Work
from lema_core.testing.simulated import SimulatedAccelerator
from lema_core.testing.toy import ToyConfig, granules_of, write_toy


def machine(disk: float = 100.0, link: float | None = None, memory: float = 1e6, overhead: float = 0.0) -> Hardware:
    """1000 FLOP/s, and rates in bytes per second that are easy to calculate with."""
    return Hardware(
        "by hand", 10**9, 10**9 if link else None, disk, link, memory, ((1, 1000.0),), "float32", overhead, ""
    )


def granules(*sizes: int) -> list[Granule]:
    return [Granule(i, n, None, (f"t{i}",), (Read(Path("f"), 0, n, n, 0),)) for i, n in enumerate(sizes)]


def trace(accesses: list[int], flops: list[float], touched: list[float] | None = None) -> Trace:
    touched = touched or [0.0] * len(flops)
    return Trace("case", tuple(accesses), tuple(Work(f, 1, t) for f, t in zip(flops, touched, strict=True)))


# -- by hand


def tier(*entries: int | tuple[int, int]) -> TierPlan:
    """A plan from what each access finds: its granule where it is held, (granule, after) where it is loaded. Slots and
    what is held at the end do not matter to a prediction."""
    loads, load_at = [], []
    for position, entry in enumerate(entries):
        load_at.append(-1 if isinstance(entry, int) else len(loads))
        if not isinstance(entry, int):
            loads.append(Load(position, entry[0], 0, entry[1]))
    return TierPlan(tuple(loads), (), tuple(load_at), frozenset(), {})


def test_a_second_slot_hides_the_disk_behind_the_compute() -> None:
    """Reads take 1 s, products 2 s. The third read waits until the first slot is free at t = 3."""
    step = trace([0, 1, 2], [2000, 2000, 2000])
    plan = StepPlan(tier((0, -1), (1, -1), (2, 0)), None)
    found = predict_step(step, plan, granules(100, 100, 100), machine())
    assert [s for s in found.timeline if s.lane == "disk"] == [
        Span("disk", 0.0, 1.0, 0),
        Span("disk", 1.0, 2.0, 1),
        Span("disk", 3.0, 4.0, 2),
    ]
    assert [s for s in found.timeline if s.lane == "wait"] == [Span("wait", 0.0, 1.0, 0)]
    assert (found.step_s, found.compute_s, found.wait_s, found.disk_s, found.link_s) == (7.0, 6.0, 1.0, 3.0, 0.0)
    assert (found.read_bytes, found.copied_bytes, found.bound_by) == (300, 0, "compute")
    assert floor_s(step, found, machine()) == 6.0


def test_one_slot_hides_nothing() -> None:
    step = trace([0, 1, 2], [2000, 2000, 2000])
    found = predict_step(step, StepPlan(tier((0, -1), (1, 0), (2, 1)), None), granules(100, 100, 100), machine())
    assert (found.step_s, found.wait_s) == (9.0, 3.0)


def test_a_weight_is_given_back_before_what_follows_its_product() -> None:
    """The read of t1 needs the only slot; it goes on while 3 s of other work follow the product of t0."""
    step = trace([0, 1], [1000, 1000], [3e6, 0])
    found = predict_step(step, StepPlan(tier((0, -1), (1, 0)), None), granules(100, 200), machine())
    assert [s.start_s for s in found.timeline if s.lane == "disk"] == [0.0, 2.0]
    assert (found.step_s, found.wait_s, found.memory_s) == (1 + 1 + 3 + 1, 1.0, 3.0)
    assert found.bound_by == "memory"


def test_a_pace_stretches_all_that_is_computed_and_no_transfer() -> None:
    step = trace([0, 1], [1000, 1000], [3e6, 0])
    plan = StepPlan(tier((0, -1), (1, 0)), None)
    found = predict_step(step, plan, granules(100, 200), replace(machine(overhead=0.5), pace=2.0))
    assert [(s.start_s, s.stop_s) for s in found.timeline if s.lane == "disk"] == [(0.0, 1.0), (4.0, 6.0)]
    assert (found.compute_s, found.memory_s) == (2 * (1 + 0.5 + 3 + 1 + 0.5), 6.0)
    assert compute_s(step, replace(machine(overhead=0.5), pace=2.0)) == 12.0


def test_what_is_read_beside_it_slows_the_compute_by_its_drag() -> None:
    """300 bytes at 0.01 s each: 3 s more, spread over 6 s of products."""
    step, disturbed = trace([0, 1, 2], [2000, 2000, 2000]), replace(machine(), read_drag_s_per_byte=0.01)
    plan = StepPlan(tier((0, -1), (1, -1), (2, -1)), None)
    found = predict_step(step, plan, granules(100, 100, 100), disturbed)
    assert found.compute_s == pytest.approx(9.0)
    assert [s.stop_s - s.start_s for s in found.timeline if s.lane == "compute"] == [3.0] * 3
    held = predict_step(step, StepPlan(tier(0, 1, 2), None), granules(100, 100, 100), disturbed)
    assert held.compute_s == 6.0


def test_overhead_is_paid_for_each_operation_and_access() -> None:
    """Four operations of 0.25 s: one before the weight is given back, three after."""
    step = Trace("case", (0, 1), (Work(1000, 1, 0.0, 4), Work(0.0, 1, 0.0, 1)))
    plan = StepPlan(tier((0, -1), (1, 0)), None)
    found = predict_step(step, plan, granules(100, 100), machine(overhead=0.25))
    assert [s.start_s for s in found.timeline if s.lane == "disk"] == [0.0, 1 + 0.25 + 1]
    assert (found.step_s, found.compute_s, found.memory_s) == (1 + 1.25 + 1 + 0.25, 2.25, 0.75)


def test_a_device_computes_while_the_next_operations_are_queued() -> None:
    """Queueing takes 4 x 0.25 s for the first access and 1 x 0.25 s for the second, whose product takes 2 s."""
    work = (Work(100, 1, 0.0, 4), Work(2000, 1, 0.0, 1))
    plan = StepPlan(tier(0, 1), tier())
    found = predict_step(Trace("case", (0, 1), work), plan, granules(100, 100), machine(link=100, overhead=0.25))
    assert (found.step_s, found.compute_s, found.wait_s) == (3.0, 3.0, 0.0)
    assert compute_s(Trace("case", (0, 1), work), machine(link=100, overhead=0.25)) == pytest.approx(2.1)
    assert compute_s(Trace("case", (0, 1), work), machine(overhead=0.25)) == pytest.approx(2.1 + 1.25)


def test_an_access_without_known_work_costs_its_overhead() -> None:
    step = trace([0, 0, 0], [0, 0, 0])
    found = predict_step(step, StepPlan(tier(0, 0, 0), None), granules(100), machine(overhead=0.25))
    assert compute_s(step, machine(overhead=0.25)) == 0.75
    assert (found.step_s, found.compute_s, found.read_bytes) == (0.75, 0.75, 0)


def test_disk_link_and_compute_overlap_and_the_slowest_bounds() -> None:
    """Three granules of 100 bytes; the disk takes 1 s, the link 4 s, a product 1 s each. RAM holds one granule."""
    step = trace([0, 1, 2], [1000, 1000, 1000])
    rates = machine(disk=100, link=25)
    plan = StepPlan(tier((0, -1), (1, -1), (2, 0)), tier((0, -1), (1, 0), (2, 1)))
    found = predict_step(step, plan, granules(100, 100, 100), rates)
    assert [(s.start_s, s.stop_s) for s in found.timeline if s.lane == "disk"] == [(0, 1), (5, 6), (10, 11)]
    assert [(s.start_s, s.stop_s) for s in found.timeline if s.lane == "link"] == [(1, 5), (6, 10), (11, 15)]
    assert (found.step_s, found.bound_by, found.copied_bytes, found.read_bytes) == (16.0, "link", 300, 300)
    assert floor_s(step, found, rates) == 12.0


def test_a_copy_waits_for_the_reader_of_its_slot() -> None:
    """One device slot: each copy starts when the product before it is over."""
    step = trace([0, 1], [5000, 1000])
    plan = StepPlan(tier((0, -1), (1, 0)), tier((0, -1), (1, -1)))
    found = predict_step(step, plan, granules(100, 100), machine(link=100))
    assert [(s.start_s, s.stop_s) for s in found.timeline if s.lane == "link"] == [(1, 2), (7, 8)]
    assert [s.start_s for s in found.timeline if s.lane == "disk"] == [0, 1], "the disk need not wait for it"
    assert found.step_s == 9.0


def test_a_step_in_steady_state_reads_what_a_palindrome_must() -> None:
    """Forward and backward over 10 granules with 4 slots: 2 (W - C) bytes."""
    step = Trace("palindrome", (*range(10), *reversed(range(10))))
    steady = steady_step(step, 4, None, 0)
    found = predict_step(step, steady.plan, granules(*[100] * 10), machine())
    assert found.read_bytes == 2 * (10 - 4) * 100
    first = plan_step(step, 4, {}, None, {}, 0)
    assert len(first.near.loads) > len(steady.plan.near.loads)
    everything = steady_step(step, 10, None, 8)
    assert everything.plan.near.loads == () and everything.near_before.keys() == set(range(10))


def test_what_changes_in_ram_is_copied_anew_in_each_step() -> None:
    """To a device that holds everything; where RAM is the device's, nothing moves."""
    step = Trace("palindrome", (*range(10), *reversed(range(10))))
    plan = steady_step(step, 10, 10, 8, changing={2, 3, 7}).plan
    assert [load.granule for load in plan.near.loads] == [2, 3, 7] and plan.far.loads == ()
    assert steady_step(step, 10, None, 8, changing={2, 3, 7}).plan.near.loads == ()


# -- against the engine


class Clock:
    """Virtual seconds. A slot knows when it was last filled and last read; only the engine's own calls look at it."""

    def __init__(self, rates: Hardware) -> None:
        self.rates = rates
        self.now = self.waited = self.disk_free = self.link_free = 0.0
        self.filled: dict[int, float] = {}
        self.free: dict[int, float] = {}
        self.read_bytes = self.copied_bytes = 0

    def read(self, address: int, nbytes: int) -> None:
        start = max(self.disk_free, self.free.get(address, 0.0))
        self.disk_free = self.filled[address] = start + nbytes / self.rates.disk_bytes_per_s
        self.read_bytes += nbytes

    def copy(self, source: int, target: int, nbytes: int) -> None:
        start = max(self.link_free, self.filled[source], self.free.get(target, 0.0))
        self.link_free = self.filled[target] = self.free[source] = start + nbytes / self.rates.link_bytes_per_s
        self.copied_bytes += nbytes

    def compute(self, address: int, work: Work) -> None:
        self.waited += max(0.0, self.filled[address] - self.now)
        self.now = max(self.now, self.filled[address]) + work.flops / 1000 + self.rates.op_overhead_s
        self.free[address] = self.now

    def new_step(self) -> None:
        """What is held is there; the lanes are idle."""
        self.now = self.waited = self.disk_free = self.link_free = 0.0
        self.read_bytes = self.copied_bytes = 0
        self.filled = dict.fromkeys(self.filled, 0.0)
        self.free = {}


class ClockedAccelerator(SimulatedAccelerator):
    clock: Clock

    def copy(self, target: Tensor, source: Tensor, after: object) -> object:
        self.clock.copy(source.data_ptr(), target.data_ptr(), target.numel())
        return super().copy(target, source, after)


def clocked_store(
    tensors: dict[str, TensorInfo], config: ToyConfig, clock: Clock, sizes: WindowSizes, distance: int
) -> TensorStore:
    device: Device = CpuDevice()
    if sizes.device_slots:
        device = ClockedAccelerator()
        device.clock = clock
    store = TensorStore(granules_of(config, tensors, 2048), device, sizes, distance)
    read_granule = store._reader.read_granule

    def read(granule: Granule, slot: memoryview) -> None:
        before = store._reader.bytes_read
        read_granule(granule, slot)
        address = ctypes.addressof(ctypes.c_char.from_buffer(slot))
        clock.read(address, store._reader.bytes_read - before)

    store._reader.read_granule = read
    return store


@pytest.mark.parametrize("seed", range(12))
def test_the_engine_moves_the_same_bytes_and_waits_as_long(tmp_path: Path, seed: int) -> None:
    random.seed(seed)
    config = ToyConfig(n_layers=4)
    tensors = write_toy(tmp_path, config, n_files=2, padding_bytes=random.choice([0, 100]))
    link = random.choice([None, 3e4, 3e5])
    rates = machine(random.choice([2e4, 2e5]), link, overhead=0.0 if link else random.choice([0.0, 0.01]))
    model = granules_of(config, tensors, 2048)
    n, cuts = len(model.layout.granules), [part for parts in model.layout.parts.values() for part in parts]
    near, far = random.randint(1, n), random.randint(1, n)
    sizes = WindowSizes(far, near, 16) if rates.link_bytes_per_s else WindowSizes(near, 0, 16)
    far_slots = far if rates.link_bytes_per_s else None
    distance = random.choice([1, 4, 8])
    parts: list[Part] = [*cuts, *reversed(cuts)] if seed % 2 else random.choices(cuts, k=60)
    work = tuple(Work(random.choice([0.0, 100.0, 600.0]), 1, 0.0) for _ in parts)
    step = Trace("case", tuple(part.granule for part in parts), work)
    clock = Clock(rates)
    with clocked_store(tensors, config, clock, sizes, distance) as store:
        near_before: dict[int, int] = {}
        far_before: dict[int, int] = {}
        for number in range(3):
            clock.new_step()
            store.begin_step(step)
            for part, doing in zip(parts, work, strict=True):
                with store.borrow(part) as weight:
                    address = store._near.slot(store._near.resident()[part.granule]).data_ptr()
                    assert weight.numel()
                    clock.compute(address, doing)
            store.end_step()
            plan = plan_step(step, near, near_before, far_slots, far_before, distance)
            found = predict_step(step, plan, model.layout.granules, rates)
            assert (found.read_bytes, found.copied_bytes) == (clock.read_bytes, clock.copied_bytes), number
            assert found.wait_s == pytest.approx(clock.waited, abs=1e-9)
            assert found.step_s == pytest.approx(clock.now, rel=1e-12)
            near_before = dict(plan.near.resident)
            far_before = dict(plan.far.resident) if plan.far else {}
    if sizes.device_slots:
        store.device.close()


# -- what memory buys


def palindrome_s(nbytes: int) -> float:
    """Seconds of a step over 40 granules of 100 MB, 1 s of disk and 0.25 s of product each, with so much memory."""
    accesses = [*range(40), *reversed(range(40))]
    step = trace(accesses, [250.0] * 80)
    steady = steady_step(step, max(1, min(40, nbytes // 100_000_000)), None, 2)
    return predict_step(step, steady.plan, granules(*[100_000_000] * 40), machine(disk=1e8)).step_s


def test_the_next_gb_buys_its_bytes_twice_while_the_disk_bounds() -> None:
    assert what_next_gb_buys(palindrome_s, 1_000_000_000) == pytest.approx(2 * 10 * 1.0, rel=0.15)
    assert what_next_gb_buys(palindrome_s, 4_000_000_000) == 0.0


def test_the_smallest_memory_that_meets_a_target_is_found() -> None:
    target_s = 40.0
    found = smallest_memory(palindrome_s, 100_000_000, 4_000_000_000, target_s)
    assert palindrome_s(found) <= target_s < palindrome_s(found - 1_000_000)
    by_trying = next(n for n in range(1, 41) if palindrome_s(n * 100_000_000) <= target_s) * 100_000_000
    assert by_trying <= found <= by_trying + 1_000_000
    assert smallest_memory(palindrome_s, 100_000_000, 4_000_000_000, 1e9) == 100_000_000


def test_a_target_beyond_reach_says_what_is_possible() -> None:
    with pytest.raises(BudgetError) as failed:
        smallest_memory(palindrome_s, 100_000_000, 4_000_000_000, 0.25)
    assert str(failed.value) == (
        "target_step_time_ms: 250 ms cannot be met: with all of 4.00 GB a step is predicted to take 20000 ms; "
        "raise the target or shorten the step"
    )
