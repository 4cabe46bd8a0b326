"""What training keeps beside the weights, record by record: moments and gradients, in RAM, on the device or on disk.

Each record is taken once or a few times a step, in an order that is known: which ones stay in RAM is decided once, and
the others pass through a few slots. A thread reads ahead what was announced and writes back what was changed.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Iterable, Sequence
from enum import Enum, auto
from pathlib import Path
from threading import Condition, Thread

from torch import Tensor

from lema_core.checkpoint.reading import tensor_bytes
from lema_core.device import Device, Event, map_ram
from lema_core.errors import PlanError, TransferError
from lema_core.store.granules import whole_sectors
from lema_core.store.unnamed import UnnamedFile

#: one is read ahead, one is worked on, one is written
FEWEST_SLOTS = 3


class _Slot(Enum):
    """What a slot of the ring holds: nothing; a record as it is on disk; one read ahead; one on its way from or to the
    disk; one that is taken; one that was changed, and may stay so or is queued to be written."""

    FREE = auto()
    CLEAN = auto()
    AHEAD = auto()
    MOVING = auto()
    TAKEN = auto()
    CHANGED = auto()
    QUEUED = auto()


class StateStream:
    """Records 0, 1, ... of ``sizes`` bytes. ``resident``: those that never leave RAM; ``on_device``: those that have
    their place in the memory of ``device``. The others go to an unnamed file in ``folder``. What is not in RAM passes
    through ``n_slots`` slots there. ``kind``: ``optim`` or ``grads``. ``rooms``: the record of each number that others
    ask by; numbers of one record are asked for one after the other, and lose what they had.

    A record that was never given back is zeros. Several threads may take records, each at most one at a time.

    ``bytes_written`` counts a write when it is queued, so that it belongs to the step that changed the record.
    """

    def __init__(
        self,
        kind: str,
        sizes: Sequence[int],
        resident: Collection[int],
        n_slots: int,
        folder: Path,
        device: Device,
        rooms: Sequence[int] | None = None,
        on_device: Collection[int] = (),
    ) -> None:
        self.kind = kind
        self._device = device
        self.rooms = range(len(sizes)) if rooms is None else rooms
        self._sizes = [whole_sectors(size) for size in sizes]
        # Gradients are copied from and to a device wherever they are, moments only from and to their place there.
        in_ram = device.allocate_ram if kind == "grads" else map_ram
        self._fixed = self._laid_out(resident, in_ram)
        self._places = self._laid_out(on_device, device.allocate)
        for place in self._places.values():
            place.zero_()
        #: what computes with a place has to be over before it is read or written
        self._ready: dict[int, Event] = dict.fromkeys(self._places, device.record() if self._places else None)
        self._offsets: dict[int, int] = {}
        end = 0
        for i, size in enumerate(self._sizes):
            if i not in self._fixed and i not in self._places:
                self._offsets[i] = end
                end += size
        passing = [self._sizes[i] for i in range(len(self._sizes)) if i not in self._fixed]
        self._largest = max(passing, default=0)
        self.n_slots = n_slots if passing else 0
        self._ring: list[Tensor] = []
        self._memory: list[memoryview] = []
        self._file: UnnamedFile | None = None
        if passing:
            ring = device.allocate_ram(self.n_slots * self._largest)
            for slot in range(self.n_slots):
                piece = ring[slot * self._largest : (slot + 1) * self._largest]
                self._ring.append(piece)
                self._memory.append(tensor_bytes(piece))
        if self._offsets:
            self._file = UnnamedFile(folder, {"optim": "optimizer states", "grads": "gradients"}[kind])
            self._file.reserve(end)
        self._holds: list[int | None] = [None] * self.n_slots
        self._state = [_Slot.FREE] * self.n_slots
        self._slot_of: dict[int, int] = {}
        self._clean: OrderedDict[int, None] = OrderedDict()
        self._changed: OrderedDict[int, None] = OrderedDict()
        self._to_write: deque[int] = deque()
        #: slots whose record on disk is older
        self._unsaved: set[int] = set()
        self._ahead: deque[int] = deque()
        self._moved = Condition()
        self._error: BaseException | None = None
        self._closing = False
        self.bytes_read = self.bytes_written = self.bytes_copied = 0
        self._thread: Thread | None = None
        if passing:
            self._thread = Thread(target=self._serve, name=f"lema-{kind}", daemon=True)
            self._thread.start()

    def _laid_out(self, records: Collection[int], allocate: Callable[[int], Tensor]) -> dict[int, Tensor]:
        """``records`` one behind the other in one slab."""
        if not records:
            return {}
        ordered = sorted(records)
        slab = allocate(sum(self._sizes[i] for i in ordered))
        return dict(zip(ordered, slab.split([self._sizes[i] for i in ordered]), strict=True))

    @property
    def ram_bytes(self) -> int:
        """What the stream has of RAM, used or not."""
        return sum(map(len, self._fixed.values())) + self.n_slots * self._largest

    @property
    def device_bytes(self) -> int:
        """What it has of a device's own memory."""
        return sum(map(len, self._places.values()))

    @property
    def nbytes(self) -> int:
        """Of all records, wherever they are."""
        return sum(self._sizes)

    @property
    def disk_bytes(self) -> int:
        return sum(self._sizes[i] for i in self._offsets)

    def announce(self, order: Iterable[int]) -> None:
        """Numbers will be asked for in this order: their records are read ahead of it."""
        with self._moved:
            self._ahead = deque(i for i in (self.rooms[number] for number in order) if i not in self._fixed)
            self._moved.notify_all()

    def withdraw(self) -> None:
        """What was announced will not be taken."""
        with self._moved:
            self._ahead.clear()
            for slot, state in enumerate(self._state):
                if state is _Slot.AHEAD:
                    self._settle(slot, _Slot.CLEAN)
            self._moved.notify_all()

    def take(self, number: int, fresh: bool = False, overwritten: bool = False) -> Tensor:
        """uint8 [bytes of the record], to be changed in place until it is given back. ``fresh``: zeros, whatever was
        there; ``overwritten``: whatever, since all of it will be. Raises TransferError where the disk failed."""
        record = self.rooms[number]
        held = self._fixed.get(record)
        if held is not None:
            return held.zero_() if fresh else held
        slot, read = self._claim(record, fresh or overwritten)
        memory = self._ring[slot][: self._sizes[record]]
        if fresh:
            memory.zero_()
        elif read:
            self._transfer(slot, record, write=False)
        return memory

    def in_place(self, number: int, fresh: bool = False) -> Tensor | None:
        """uint8 [bytes of the record] on the device, to be changed there until :meth:`settle`; None where it has no
        place there. ``fresh``: all of it will be overwritten, and what RAM has of it is nobody's any more."""
        record = self.rooms[number]
        place = self._places.get(record)
        if place is not None and fresh:
            with self._moved:
                while (slot := self._slot_of.get(record)) is not None:
                    if self._state[slot] is not _Slot.MOVING:
                        self._empty(slot)
                    else:
                        self._moved.wait()
                    self._raise_error()
        return place

    def give(self, number: int, changed: bool = True, more: bool = False, keep: bool = True) -> None:
        """The record is given back. ``more``: it will be changed again soon, and is written only where its slot is
        needed. ``keep`` False: nobody will read it again."""
        record = self.rooms[number]
        if record in self._fixed:
            return
        with self._moved:
            slot = self._slot_of[record]
            if changed:
                self._unsaved.add(slot)
            if not keep:
                self._empty(slot)
            elif slot not in self._unsaved:
                self._settle(slot, _Slot.CLEAN)
            elif more:
                self._settle(slot, _Slot.CHANGED)
            else:
                self._queue(slot)
            self._moved.notify_all()

    def settle(self, number: int) -> None:
        """Nothing more is changed of a record that was given back with ``more``, or in its place."""
        record = self.rooms[number]
        if record in self._places:
            self._ready[record] = self._device.record()
        with self._moved:
            slot = self._slot_of.get(record)
            if slot is not None and self._state[slot] is _Slot.CHANGED:
                self._queue(slot)
                self._moved.notify_all()

    def forget(self) -> None:
        """All records are zeros again, or whatever; the next to take one takes it fresh."""
        with self._moved:
            self._ahead.clear()
            self._wait(lambda: _Slot.MOVING not in self._state)
            self.bytes_written -= sum(map(self._disk_bytes_of, self._to_write))
            self._to_write.clear()
            self._clean.clear()
            self._changed.clear()
            self._unsaved.clear()
            self._slot_of.clear()
            self._holds = [None] * self.n_slots
            self._state = [_Slot.FREE] * self.n_slots
            self._moved.notify_all()

    def close(self) -> None:
        """Stop the thread and give everything back; safe to call twice."""
        with self._moved:
            if self._closing:
                return
            self._closing = True
            self._moved.notify_all()
        if self._thread is not None:
            self._thread.join()
            for memory in self._memory:
                memory.release()
        if self._file is not None:
            self._file.close()
        self._ring.clear()
        self._fixed.clear()
        self._places.clear()

    # -- slots; callers hold ``_moved``

    def _claim(self, record: int, fresh: bool) -> tuple[int, bool]:
        """The slot of a record, taken, and whether it has to be read."""
        with self._moved:
            if record in self._ahead:
                # Read after it was given back, it would keep a slot that nobody asks for.
                self._ahead.remove(record)
            while True:
                self._raise_error()
                slot = self._slot_of.get(record)
                if slot is None:
                    slot = self._room()
                    if slot is not None:
                        self._assign(slot, record, _Slot.TAKEN)
                        return slot, not fresh
                elif self._state[slot] is _Slot.TAKEN:
                    raise PlanError(f"{self.kind}: record {record} is taken twice")
                elif self._state[slot] is not _Slot.MOVING:
                    self._settle(slot, _Slot.TAKEN)
                    return slot, False
                self._moved.wait()

    def _room(self) -> int | None:
        """A slot that may be given to another record, None while there is none; what was changed is queued then."""
        for slot, state in enumerate(self._state):
            if state is _Slot.FREE:
                return slot
        if self._clean:
            slot = next(iter(self._clean))
            del self._clean[slot], self._slot_of[self._holds[slot]]
            return slot
        if self._changed and not self._to_write:
            self._queue(next(iter(self._changed)))
            self._moved.notify_all()
        return None

    def _assign(self, slot: int, record: int, state: _Slot) -> None:
        self._slot_of[record] = slot
        self._holds[slot] = record
        self._state[slot] = state

    def _empty(self, slot: int) -> None:
        self._settle(slot, _Slot.FREE)
        self._unsaved.discard(slot)
        del self._slot_of[self._holds[slot]]
        self._holds[slot] = None

    def _settle(self, slot: int, state: _Slot) -> None:
        self._clean.pop(slot, None)
        self._changed.pop(slot, None)
        if self._state[slot] is _Slot.QUEUED:
            self._to_write.remove(slot)
            self.bytes_written -= self._disk_bytes_of(slot)
        self._state[slot] = state
        if state is _Slot.CLEAN:
            self._clean[slot] = None
        if state is _Slot.CHANGED:
            self._changed[slot] = None

    def _queue(self, slot: int) -> None:
        self._settle(slot, _Slot.QUEUED)
        self._to_write.append(slot)
        self.bytes_written += self._disk_bytes_of(slot)

    def _disk_bytes_of(self, slot: int) -> int:
        """Of the record that it holds; 0 where that has its place on the device."""
        record = self._holds[slot]
        return self._sizes[record] if record in self._offsets else 0

    def _wait(self, ready: Callable[[], bool]) -> None:
        self._moved.wait_for(lambda: ready() or self._error is not None)
        self._raise_error()

    def _raise_error(self) -> None:
        if self._error is not None:
            raise self._error

    # -- the thread

    def _serve(self) -> None:
        try:
            while (job := self._next_job()) is not None:
                slot, record, write = job
                self._transfer(slot, record, write)
                with self._moved:
                    if write:
                        self._unsaved.discard(slot)
                    self._settle(slot, _Slot.CLEAN if write else _Slot.AHEAD)
                    self._moved.notify_all()
        except BaseException as error:
            with self._moved:
                self._error = error
                self._moved.notify_all()

    def _next_job(self) -> tuple[int, int, bool] | None:
        """Slot, record, and whether it is written; None at the end."""
        with self._moved:
            while not self._closing:
                while self._ahead and self._ahead[0] in self._slot_of:
                    self._protect(self._ahead.popleft())
                if self._ahead and (slot := self._room_ahead()) is not None:
                    record = self._ahead.popleft()
                    self._assign(slot, record, _Slot.MOVING)
                    return slot, record, False
                if self._to_write:
                    slot = self._to_write.popleft()
                    self._state[slot] = _Slot.MOVING
                    return slot, self._holds[slot], True
                self._moved.wait()
            return None

    def _protect(self, record: int) -> None:
        """What is announced and still there is not given up."""
        slot = self._slot_of[record]
        if self._state[slot] is _Slot.CLEAN and self._may_hold_ahead():
            self._settle(slot, _Slot.AHEAD)

    def _room_ahead(self) -> int | None:
        return self._room() if self._may_hold_ahead() else None

    def _may_hold_ahead(self) -> bool:
        """One slot is left to what is worked on."""
        busy = sum(state in (_Slot.AHEAD, _Slot.MOVING) for state in self._state)
        return busy < self.n_slots - 1

    def _transfer(self, slot: int, record: int, write: bool) -> None:
        nbytes = self._sizes[record]
        if record in self._places:
            self._copy(self._ring[slot][:nbytes], record, write)
            return
        memory, offset = self._memory[slot][:nbytes], self._offsets[record]
        try:
            if write:
                self._file.write(offset, memory)
            else:
                self._file.read(offset, memory)
                self.bytes_read += nbytes
        except OSError as error:
            raise self._file.refused("written" if write else "read", error, nbytes) from error

    def _copy(self, memory: Tensor, record: int, write: bool) -> None:
        place, after = self._places[record], self._ready.get(record)
        try:
            copied = self._device.copy(place, memory, after) if write else self._device.copy(memory, place, after)
            self._device.host_wait(copied)
        except RuntimeError as error:
            raise TransferError(f"{self.kind}: record {record}: copying failed: {error}") from error
        self.bytes_copied += len(memory)
