"""A simulated accelerator: the asynchronous device, on a machine that has none.

It has memory of its own with a limit, a copy engine on a thread with a set bandwidth and latency, compute that is still
reading for a while after it was queued, and slots that turn to NaN the moment their content is given up. What would be
a rare race on a real device is an error here.
"""

from __future__ import annotations

import time
from queue import SimpleQueue
from threading import Event as Flag
from threading import Lock, Thread

import torch
from torch import Tensor

from lema_core.device import map_ram
from lema_core.errors import BudgetError

_POISON = 0xFF  # every byte 0xFF is NaN in fp32, fp16 and bf16


class _Event:
    """``done`` once what it stands for is over, which by the device's clock it is ``at``. ``slots`` are poisoned
    then."""

    def __init__(self, at: float) -> None:
        self.done = Flag()
        self.at = at
        self.slots: list[Tensor] = []
        self.error: BaseException | None = None


class SimulatedAccelerator:
    """Device whose compute is this CPU's; ``bytes_per_s`` None copies as fast as it can.

    Compute computes at once, and is taken to read its operands for ``compute_lag_s`` more, or as long as
    :meth:`compute` says. ``fail_at_copy``: the number of a copy (from 0) that raises ``RuntimeError``, for tests of
    error propagation. ``copies`` counts those made; ``overwrites_while_read`` those that hit a slot before its last
    reader was over, which a right engine never does.

    Its clock knows when what was queued will be over, and is not delayed by a thread that wakes up late. With
    ``runs_ahead``, compute that waits for a copy does not hold up the program, as on a real device: only for measuring,
    where nobody looks at what was copied.
    """

    shares_ram = False
    torch_device = torch.device("cpu")

    def __init__(
        self,
        capacity_bytes: int = 1 << 40,
        bytes_per_s: float | None = None,
        latency_s: float = 0.0,
        compute_lag_s: float = 0.0,
        fail_at_copy: int | None = None,
        runs_ahead: bool = False,
    ) -> None:
        self._capacity_bytes = capacity_bytes
        self._allocated_bytes = 0
        self.bytes_per_s = bytes_per_s
        self._latency_s = latency_s
        self._compute_lag_s = compute_lag_s
        self._fail_at_copy = fail_at_copy
        self._runs_ahead = runs_ahead
        self._readers: dict[int, _Event] = {}
        self._lock = Lock()
        self._copied_until = 0.0
        self._computed_until = 0.0
        self._computing = 0
        self._copy_jobs: SimpleQueue = SimpleQueue()
        self._compute_jobs: SimpleQueue = SimpleQueue()
        self._threads = [
            Thread(target=self._serve_copies, name="simulated-copy-engine", daemon=True),
            Thread(target=self._serve_compute, name="simulated-compute", daemon=True),
        ]
        for thread in self._threads:
            thread.start()
        self.copies = 0
        self.overwrites_while_read = 0

    def compute(self, seconds: float) -> None:
        """Queue so much work; what is queued later, and events recorded later, come after it."""
        self._computed_until = max(self._computed_until, time.perf_counter()) + seconds

    def compute_dtype(self, storage: torch.dtype) -> torch.dtype:
        return torch.float32

    def allocate(self, nbytes: int) -> Tensor:
        if self._allocated_bytes + nbytes > self._capacity_bytes:
            raise BudgetError(
                f"the device has {self._capacity_bytes - self._allocated_bytes:,} bytes left, {nbytes:,} are needed"
            )
        self._allocated_bytes += nbytes
        return map_ram(nbytes).fill_(_POISON)

    def allocate_ram(self, nbytes: int) -> Tensor:
        return map_ram(nbytes)

    def copy(self, target: Tensor, source: Tensor, after: _Event | None) -> _Event:
        duration = self._latency_s + (target.numel() / self.bytes_per_s if self.bytes_per_s else 0.0)
        with self._lock:
            start = max(time.perf_counter(), self._copied_until, 0.0 if after is None else after.at)
            event = _Event(start + duration)
            self._copied_until = event.at
            self._copy_jobs.put((event, target, source, after))
        return event

    def record(self) -> _Event:
        now = time.perf_counter()
        event = _Event(max(now + self._compute_lag_s, self._computed_until))
        with self._lock:
            # Also what is over already is over after what was queued before it.
            if event.at > now or self._computing:
                self._computing += 1
                self._compute_jobs.put(event)
            else:
                event.done.set()
        return event

    def compute_wait(self, event: _Event) -> None:
        if not self._runs_ahead:
            self.host_wait(event)
        self._computed_until = max(self._computed_until, event.at)

    def host_wait(self, event: _Event) -> None:
        event.done.wait()
        if event.error is not None:
            raise event.error

    def discard(self, slot: Tensor, after: _Event) -> None:
        with self._lock:
            self._readers[slot.data_ptr()] = after
            if after.done.is_set():
                slot.fill_(_POISON)
            else:
                after.slots.append(slot)

    def trim(self) -> None:
        return None

    def free_bytes(self) -> int | None:
        return self._capacity_bytes - self._allocated_bytes

    def close(self) -> None:
        self._copy_jobs.put(None)
        self._compute_jobs.put(None)
        for thread in self._threads:
            thread.join()
        self._allocated_bytes = 0

    def _serve_compute(self) -> None:
        while (event := self._compute_jobs.get()) is not None:
            _sleep_until(event.at)
            with self._lock:
                for slot in event.slots:
                    slot.fill_(_POISON)
                self._computing -= 1
                event.done.set()

    def _serve_copies(self) -> None:
        while (job := self._copy_jobs.get()) is not None:
            event, target, source, after = job
            if after is not None:
                after.done.wait()
            try:
                self._copy(target, source)
            except RuntimeError as error:
                event.error = error
            _sleep_until(event.at)
            event.done.set()

    def _copy(self, target: Tensor, source: Tensor) -> None:
        with self._lock:
            reader = self._readers.pop(target.data_ptr(), None)
            if reader is not None and not reader.done.is_set():
                self.overwrites_while_read += 1
            number, self.copies = self.copies, self.copies + 1
        if number == self._fail_at_copy:
            raise RuntimeError(f"simulated accelerator: copy {number} failed")
        target.copy_(source)


def _sleep_until(due: float) -> None:
    while (left := due - time.perf_counter()) > 0:
        time.sleep(left)
