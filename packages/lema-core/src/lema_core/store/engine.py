"""Carry out a step's plan ahead of the compute: a thread reads from disk, another copies to the device.

Loads are carried out in the order they are needed; each waits only until its slot has been released by its last reader.
Whatever fails in a thread is raised by the next borrow.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from queue import SimpleQueue
from threading import Condition, Thread

from lema_core.device import Device, Event
from lema_core.errors import PlanError
from lema_core.store.disk import DiskReader
from lema_core.store.granules import Granule
from lema_core.store.planner import TierPlan, plan_tier
from lema_core.store.trace import Trace
from lema_core.store.window import Window

#: how long an abandoned step is waited for; a read that hangs longer is left to its (daemon) thread
_PATIENCE_S = 2.0


@dataclass(frozen=True)
class StepPlan:
    """``near``: the window that compute borrows from. ``far``: the RAM window behind it, None where the device shares
    RAM."""

    near: TierPlan
    far: TierPlan | None

    def disk_loads(self) -> int:
        return len((self.far or self.near).loads)


@dataclass
class _Run:
    """One step under way. ``loaded``, ``staged``: loads completed from the front; guarded by ``changed``."""

    trace: Trace
    plan: StepPlan
    start_event: Event
    changed: Condition = field(default_factory=Condition)
    released: bytearray = field(init=False)
    release_events: dict[int, Event] = field(default_factory=dict)
    copies: list[Event] = field(default_factory=list)
    loaded: int = 0
    staged: int = 0
    error: BaseException | None = None
    stopped: bool = False
    threads_busy: int = 0

    def __post_init__(self) -> None:
        self.released = bytearray(len(self.trace.accesses))


class _Stopped(Exception):
    """The step was abandoned; its threads drop what they were about to do."""


class TransferEngine:
    """Moves granules disk -> ``far`` -> ``near``. ``far`` is None where the device computes from RAM."""

    def __init__(
        self,
        granules: Sequence[Granule],
        reader: DiskReader,
        device: Device,
        near: Window,
        far: Window | None,
        prefetch_distance: int,
    ) -> None:
        self._granules = granules
        self._reader = reader
        self._device = device
        self.near = near
        self.far = far
        self._prefetch_distance = prefetch_distance
        self._plans: dict[object, StepPlan] = {}
        self._run: _Run | None = None
        self._disk_jobs: SimpleQueue[_Run | None] = SimpleQueue()
        self._link_jobs: SimpleQueue[_Run | None] = SimpleQueue()
        self._threads = [
            Thread(target=self._serve, args=(self._disk_jobs, self._read_ahead), name="lema-disk", daemon=True)
        ]
        if far is not None:
            self._threads.append(
                Thread(target=self._serve, args=(self._link_jobs, self._copy_ahead), name="lema-link", daemon=True)
            )
        for thread in self._threads:
            thread.start()
        self.stuck = False
        self.wait_s = 0.0
        self.link_bytes = 0

    def plan(self, trace: Trace) -> StepPlan:
        """The plan of a step that starts with what the windows hold now."""
        near_before = self.near.resident()
        far_before = self.far.resident() if self.far is not None else {}
        key = (trace.key, frozenset(near_before.items()), frozenset(far_before.items()))
        if key not in self._plans:
            near = plan_tier(trace.accesses, self.near.n_slots, near_before, self._distance(self.near))
            far = None
            if self.far is not None:
                copied = [load.granule for load in near.loads]
                far = plan_tier(copied, self.far.n_slots, far_before, self._distance(self.far))
            if len(self._plans) >= 64:
                self._plans.clear()
            self._plans[key] = StepPlan(near, far)
        return self._plans[key]

    def _distance(self, window: Window) -> int:
        return min(self._prefetch_distance, window.n_slots // 2)

    def begin(self, trace: Trace) -> StepPlan:
        """Start moving for one step; accesses 0, 1, ... follow in the trace's order."""
        if self._run is not None or self.stuck:
            raise PlanError("a step is still under way")
        run = _Run(trace, self.plan(trace), self._device.record())
        run.threads_busy = len(self._threads)
        self._run = run
        self._disk_jobs.put(run)
        if self.far is not None:
            self._link_jobs.put(run)
        return run.plan

    def acquire(self, position: int, granule: int) -> int:
        """Wait for access ``position`` and return its slot. Raises what a thread raised, or PlanError on another
        order."""
        run = self._current()
        if position >= len(run.trace.accesses) or run.trace.accesses[position] != granule:
            raise PlanError(
                f"access {position} wants granule {granule} ({self._granules[granule].names[0]}), the trace does not"
            )
        load = run.plan.near.load_at[position]
        if load >= 0:
            if run.loaded <= load or run.error is not None:
                started = time.perf_counter()
                with run.changed:
                    run.changed.wait_for(lambda: run.loaded > load or run.error is not None)
                self.wait_s += time.perf_counter() - started
            if run.loaded <= load:
                raise run.error
            if self.far is not None:
                self._await_copy(run, load)
        return run.plan.near.slot_at[position]

    def _await_copy(self, run: _Run, load: int) -> None:
        started = time.perf_counter()
        try:
            self._device.compute_wait(run.copies[load])
        except BaseException:
            self.near.begin_fill(run.plan.near.loads[load].slot)
            raise
        self.wait_s += time.perf_counter() - started

    def release(self, position: int) -> None:
        """Access ``position`` is over; its slot may be overwritten when the plan says so."""
        run = self._current()
        if position in run.plan.near.last_use:
            event = self._device.record()
            self._device.discard(self.near.slot(run.plan.near.slot_at[position]), event)
            run.release_events[position] = event
        with run.changed:
            run.released[position] = 1
            run.changed.notify_all()

    def finish(self) -> None:
        """End a step whose accesses were all released; raises what a thread raised."""
        error = self._end_run(self._current())
        if error is not None:
            raise error

    def abort(self) -> None:
        """Abandon the step under way, if any; what was read so far stays usable."""
        if self._run is not None:
            with self._run.changed:
                self._run.stopped = True
                self._run.changed.notify_all()
            self._end_run(self._run, patience_s=_PATIENCE_S)

    def _end_run(self, run: _Run, patience_s: float | None = None) -> BaseException | None:
        with run.changed:
            idle = run.changed.wait_for(lambda: run.threads_busy == 0, patience_s)
        self._run = None
        if not idle:
            # A thread hangs in a read; whatever it does later must not meet another step.
            self.stuck = True
            return run.error
        # The next step may overwrite a RAM slot, or read a device slot, that a queued copy still works on.
        if run.copies:
            self._device.host_wait(run.copies[-1])
        return run.error

    def close(self) -> None:
        self.abort()
        self._disk_jobs.put(None)
        self._link_jobs.put(None)
        for thread in self._threads:
            thread.join(_PATIENCE_S if self.stuck else None)

    def _current(self) -> _Run:
        if self._run is None:
            raise PlanError("weights are borrowed outside a planned step")
        return self._run

    def _serve(self, jobs: SimpleQueue, work) -> None:
        while (run := jobs.get()) is not None:
            try:
                work(run)
            except _Stopped:
                pass
            except BaseException as error:
                with run.changed:
                    run.error = run.error or error
            with run.changed:
                run.threads_busy -= 1
                run.changed.notify_all()

    def _wait(self, run: _Run, ready) -> None:
        with run.changed:
            run.changed.wait_for(lambda: ready() or run.stopped or run.error is not None)
            if not ready():
                raise _Stopped

    def _read_ahead(self, run: _Run) -> None:
        window = self.far or self.near
        plan = run.plan.far or run.plan.near
        for load in plan.loads:
            if self.far is None:
                self._wait(run, lambda after=load.after: after < 0 or run.released[after])
            elif load.after >= 0:
                self._wait(run, lambda after=load.after: run.loaded > after)
                self._device.host_wait(run.copies[load.after])
            granule = self._granules[load.granule]
            window.begin_fill(load.slot)
            self._reader.read_granule(granule, window.memory(load.slot))
            window.end_fill(load.slot, load.granule)
            with run.changed:
                if self.far is None:
                    run.loaded += 1
                else:
                    run.staged += 1
                run.changed.notify_all()

    def _copy_ahead(self, run: _Run) -> None:
        for index, load in enumerate(run.plan.near.loads):
            staged = run.plan.far.load_at[index]
            self._wait(run, lambda staged=staged: run.staged > staged)
            self._wait(run, lambda after=load.after: after < 0 or run.released[after])
            after = run.release_events[load.after] if load.after >= 0 else run.start_event
            granule = self._granules[load.granule]
            source = self.far.slot(run.plan.far.slot_at[index])
            target = self.near.slot(load.slot)
            self.near.begin_fill(load.slot)
            copy = self._device.copy(target[: granule.nbytes], source[: granule.nbytes], after)
            self.near.end_fill(load.slot, load.granule)
            with run.changed:
                self.link_bytes += granule.nbytes
                run.copies.append(copy)
                run.loaded += 1
                run.changed.notify_all()
