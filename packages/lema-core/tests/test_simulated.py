"""The simulated accelerator catches what it is there to catch."""

from __future__ import annotations

import threading

import pytest
import torch

from lema_core.errors import BudgetError
from lema_core.testing import simulated
from lema_core.testing.simulated import SimulatedAccelerator


def test_memory_has_a_limit_and_starts_as_nan() -> None:
    device = SimulatedAccelerator(capacity_bytes=10_000)
    held = device.allocate(8192)
    assert held.view(torch.float32).isnan().all() and held.view(torch.bfloat16).isnan().all()
    assert device.free_bytes() == 1808
    with pytest.raises(BudgetError, match="1,808 bytes left, 4,096 are needed"):
        device.allocate(4096)
    device.close()
    assert device.free_bytes() == 10_000


def test_an_overwrite_of_what_is_still_read_is_counted() -> None:
    device = SimulatedAccelerator(compute_lag_s=0.3)
    slot, other, ram = device.allocate(4096), device.allocate(4096), device.allocate_ram(4096)
    over = device.record()
    device.discard(slot, over)
    device.host_wait(device.copy(other, ram, None))
    assert device.overwrites_while_read == 0
    device.host_wait(device.copy(slot[:100], ram[:100], None))
    assert device.overwrites_while_read == 1
    device.host_wait(over)
    assert slot.view(torch.float32).isnan().all(), "what such a copy brought is gone"
    device.discard(slot, over := device.record())
    device.host_wait(device.copy(slot, ram, over))
    assert device.overwrites_while_read == 1 and not slot.any()
    device.close()


def test_a_discarded_slot_is_nan_when_its_reader_is_over_and_not_before() -> None:
    device = SimulatedAccelerator(compute_lag_s=0.2)
    slot = device.allocate(4096)
    device.host_wait(device.copy(slot, device.allocate_ram(4096), None))
    over = device.record()
    device.discard(slot, over)
    assert not slot.any()
    device.host_wait(over)
    assert slot.view(torch.float16).isnan().all()
    device.close()


class Clock:
    """Stands still but while somebody sleeps."""

    def __init__(self) -> None:
        self.now = 100.0

    def perf_counter(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(simulated, "time", clock)
    return clock


def test_copies_take_their_time_one_after_another(clock: Clock) -> None:
    device = SimulatedAccelerator(bytes_per_s=1e6, latency_s=0.05)
    slot, ram = device.allocate(100_000), device.allocate_ram(100_000)
    first, second = device.copy(slot, ram, None), device.copy(slot[:10_000], ram[:10_000], None)
    device.host_wait(second)
    assert (first.at, second.at, clock.now) == pytest.approx((100.15, 100.21, 100.21))
    device.close()


def test_compute_takes_its_time_and_copies_wait_for_it_and_it_for_copies(clock: Clock) -> None:
    device = SimulatedAccelerator(bytes_per_s=1e6)
    slot, ram = device.allocate(1_000_000), device.allocate_ram(1_000_000)
    device.compute(0.5)
    device.compute(0.25)
    read = device.record()
    assert read.at == pytest.approx(100.75)
    device.discard(slot, read)
    copy = device.copy(slot, ram, read)
    device.compute_wait(copy)
    assert copy.at == pytest.approx(101.75) and device.overwrites_while_read == 0
    device.compute(0.5)
    device.host_wait(device.record())
    assert clock.now == pytest.approx(102.25)
    device.close()


def test_compute_that_runs_ahead_is_queued_behind_what_it_waits_for(clock: Clock) -> None:
    device = SimulatedAccelerator(bytes_per_s=1e6, runs_ahead=True)
    slot, ram = device.allocate(10_000), device.allocate_ram(10_000)
    before = clock.now
    copies = [device.copy(slot, ram, None) for _ in range(3)]
    assert [copy.at - before for copy in copies] == pytest.approx([0.01, 0.02, 0.03], abs=1e-6)
    device.compute_wait(copies[2])
    device.compute(1.0)
    over = device.record()
    assert over.at - before == pytest.approx(1.03, abs=1e-6)
    device.host_wait(over)
    device.close()


def test_events_are_over_in_the_order_in_which_they_were_recorded(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thread that wakes up late must not poison a slot which the next step, by a later event, may fill again."""
    device = SimulatedAccelerator()
    slot, asleep, go_on = device.allocate(4096), threading.Event(), threading.Event()

    def oversleep(seconds: float) -> None:
        asleep.set()
        assert go_on.wait(10)

    monkeypatch.setattr(clock, "sleep", oversleep)
    device.compute(1.0)
    first = device.record()
    device.discard(slot, first)
    assert asleep.wait(10)
    clock.now += 5.0
    second = device.record()
    assert not first.done.is_set() and not second.done.is_set()
    go_on.set()
    device.host_wait(second)
    assert first.done.is_set() and slot.view(torch.float32).isnan().all()
    assert device.record().done.is_set()
    device.close()


def test_a_chosen_copy_fails_and_the_next_does_not() -> None:
    device = SimulatedAccelerator(fail_at_copy=1)
    slot, ram = device.allocate(64), device.allocate_ram(64)
    events = [device.copy(slot, ram, None) for _ in range(3)]
    device.host_wait(events[0])
    for wait in (device.host_wait, device.compute_wait):
        with pytest.raises(RuntimeError, match="copy 1 failed"):
            wait(events[1])
    device.compute_wait(events[2])
    assert device.copies == 3
    device.close()
