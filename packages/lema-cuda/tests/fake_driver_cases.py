"""NativeCopies, and how kernels are queued, on the driver of fake_driver.cpp: test_native_copies.py runs this with that
as ``libcuda.so.1``."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterator
from contextlib import nullcontext

import pytest
import torch

from lema_core.device import map_ram
from lema_core.errors import BudgetError
from lema_core.quantization.block import QuantizedBlock
from lema_core.quantization.formats import wire_formats
from lema_cuda.copy import NativeCopies
from lema_cuda.device_linear import DeviceLinear
from lema_cuda.library import cuda_refusals, device_refusals, open_cuda_library

STREAMS, EVENTS, CONTEXTS, DEPTH, MODULES = range(5)


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
        self._library.fake_launched.restype, self._library.fake_launch.restype = ctypes.c_char_p, ctypes.c_long

    def hold(self, stream: int, held: bool) -> None:
        self._library.fake_hold(ctypes.c_void_p(stream), held)

    def launched(self) -> tuple[str, list[int]]:
        """The kernel launched last; blocks along x and y, threads, stream, what its arguments begin with, contexts."""
        return self._library.fake_launched().decode(), [self._library.fake_launch(what) for what in range(6)]


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


def test_kernels_are_loaded_once_and_queued_on_the_callers_stream(driver: Driver) -> None:
    assert device_refusals(0) == device_refusals(1) == [] and driver.count(MODULES) == 2
    assert device_refusals(2) == ["the kernels do not load on CUDA device 2: invalid device"]
    assert device_refusals(64) == device_refusals(-1) == ["there is no such CUDA device"]
    stream = driver.stream()
    kernel = DeviceLinear("w8a8", lambda: stream)
    for name, columns, expected in (("int4-64", 1, "lema_gemv_int4_bf16"), ("int8", 65, "lema_product_int8_bf16")):
        shape = (130, 64)
        parts = tuple(torch.zeros(part.shape, dtype=part.dtype) for part in wire_formats()[name].parts(shape))
        x, out = (torch.zeros(each, columns, dtype=torch.bfloat16) for each in (64, 130))
        with pytest.warns(UserWarning, match="int4-64 are dequantized") if name != "int8" else nullcontext():
            kernel.forward(QuantizedBlock(wire_formats()[name], shape, parts), x, out)
        blocks = (3, 2) if name == "int8" else (33, 1)
        threads = 256 if name == "int8" else 128
        assert driver.launched() == (expected, [*blocks, threads, stream, parts[0].data_ptr(), 1])
    assert driver.count(MODULES) == 2 and driver.count(DEPTH) == 0
    assert open_cuda_library().lema_device_missing(0) == b""
