"""What every Device must do; inherit it to test one.

    class TestMyDevice(DeviceSuite):
        def make_device(self):
            return MyDevice()

pytest collects the subclass. Nothing here knows a device's timing: an engine that relies on these promises alone is
right on all of them.
"""

from __future__ import annotations

import threading

import torch
from torch import Tensor

from lema_core.device import Device
from lema_core.errors import BudgetError

_KB = 1024


class DeviceSuite:
    """Tests of the promises in :class:`lema_core.device.Device`."""

    def make_device(self) -> Device:
        """A fresh device. Override it."""
        raise NotImplementedError

    def setup_method(self) -> None:
        self._threads_before = set(threading.enumerate())
        self.device = self.make_device()

    def teardown_method(self) -> None:
        self.device.close()

    def _ram(self, value: int, nbytes: int = 64 * _KB) -> Tensor:
        ram = self.device.allocate_ram(nbytes)
        ram.fill_(value)
        return ram

    def _copied(self, target: Tensor, source: Tensor) -> Tensor:
        self.device.compute_wait(self.device.copy(target, source, None))
        return target.cpu()

    def test_memory_is_bytes_aligned_to_4096_and_its_own(self) -> None:
        held = [allocate(n) for n in (1, 4096, 70_001) for allocate in (self.device.allocate, self.device.allocate_ram)]
        for tensor, nbytes in zip(held, (1, 1, 4096, 4096, 70_001, 70_001), strict=True):
            assert tensor.dtype == torch.uint8 and tensor.shape == (nbytes,) and tensor.is_contiguous()
            assert tensor.data_ptr() % 4096 == 0 or tensor.device.type == "cuda"
        for number, tensor in enumerate(held):
            tensor.fill_(number)
        assert all((tensor.cpu() == number).all() for number, tensor in enumerate(held))

    def test_memory_is_where_it_says(self) -> None:
        assert self.device.allocate(16).device == self.device.torch_device
        assert self.device.allocate_ram(16).device.type == "cpu"

    def test_more_memory_than_there_is_is_refused(self) -> None:
        free = self.device.free_bytes()
        assert (free is None) == self.device.shares_ram
        try:
            self.device.allocate((1 << 62) if free is None else free + (1 << 20))
        except BudgetError as error:
            assert "\n" not in str(error)
        else:
            raise AssertionError("allocate gave memory that is not there")

    def test_free_memory_falls_by_what_is_allocated(self) -> None:
        free = self.device.free_bytes()
        if free is not None:
            held = self.device.allocate(64 << 20)
            assert free - self.device.free_bytes() >= 64 << 20
            del held

    def test_floats_are_computed_in_a_float_dtype(self) -> None:
        for storage in (torch.bfloat16, torch.float16, torch.float32):
            dtype = self.device.compute_dtype(storage)
            assert dtype.is_floating_point and dtype.itemsize >= 2
        assert self.device.compute_dtype(torch.float32) == torch.float32, "fp32 weights are not rounded"

    def test_a_copy_arrives(self) -> None:
        source = torch.arange(64 * _KB, dtype=torch.int64).to(torch.uint8)
        ram = self.device.allocate_ram(64 * _KB)
        ram.copy_(source)
        assert self._copied(self.device.allocate(64 * _KB), ram).equal(source)
        part = self.device.allocate(64 * _KB)
        self._copied(part, self._ram(9))
        self._copied(part[:100], ram[:100])
        assert part.cpu()[:100].equal(source[:100]) and (part.cpu()[100:] == 9).all()

    def test_copies_are_carried_out_in_order(self) -> None:
        target = self.device.allocate(64 * _KB)
        sources = [self._ram(value) for value in range(8)]
        events = [self.device.copy(target, source, None) for source in sources]
        self.device.host_wait(events[-1])
        for event in events:
            self.device.compute_wait(event)
        assert (target.cpu() == 7).all()

    def test_the_source_may_be_changed_after_host_wait(self) -> None:
        target, source = self.device.allocate(64 * _KB), self._ram(5)
        event = self.device.copy(target, source, None)
        self.device.host_wait(event)
        source.fill_(6)
        self.device.compute_wait(event)
        assert (target.cpu() == 5).all()

    def test_a_copy_waits_for_the_compute_that_still_reads(self) -> None:
        target, new = self.device.allocate(8 << 20), self._ram(2, 8 << 20)
        for _ in range(5):
            self._copied(target, self._ram(1, 8 << 20))
            read = target.view(torch.int32).clone()
            for _ in range(20):
                read = target.view(torch.int32) + 0 * read
            read_over = self.device.record()
            event = self.device.copy(target, new, read_over)
            self.device.compute_wait(event)
            after = target.clone()
            assert (read.cpu() == 0x01010101).all(), "the copy overtook compute that reads what was there"
            assert (after.cpu() == 2).all(), "compute did not wait for the copy"

    def test_a_discarded_slot_can_be_filled_again(self) -> None:
        target = self.device.allocate(64 * _KB)
        for value in range(1, 6):
            self.device.discard(target, over := self.device.record())
            self.device.compute_wait(self.device.copy(target, self._ram(value), over))
            assert (target.cpu() == value).all()

    def test_copies_and_compute_may_be_in_different_threads(self) -> None:
        target, wrong = self.device.allocate(64 * _KB), []
        released, filled = threading.Semaphore(0), threading.Semaphore(0)
        events: list = [self.device.record()]
        sources = [self._ram(value) for value in range(12)]

        def copy_ahead() -> None:
            for source in sources:
                released.acquire()
                events.append(self.device.copy(target, source, events[-1]))
                filled.release()

        worker = threading.Thread(target=copy_ahead)
        worker.start()
        released.release()
        for value in range(12):
            filled.acquire()
            self.device.compute_wait(events[-1])
            if not (target.clone().cpu() == value).all():
                wrong.append(value)
            events.append(self.device.record())
            released.release()
        worker.join()
        assert not wrong

    def test_events_of_the_past_are_over(self) -> None:
        for _ in range(3):
            self.device.host_wait(self.device.record())
            self.device.compute_wait(self.device.record())

    def test_close_stops_what_ran_in_the_background(self) -> None:
        self._copied(self.device.allocate(64 * _KB), self._ram(1))
        self.device.close()
        assert set(threading.enumerate()) <= self._threads_before
        self.device.close()
