"""NativeCopies on the driver of fake_driver.cpp: test_native_copies.py runs this with that as ``libcuda.so.1``."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterator

import pytest
import torch

from lema_core.device import map_ram
from lema_core.errors import BudgetError
from lema_cuda.copy import NativeCopies
from lema_cuda.library import cuda_refusals

STREAMS, EVENTS, CONTEXTS, DEPTH = range(4)


class Driver:
    """What fake_driver.cpp offers beside the driver's functions."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL("libcuda.so.1")
        self._library.fake_stream.restype = ctypes.c_void_p
        self._library.fake_registered_bytes.restype = self._library.fake_count.restype = ctypes.c_long
        self.work, self.fail_copies = self._library.fake_work, self._library.fake_fail_copies
        self.stream: Callable[[], int] = self._library.fake_stream
        self.registered_bytes: Callable[[], int] = self._library.fake_registered_bytes
        self.count: Callable[[int], int] = self._library.fake_count

    def hold(self, stream: int, held: bool) -> None:
        self._library.fake_hold(ctypes.c_void_p(stream), held)


@pytest.fixture(scope="module")
def driver() -> Driver:
    return Driver()


@pytest.fixture
def compute(driver: Driver) -> list[int]:
    """The stream that compute is queued on now; a test may put another there."""
    return [driver.stream()]


@pytest.fixture
def copies(compute: list[int], driver: Driver) -> Iterator[NativeCopies]:
    assert cuda_refusals() == []
    copies = NativeCopies(torch.device("cuda:1"), lambda: compute[0])
    yield copies
    copies.close()
    copies.close()
    assert [driver.count(what) for what in (EVENTS, CONTEXTS, DEPTH)] == [0, 0, 0] and driver.registered_bytes() == 0


def bytes_of(value: int, count: int = 100) -> torch.Tensor:
    return torch.full((count,), value, dtype=torch.uint8)


def test_a_copy_is_queued_then_over(copies: NativeCopies) -> None:
    source, target = torch.arange(100, dtype=torch.uint8), bytes_of(0)
    done = copies.copy(target, source, None)
    assert not copies.is_over(done) and not target.any()
    copies.host_wait(done)
    assert copies.is_over(done) and torch.equal(target, source)


def test_a_copy_waits_for_the_compute_that_reads_its_target(
    copies: NativeCopies, driver: Driver, compute: list[int]
) -> None:
    source, target = bytes_of(1), bytes_of(0)
    driver.hold(compute[0], True)
    reading = copies.record()
    done = copies.copy(target, source, reading)
    driver.work()
    assert not target.any() and not copies.is_over(done)
    driver.hold(compute[0], False)
    copies.host_wait(done)
    assert target.all() and copies.is_over(reading)


def test_compute_waits_for_a_copy_on_the_stream_that_it_runs_on_now(
    copies: NativeCopies, driver: Driver, compute: list[int]
) -> None:
    source, target, first = bytes_of(1), bytes_of(0), compute[0]
    driver.hold(first, True)
    copy = copies.copy(target, source, copies.record())
    compute[0] = driver.stream()
    copies.compute_wait(copy)
    after = copies.record()
    driver.work()
    assert not copies.is_over(after) and not target.any()
    driver.hold(first, False)
    driver.work()
    assert copies.is_over(after) and target.all()


def test_exactly_the_slabs_are_page_locked(copies: NativeCopies, driver: Driver) -> None:
    """Page-locked bytes : requested = 1."""
    slabs = [map_ram(nbytes) for nbytes in (1, 4097, 7_000_001)]
    for slab in slabs:
        copies.register(slab)
    assert driver.registered_bytes() == sum(map(len, slabs)) == 7_004_099
    with pytest.raises(RuntimeError, match="page-locking 1 bytes failed: fake"):
        copies.register(slabs[0])
    with pytest.raises(BudgetError, match=r"^1,073,741,825 bytes of RAM cannot be page-locked: out of memory; lower"):
        copies.register(torch.empty((1 << 30) + 1, dtype=torch.uint8, device="meta"))


def test_a_step_after_the_first_makes_no_event(copies: NativeCopies, driver: Driver) -> None:
    source, target = bytes_of(1), bytes_of(0)
    streams = driver.count(STREAMS)
    for _ in range(50):
        held = [*(copies.record() for _ in range(4)), copies.copy(target, source, None)]
        for event in held:
            copies.host_wait(event)
        del held, event
    assert driver.count(EVENTS) == 5 and driver.count(STREAMS) == streams
    assert driver.count(CONTEXTS) == 1 and driver.count(DEPTH) == 0


def test_errors_are_cudas_and_what_failed_can_be_done_again(copies: NativeCopies, driver: Driver) -> None:
    source, target = bytes_of(1), bytes_of(0)
    driver.fail_copies(2)
    with pytest.raises(RuntimeError, match=r"^queueing a copy failed: out of memory \(CUDA error 2\)$"):
        copies.copy(target, source, None)
    driver.fail_copies(0)
    copies.host_wait(copies.copy(target, source, None))
    assert target.all()
    with pytest.raises(RuntimeError, match=r"the target is \[99\]"):
        copies.copy(target[1:], source, None)
    with pytest.raises(RuntimeError, match=r"opening CUDA failed: invalid device"):
        NativeCopies(torch.device("cuda:2"))
    assert driver.count(CONTEXTS) == 1


def test_any_thread_may_copy(copies: NativeCopies, driver: Driver) -> None:
    target = torch.zeros(8, 1000, dtype=torch.uint8)

    def many(row: int) -> None:
        source = bytes_of(row + 1, 1000)
        for _ in range(50):
            copies.host_wait(copies.copy(target[row], source, copies.record()))

    threads = [threading.Thread(target=many, args=(row,)) for row in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all((target[row] == row + 1).all() for row in range(8)) and driver.count(EVENTS) <= 16
