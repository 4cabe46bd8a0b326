"""Gradients of weights that train on a device with memory of its own: where they are added up, and how they leave.

A granule's accumulator is its record itself where that has its place on the device. Otherwise it is one of a few slots
there: it goes to its record in RAM when it is complete, or when another one needs the slot, and comes back when more is
added. A thread gives records back when their copy is over; compute does not wait for it.

Records in fewer bits than fp32 are rounded whenever something was added, as they are in RAM, so that where they lie
changes no bit: they come and go with each addition, and are waited for.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from queue import SimpleQueue
from threading import Condition, Thread

import torch
from torch import Tensor

from lema_core.device import Device, Event
from lema_core.errors import TransferError
from lema_core.store.codec import Encoding
from lema_core.store.disk import shown
from lema_core.store.granules import Granule
from lema_core.store.states import StateStream

#: one is added to, others are on their way; a layer's small tensors are added to now and then
FEWEST_ACCUMULATORS = 4


def accumulator_slots(encodes: bool, n_passing: int) -> int:
    """Of so many records that have no place on the device."""
    return min(n_passing, 1 if encodes else FEWEST_ACCUMULATORS)


class DeviceAccumulators:
    """Of ``granules``, by number; ``n_slots`` slots of the largest. Used by the thread that computes;
    :meth:`await_record` by others too."""

    def __init__(
        self, device: Device, stream: StateStream, encoding: Encoding, granules: Sequence[Granule], n_slots: int
    ) -> None:
        self._device = device
        self._stream = stream
        self._encoding = encoding
        self._granules = granules
        self._counts = [granule.nbytes // 4 for granule in granules]
        self._slot_bytes = max(granule.nbytes for granule in granules)
        self._n_slots = n_slots
        self._slab = device.allocate(self.device_bytes) if n_slots else None
        #: granule -> slot, by their latest use
        self._slots: OrderedDict[int, int] = OrderedDict()
        self._free = deque(range(n_slots))
        #: by free slot: the copy of what was in it
        self._left: dict[int, Event] = {}
        self._changed = Condition()
        #: granules whose copy to their record is not over
        self._leaving: set[int] = set()
        self._error: BaseException | None = None
        self.copied_bytes = 0
        self._jobs: SimpleQueue[tuple[int, Event | None, bool] | None] = SimpleQueue()
        self._thread = Thread(target=self._serve, name="lema-gradients", daemon=True)
        self._thread.start()

    @property
    def device_bytes(self) -> int:
        return self._n_slots * self._slot_bytes

    @contextmanager
    def taken(self, number: int, fresh: bool) -> Iterator[Tensor]:
        """fp32 numbers of a granule on the device, to be added to; ``fresh``: zeros. Raises what a copy failed with."""
        self._raise_error()
        if self._encoding.encodes:
            with self._rounded(number, fresh) as numbers:
                yield numbers
            return
        place = self._stream.in_place(number, fresh)
        if place is None:
            yield self._slot(number, fresh)
            return
        numbers = place[: self._granules[number].nbytes].view(torch.float32)
        yield numbers.zero_() if fresh else numbers

    def complete(self, number: int) -> None:
        """Nothing more is added to a granule that was taken."""
        self._raise_error()
        if number in self._slots:
            self._leave(number, last=True)
        elif number in self._leaving:
            self._jobs.put((number, None, True))
        else:
            self._stream.settle(number)

    def await_record(self, number: int) -> None:
        """Returns when the record has what was added. Raises what the copy failed with."""
        self._await(lambda: number not in self._leaving)

    def forget(self) -> None:
        """Whatever was added is lost."""
        self._await(lambda: not self._leaving)
        self._slots.clear()
        self._free = deque(range(self._n_slots))

    def close(self) -> None:
        """Stop the thread, after what is on its way."""
        self._jobs.put(None)
        self._thread.join()

    def _memory(self, slot: int, number: int) -> Tensor:
        start = slot * self._slot_bytes
        return self._slab[start : start + self._granules[number].nbytes]

    def _slot(self, number: int, fresh: bool) -> Tensor:
        slot = self._slots.get(number)
        if slot is not None:
            self._slots.move_to_end(number)
            return self._memory(slot, number).view(torch.float32)
        if not self._free:
            self._leave(next(iter(self._slots)), last=False)
        slot = self._free.popleft()
        memory = self._memory(slot, number)
        if (left := self._left.pop(slot, None)) is not None:
            self._device.compute_wait(left)
        numbers = memory.view(torch.float32)
        if fresh:
            numbers.zero_()
        else:
            self.await_record(number)
            record = self._stream.take(number)
            try:
                self._bring(number, memory, record)
            finally:
                self._stream.give(number, changed=False)
        self._slots[number] = slot
        return numbers

    def _bring(self, number: int, memory: Tensor, record: Tensor) -> None:
        """Copy to the device, after all that was computed so far; the record is free again then."""
        with self._naming(number, "to"):
            copied = self._device.copy(memory, record[: len(memory)], self._device.record())
            self._device.compute_wait(copied)
            self._device.host_wait(copied)
        self.copied_bytes += len(memory)

    def _leave(self, number: int, last: bool) -> None:
        """Queue the copy to the record, after all that was computed so far."""
        slot = self._slots.pop(number)
        memory = self._memory(slot, number)
        record = self._stream.take(number, overwritten=True)
        copied = self._device.copy(record[: len(memory)], memory, self._device.record())
        self.copied_bytes += len(memory)
        self._free.append(slot)
        self._left[slot] = copied
        with self._changed:
            self._leaving.add(number)
        self._jobs.put((number, copied, last))

    @contextmanager
    def _rounded(self, number: int, fresh: bool) -> Iterator[Tensor]:
        record = self._stream.take(number, fresh)
        try:
            with self._encoding.decoded(record, self._counts[number]) as numbers:
                memory, held = self._memory(0, number), numbers.view(torch.uint8)
                self._bring(number, memory, held)
                yield memory.view(torch.float32)
                with self._naming(number, "from"):
                    self._device.host_wait(self._device.copy(held, memory, self._device.record()))
                self.copied_bytes += len(memory)
        finally:
            self._stream.give(number, changed=True, more=True)

    def _serve(self) -> None:
        while (job := self._jobs.get()) is not None:
            number, copied, last = job
            if copied is not None:
                try:
                    with self._naming(number, "from"):
                        self._device.host_wait(copied)
                except BaseException as error:
                    self._error = self._error or error
                self._stream.give(number, changed=True, more=True)
            if last:
                self._stream.settle(number)
            with self._changed:
                self._leaving.discard(number)
                self._changed.notify_all()

    @contextmanager
    def _naming(self, number: int, way: str) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            tensors = shown(self._granules[number].names)
            reason = str(error).splitlines()[0]
            raise TransferError(f"the gradient of {tensors}: copying {way} the device failed: {reason}") from error

    def _await(self, ready: Callable[[], bool]) -> None:
        with self._changed:
            self._changed.wait_for(ready)
        self._raise_error()

    def _raise_error(self) -> None:
        if self._error is not None:
            raise self._error
