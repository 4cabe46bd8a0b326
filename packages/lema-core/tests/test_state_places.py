"""Records of moments and gradients that have their place on a device, in RAM, or on disk."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from lema_core.device import CpuDevice
from lema_core.errors import TransferError
from lema_core.store.states import StateStream
from lema_core.testing.simulated import SimulatedAccelerator

SIZES = [5000, 4096, 9000, 4096]


@pytest.fixture
def device() -> Iterator[SimulatedAccelerator]:
    made = SimulatedAccelerator(latency_s=1e-4, compute_lag_s=1e-4)
    yield made
    made.close()


@pytest.fixture
def stream(device: SimulatedAccelerator, tmp_path: Path) -> Iterator[StateStream]:
    """Record 0 on disk, 1 in RAM, 2 and 3 on the device."""
    made = StateStream("grads", SIZES, [1], 3, tmp_path, device, on_device=[3, 2])
    yield made
    made.close()


def wait_until(ready: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not ready():
        assert time.monotonic() < deadline, "the stream's thread does nothing"
        time.sleep(0.001)


def test_each_is_counted_where_it_is(stream: StateStream) -> None:
    assert stream.disk_bytes == 8192
    assert stream.device_bytes == 12_288 + 4096
    assert stream.ram_bytes == 4096 + 3 * 12_288
    assert stream.nbytes == stream.disk_bytes + stream.device_bytes + 4096


def test_all_are_zeros_before_they_are_given_back_and_keep_what_they_are_given(stream: StateStream) -> None:
    for number in range(4):
        assert not stream.take(number).any()
        stream.give(number, changed=False)
    for turn in range(2):
        for number in range(4):
            stream.take(number).fill_(10 * turn + number)
            stream.give(number)
        wait_until(lambda: not stream._to_write)  # what is taken again before is not written
        stream.announce([3, 2, 1, 0])
        for number in (3, 2, 1, 0):
            assert (stream.take(number) == 10 * turn + number).all()
            stream.give(number, changed=False)
    assert stream.bytes_copied and stream.bytes_written


def test_what_changed_in_its_place_is_read_when_that_is_over(stream: StateStream) -> None:
    """What RAM had of it before is nobody's."""
    assert stream.in_place(0) is None and stream.in_place(1) is None
    stream.announce([2])
    assert not stream.take(2).any()
    stream.give(2, changed=False)
    stream.in_place(2, fresh=True).fill_(7)
    stream.settle(2)
    assert (stream.take(2) == 7).all()
    stream.give(2, changed=False, keep=False)


def test_a_copy_that_fails_is_said(tmp_path: Path) -> None:
    device = SimulatedAccelerator(fail_at_copy=0)
    stream = StateStream("optim", SIZES, [0, 1, 2], 3, tmp_path, device, on_device=[3])
    with pytest.raises(TransferError, match="optim: record 3: copying failed: simulated accelerator: copy 0 failed"):
        stream.take(3)
    stream.close()
    device.close()


def test_moments_in_ram_ask_nothing_of_the_device(tmp_path: Path) -> None:
    stream = StateStream("optim", SIZES, range(4), 3, tmp_path, SimulatedAccelerator(capacity_bytes=0))
    stream.take(2).fill_(1)
    assert stream.device_bytes == 0 and stream.ram_bytes == stream.nbytes
    assert torch.equal(stream.take(2), torch.ones(12_288, dtype=torch.uint8))
    stream.close()


def test_what_was_read_ahead_of_a_use_that_never_comes_leaves_room(tmp_path: Path) -> None:
    """All slots hold announced records that nobody has asked for yet, and another one is wanted."""
    stream = StateStream("grads", [4096] * 4, [], 3, tmp_path, CpuDevice())
    try:
        for number in range(3):
            stream.take(number, fresh=True).fill_(number + 1)
            stream.give(number)
        stream.announce([0, 1, 2])
        with ThreadPoolExecutor(1) as beside:
            assert not beside.submit(stream.take, 3, True).result(timeout=60).any()
            stream.give(3)
        for number in range(3):
            assert stream.take(number).eq(number + 1).all()
            stream.give(number, changed=False)
    finally:
        stream.close()
