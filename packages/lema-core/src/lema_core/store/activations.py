"""Activations between the forward and the backward pass: device -> RAM -> a file, as far as each has room.

They are put in one order and taken in about the reverse, so what was put first lies lowest. Where the sizes are known
before the step, each entry goes at once where it will lie; otherwise the oldest gives way when memory is full. What
went down comes up again ahead of being taken, in the order of the step before or else newest first, into the room that
taken ones left. One thread moves everything.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from threading import Condition, Thread

import torch
from torch import Tensor

from lema_core.device import Device, Event
from lema_core.errors import BudgetError, LemaError, PlanError, TransferError
from lema_core.store.arena import Arena
from lema_core.store.granules import whole_sectors
from lema_core.store.held import Held, bytes_of, is_dense
from lema_core.store.placement import Tier, place
from lema_core.store.spill import BOUNCE_BYTES, SpillFile
from lema_core.store.store import StoreStats
from lema_core.store.unnamed import free_bytes

#: how long the move that is under way when a step is abandoned is waited for
_PATIENCE_S = 2.0


@dataclass
class ActivationStats(StoreStats):
    """``read_bytes``, ``written_bytes``: of the file, in whole sectors; ``copied_bytes``: between device and RAM."""

    disk_now_bytes: int
    disk_peak_bytes: int


class ActivationStream:
    """Holds tensors by key from :meth:`put` to :meth:`take`: at most ``device_bytes`` of them on the device and
    ``ram_bytes`` in RAM (None: no limit), the rest in a file in ``folder`` (None: no file).

    Where the device computes from RAM, of two limits the smaller holds. Neither counts the 4 MB that the file is
    written and read through. What a move in the background fails with is raised by the next call, with the key.
    """

    def __init__(self, device: Device, device_bytes: int | None, ram_bytes: int | None, folder: Path | None) -> None:
        if device.shares_ram:
            device_bytes = min((limit for limit in (device_bytes, ram_bytes) if limit is not None), default=None)
            ram_bytes = 0
        self._device = device
        self._most_on_device, self._ram_limit = device_bytes, ram_bytes
        self._device_limit = device_bytes
        self._folder = folder
        self._arena = Arena(device, ram_bytes)
        self._file: SpillFile | None = None
        self._thread: Thread | None = None
        self._changed = Condition()
        self._entries: dict[Hashable, Held] = {}
        self._to_lower: list[tuple[Held, Tier]] = []
        self._wanted: Held | None = None
        self._planned: list[Tier] = []
        self._n_put = 0
        self._taken: list[Hashable] = []
        self._order: dict[Hashable, int] = {}
        #: something was taken since the last put: what lies low will be wanted next
        self._rising = False
        self._running = self._busy = self._closed = False
        self._error: Exception | None = None
        self._device_now = self._device_peak = 0
        self._copied_bytes = 0
        self._wait_s = 0.0
        self._step_start = (0, 0, 0, 0.0)

    # -- a step

    def begin_step(self, sizes: Sequence[int] = (), device_bytes: int | None = None) -> None:
        """``sizes``: the bytes of what will be put, in that order, where they are known. ``device_bytes``: a lower
        limit for this step alone. Raises BudgetError where they cannot fit, TransferError where the disk has no room
        for them."""
        with self._changed:
            if self._closed:
                raise PlanError("the activations' store is closed; open the model again")
            if self._running:
                raise PlanError("a step is still under way")
            if self._busy:
                raise PlanError("a move of an abandoned step still hangs; try again later, or open the model again")
            self._drop_all()
            limits = [limit for limit in (self._most_on_device, device_bytes) if limit is not None]
            self._device_limit = min(limits, default=None)
            self._planned = place(sizes, self._device_limit, self._ram_limit)
            if Tier.DISK in self._planned:
                self._check_disk(sizes, self._planned)
            self._error, self._running = None, True
            self._rising, self._n_put, self._taken = False, 0, []
            self._step_start = self._totals()

    @contextmanager
    def step(self, sizes: Sequence[int] = (), device_bytes: int | None = None) -> Iterator[None]:
        """:meth:`begin_step` and, however it ends, :meth:`end_step` or :meth:`abort_step`."""
        self.begin_step(sizes, device_bytes)
        try:
            yield
            self.end_step()
        except BaseException:
            self.abort_step()
            raise

    def end_step(self) -> None:
        """Raises PlanError where something was put and never taken, and what a move in the background failed with."""
        with self._changed:
            error, left = self._error, next(iter(self._entries), None)
        self.abort_step()
        if error is not None:
            raise error
        if left is not None:
            raise PlanError(f"activation {left} was put and never taken")
        self._order = {key: number for number, key in enumerate(self._taken)}

    def abort_step(self) -> None:
        """Drop what is held; the stream can be used again. Safe outside a step."""
        with self._changed:
            self._running = False
            self._to_lower.clear()
            self._changed.notify_all()
            if self._changed.wait_for(lambda: not self._busy, _PATIENCE_S):
                self._drop_all()

    def _drop_all(self) -> None:
        self._entries.clear()
        self._wanted = None
        self._arena.free_all()
        self._device_now = 0
        if self._file is not None:
            self._file.free_all()

    # -- entries

    def put(self, key: Hashable, tensor: Tensor) -> None:
        """Take ``tensor`` over: the caller neither changes nor keeps it. Waits until there is room.

        What does not fill its memory without gaps comes back without them, its dimensions in the same order. Raises
        BudgetError where it fits nowhere.
        """
        tensor = tensor.detach()
        entry = Held(key, tensor if is_dense(tensor) else tensor.clone(), self._device.record())
        limit = float("inf") if self._device_limit is None else self._device_limit
        with self._changed:
            self._check()
            if key in self._entries:
                raise PlanError(f"activation {key} is put twice")
            self._rising = False
            planned = self._planned[self._n_put] if self._n_put < len(self._planned) else Tier.DEVICE
            self._n_put += 1
            entry.counted = entry.nbytes <= limit
            if entry.counted:
                self._wait(lambda: self._device_now + entry.nbytes <= limit or self._lower_one())
                self._device_now += entry.nbytes
                self._device_peak = max(self._device_peak, self._device_now)
            self._entries[key] = entry
            full = entry.counted and self._device_now + entry.nbytes > limit
            if full and self._folder is not None and self._n_put > len(self._planned):
                # The next one, of which nothing is known, will find room.
                self._lower_one()
            if not entry.counted or planned is not Tier.DEVICE:
                self._lower(entry, max(planned, Tier.RAM))
            if not entry.counted:
                # More than the device may hold: it remains the caller's until it has left.
                self._wait(lambda: entry.tensor is None)

    def take(self, key: Hashable) -> Tensor:
        """What was put, on the device, now the caller's. Waits until it is there."""
        with self._changed:
            self._check()
            entry = self._entries.get(key)
            if entry is None:
                raise PlanError(f"activation {key} is taken, and is not held")
            self._to_lower = [job for job in self._to_lower if job[0] is not entry]
            if entry.tensor is None or entry.moving:
                self._wanted = entry
                self._changed.notify_all()
                self._wait(lambda: entry.tensor is not None and not entry.moving)
                self._wanted = None
            del self._entries[key]
            self._taken.append(key)
            if entry.counted:
                self._device_now -= entry.nbytes
            self._rising = True
            self._changed.notify_all()
            return entry.tensor

    def _wait(self, ready: Callable[[], bool]) -> None:
        started = time.perf_counter()
        while not ready():
            self._changed.wait()
            self._check()
        self._wait_s += time.perf_counter() - started

    def _check(self) -> None:
        if self._error is not None:
            raise self._error
        if not self._running:
            raise PlanError("activations are kept outside a step")

    def _check_disk(self, sizes: Sequence[int], planned: Sequence[Tier]) -> None:
        if self._folder is None:
            raise self._no_room(f"{len(sizes)} of {sum(sizes):,} bytes")
        nbytes = sum(whole_sectors(size) for size, tier in zip(sizes, planned, strict=True) if tier is Tier.DISK)
        free = free_bytes(self._folder) + (self._file.peak_bytes if self._file is not None else 0)
        if free < nbytes:
            raise TransferError(
                f"{self._folder}: {nbytes:,} bytes are needed for activations, {free:,} are free; "
                "free some, or give activations more memory"
            )

    def _no_room(self, what: str) -> BudgetError:
        given = f"{self._device_limit or 0:,} bytes"
        if not self._device.shares_ram:
            given += f" on the device and {self._ram_limit or 0:,} in RAM"
        return BudgetError(
            f"activations: {what} are to be kept, {given} are given, and no folder for the rest; "
            "raise activations_ram or activations_vram, or shorten max_seq_length or batch_size"
        )

    # -- moving; all of this with ``_changed`` held, but while bytes move

    def _lower(self, entry: Held, tier: Tier) -> None:
        self._to_lower.append((entry, tier))
        if self._thread is None:
            self._thread = Thread(target=self._serve, name="lema-activations", daemon=True)
            self._thread.start()
        self._changed.notify_all()

    def _lower_one(self) -> bool:
        """Nothing planned is leaving the device: the oldest must. Always False, for :meth:`_wait`."""
        if not self._to_lower and not self._busy:
            self._lower(next(e for e in self._entries.values() if e.counted and e.tensor is not None), Tier.RAM)
        return False

    def _serve(self) -> None:
        with self._changed:
            while not self._closed:
                move = self._next_move()
                if move is None:
                    self._changed.wait()
                    continue
                entry, tier = move
                self._busy = True
                try:
                    if tier is Tier.DEVICE:
                        self._bring_up(entry)
                    else:
                        self._bring_down(entry, tier)
                except Exception as error:
                    self._error = self._error or error
                self._busy = False
                self._changed.notify_all()

    def _next_move(self) -> tuple[Held, Tier] | None:
        if not self._running or self._error is not None:
            return None
        if self._wanted is not None and self._wanted.tensor is None:
            return self._wanted, Tier.DEVICE
        if self._to_lower:
            return self._to_lower.pop(0)
        if self._rising:
            low = self._wanted_next()
            if low is not None and (self._device_limit is None or self._device_now + low.nbytes <= self._device_limit):
                low.counted = True
                self._device_now += low.nbytes
                self._device_peak = max(self._device_peak, self._device_now)
                return low, Tier.DEVICE
        return None

    def _wanted_next(self) -> Held | None:
        """Of what lies low, what was taken first in the step before; of what is new, what was put last."""
        low = [entry for entry in reversed(self._entries.values()) if entry.tensor is None]
        return min(low, key=lambda entry: self._order.get(entry.key, len(self._order)), default=None)

    def _bring_down(self, entry: Held, tier: Tier) -> None:
        entry.moving = True
        source = entry.ram if entry.tensor is None else bytes_of(entry.tensor)
        ram = None
        if tier is not Tier.DISK:
            ram = self._arena.reserve(entry.nbytes)
            while ram is None:
                oldest = next((e for e in self._entries.values() if e.ram is not None), None)
                if oldest is None or entry.nbytes > (self._ram_limit or 0):
                    break
                self._bring_down(oldest, Tier.DISK)
                ram = self._arena.reserve(entry.nbytes)
        if ram is not None:
            self._unlocked(entry, "copying to RAM", lambda: self._copy(ram, source, entry.ready))
        else:
            file = self._opened_file()
            entry.offset = self._unlocked(entry, "writing", lambda: file.write(source, self._copier(entry.ready)))
        if entry.ram is not None:
            self._arena.free(entry.ram)
        elif entry.counted:
            self._device_now -= entry.nbytes
        entry.tensor, entry.ram = None, ram
        entry.counted = entry.moving = False

    def _bring_up(self, entry: Held) -> None:
        entry.moving = True
        tensor = torch.empty_strided(entry.shape, entry.strides, dtype=entry.dtype, device=self._device.torch_device)
        # Memory that torch gives again may still be read by compute queued before.
        free, target = self._device.record(), bytes_of(tensor)
        if entry.ram is not None:
            self._unlocked(entry, "copying to the device", lambda: self._copy(target, entry.ram, free))
            self._arena.free(entry.ram)
        else:
            file = self._opened_file()
            self._unlocked(entry, "reading", lambda: file.read(entry.offset, target, self._copier(free)))
        entry.tensor, entry.ram, entry.offset = tensor, None, None
        entry.ready = free
        entry.moving = False
        self._changed.notify_all()

    def _unlocked(self, entry: Held, doing: str, move: Callable[[], int | None]) -> int | None:
        """Turns an error of the device or the system into one that names the entry and the file."""
        self._changed.release()
        try:
            return move()
        except LemaError:
            raise
        except Exception as error:
            reason = str(getattr(error, "strerror", None) or error or type(error).__name__).splitlines()[0]
            where = f"{self._folder}: " if isinstance(error, OSError) else ""
            raise TransferError(f"{where}activation {entry.key}: {doing} failed: {reason}") from error
        finally:
            self._changed.acquire()

    def _copier(self, after: Event) -> Callable[[Tensor, Tensor], None]:
        return lambda target, source: self._copy(target, source, after)

    def _copy(self, target: Tensor, source: Tensor, after: Event) -> None:
        if self._device.shares_ram:
            # Torch would start threads of its own for a copy in this thread.
            ctypes.memmove(target.data_ptr(), source.data_ptr(), target.numel())
            return
        self._device.host_wait(self._device.copy(target, source, after))
        self._copied_bytes += target.numel()

    def _opened_file(self) -> SpillFile:
        if self._folder is None:
            raise self._no_room(f"{len(self._entries)} of {sum(e.nbytes for e in self._entries.values()):,} bytes")
        if self._file is None:
            self._file = SpillFile(self._folder, self._device.allocate_ram(BOUNCE_BYTES))
        return self._file

    # -- figures

    def _totals(self) -> tuple[int, int, int, float]:
        file = self._file
        read, written = (file.bytes_read, file.bytes_written) if file is not None else (0, 0)
        return read, written, self._copied_bytes, self._wait_s

    def stats(self) -> ActivationStats:
        """``read_bytes``, ``written_bytes``, ``copied_bytes`` and ``wait_s`` of the present or latest step."""
        with self._changed:
            file, shared = self._file, self._device.shares_ram
            bounce = BOUNCE_BYTES if file is not None else 0
            now, peak = (self._device_now, self._device_peak) if shared else (0, 0)
            limit = self._device_limit if shared else self._ram_limit
            read, written, copied, waited = (a - b for a, b in zip(self._totals(), self._step_start, strict=True))
            return ActivationStats(
                ram_now_bytes=now + self._arena.bytes_now + bounce,
                ram_peak_bytes=peak + self._arena.peak_bytes + bounce,
                ram_window_bytes=(peak + self._arena.peak_bytes if limit is None else limit) + bounce,
                device_now_bytes=0 if shared else self._device_now,
                device_peak_bytes=0 if shared else self._device_peak,
                device_window_bytes=0 if shared else (self._device_limit or self._device_peak),
                read_bytes=read,
                demand_bytes=0,
                copied_bytes=copied,
                written_bytes=written,
                wait_s=waited,
                disk_now_bytes=file.bytes_now if file is not None else 0,
                disk_peak_bytes=file.peak_bytes if file is not None else 0,
            )

    def close(self) -> None:
        """Stop the thread, close the file; safe to call twice. A thread that hangs in a move is left behind."""
        self.abort_step()
        with self._changed:
            self._closed = True
            self._changed.notify_all()
            hangs = self._busy
        if self._thread is not None and not hangs:
            self._thread.join()
            self._thread = None
            if self._file is not None:
                self._file.close()
                self._file = None
        self._arena.close()
