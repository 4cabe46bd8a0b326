"""Carry out a step's plan ahead of the compute: a thread reads from disk, another copies to the device.

Loads are carried out in the order they are needed; each waits only until its slot has been released by its last reader.
Whatever fails in a thread is raised by the next borrow, with the tensor and the file.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from queue import SimpleQueue
from threading import Thread

from lema_core.device import Device
from lema_core.errors import LemaError, PlanError, TransferError
from lema_core.store.disk import DiskReader, shown
from lema_core.store.granules import Granule
from lema_core.store.model import Region
from lema_core.store.passes import Abandoned, Run, RunView, Stopped
from lema_core.store.step_plan import StepPlan, numbered, plan_step
from lema_core.store.trace import Trace
from lema_core.store.updates import WeightUpdates
from lema_core.store.window import Window

#: how long an abandoned step is waited for; a read that hangs longer is left to its (daemon) thread
_PATIENCE_S = 2.0
#: what an idle thread needs to end
_LEAVE_S = 0.2
#: plans that are kept: of a step that repeats itself, also between evaluations, few are needed
_KEPT_PLANS = 16


class TransferEngine:
    """Moves granules disk -> ``far`` -> ``near``. ``far`` is None where the device computes from RAM.

    ``updates``: changes weights that train, in the window in RAM, before they are borrowed or copied from there.
    """

    def __init__(
        self,
        granules: Sequence[Granule],
        reader: DiskReader,
        device: Device,
        near: Window,
        far: Window | None,
        prefetch_distance: int,
        updates: WeightUpdates | None = None,
    ) -> None:
        self._granules = granules
        self._updates = updates
        self._reader = reader
        self._device = device
        self.near = near
        self.far = far
        self._prefetch_distance = prefetch_distance
        self._plans: OrderedDict[object, StepPlan] = OrderedDict()
        self._run: Run | None = None
        self._disk_jobs: SimpleQueue[Run | None] = SimpleQueue()
        self._link_jobs: SimpleQueue[Run | None] = SimpleQueue()
        self._threads = [
            Thread(target=self._serve, args=(self._disk_jobs, self._read_ahead), name="lema-disk", daemon=True)
        ]
        if far is not None:
            self._threads.append(
                Thread(target=self._serve, args=(self._link_jobs, self._copy_ahead), name="lema-link", daemon=True)
            )
        for thread in self._threads:
            thread.start()
        self._closed = False
        self.wait_s = 0.0
        self.link_bytes = 0
        self.disk_bytes = 0

    def plan(self, trace: Trace) -> StepPlan:
        """The plan of a step that starts with what the windows hold now; its slots are those of :func:`numbered`."""
        near = numbered(self.near.resident())
        far = numbered(self.far.resident()) if self.far is not None else {}
        # Which slot holds what changes with every step, and would make a plan for each of them.
        key = (trace.accesses, bool(trace.work), tuple(near), tuple(far))
        plan = self._plans.get(key)
        if plan is None:
            far_slots = None if self.far is None else self.far.n_slots
            plan = plan_step(trace, self.near.n_slots, near, far_slots, far, self._prefetch_distance)
            self._plans[key] = plan
            if len(self._plans) > _KEPT_PLANS:
                self._plans.popitem(last=False)
        self._plans.move_to_end(key)
        return plan

    def begin(self, trace: Trace) -> StepPlan:
        """Start moving for one step; accesses 0, 1, ... follow in the trace's order."""
        if self._closed:
            raise PlanError("the store is closed; open the model again")
        if self.stuck:
            self.abort()
            if self.stuck:
                raise PlanError("a read of an abandoned step still hangs; try again later, or open the model again")
        if self._run is not None:
            raise PlanError("a step is still under way")
        if self._updates is not None:
            self._updates.settle()
        far_slots = _places(self.far) if self.far is not None else ()
        run = Run(trace, self.plan(trace), _places(self.near), far_slots, self._device.record())
        run.threads_busy = len(self._threads)
        if self._updates is not None:
            self._updates.begin(RunView(run, self._device))
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
        if load >= run.loaded and run.error is None:
            self._await_load(run, load)
        if run.error is not None:
            raise run.error
        if self.far is not None:
            # What was changed is copied anew, and not before.
            if load >= 0:
                self._await_copy(run, load)
        elif self._updates is not None:
            try:
                self._updates.await_applied(Region.STREAM, granule)
            except Abandoned:
                raise run.error or PlanError("a step was abandoned") from None
        return run.near_slots[run.plan.near.slot_at[position]]

    def _await_load(self, run: Run, load: int) -> None:
        wanted = run.plan.near.loads[load]
        if wanted.after >= 0 and not run.released[wanted.after]:
            # Only the caller can release it, and the caller is here: waiting would never end.
            name, held = (self._granules[g].names[0] for g in (wanted.granule, run.trace.accesses[wanted.after]))
            raise PlanError(f"{name} is borrowed while {held}, whose slot it needs, has not been given back")
        started = time.perf_counter()
        with run.changed:
            run.changed.wait_for(lambda: run.loaded > load or run.error is not None)
        self.wait_s += time.perf_counter() - started

    def _await_copy(self, run: Run, load: int) -> None:
        started = time.perf_counter()
        granule = self._granules[run.plan.near.loads[load].granule]
        with _naming(granule, "copying to the device"):
            self._device.compute_wait(run.copies[load])
        run.arrived.add(load)
        self.wait_s += time.perf_counter() - started

    def release(self, position: int) -> None:
        """Access ``position`` is over; its slot may be overwritten when the plan says so."""
        run = self._current()
        if self._updates is not None and self.far is None:
            self._updates.await_saved(run.trace.accesses[position])
        if position not in run.plan.near.last_use:
            run.released[position] = 1
            return
        event = self._device.record()
        self._device.discard(self.near.slot(run.near_slots[run.plan.near.slot_at[position]]), event)
        run.release_events[position] = event
        with run.changed:
            run.released[position] = 1
            run.changed.notify_all()

    def finish(self) -> None:
        """End a step all of whose accesses were made. Raises what a thread raised, PlanError for one not released."""
        run = self._current()
        held = run.released.find(0)
        if held >= 0:
            self.abort()
            raise PlanError(f"{self._granules[run.trace.accesses[held]].names[0]} was borrowed and not given back")
        error = self._end_run(run, None) or run.error
        if self._updates is not None:
            self._updates.end()
        if error is not None:
            raise error

    def abort(self) -> None:
        """Abandon the step under way, if any; what was read so far stays usable. See ``stuck``."""
        run = self._run
        if run is not None:
            with run.changed:
                patience_s = 0.0 if run.stopped else _PATIENCE_S
                run.stopped = True
                run.changed.notify_all()
            self._end_run(run, patience_s)
            if self._updates is not None:
                self._updates.end(abandoned=True)

    @property
    def stuck(self) -> bool:
        """A thread hangs in a read of an abandoned step; no step can begin before it is back."""
        return self._run is not None and self._run.stopped

    def _end_run(self, run: Run, patience_s: float | None) -> Exception | None:
        """Wait for the threads and for queued copies; returns a copy's error. A copy that failed leaves its slot
        empty. A thread that stays busy longer than ``patience_s`` keeps the run, so that it meets no other step."""
        with run.changed:
            if not run.changed.wait_for(lambda: run.threads_busy == 0, patience_s):
                return None
        self._run = None
        failed: Exception | None = None
        # The next step may overwrite a RAM slot, or read a device slot, that a queued copy still works on.
        for load, copy in enumerate(run.copies):
            if load in run.arrived and load + 1 < len(run.copies):
                continue
            try:
                self._device.host_wait(copy)
            except Exception as error:
                failed = failed or error
                self.near.begin_fill(run.near_slots[run.plan.near.loads[load].slot])
        # In an abandoned step a slot may have been given up for a load that never came.
        for load in run.plan.near.loads[run.loaded :]:
            if load.after in run.release_events:
                self.near.begin_fill(run.near_slots[load.slot])
        return failed

    def close(self) -> None:
        """Stop the threads; safe to call twice. One that hangs in a read is left behind (``stuck``)."""
        self.abort()
        self._closed = True
        self._disk_jobs.put(None)
        self._link_jobs.put(None)
        # The one that hangs was waited for already, and a program that is told to stop has few seconds.
        for thread in self._threads:
            thread.join(_LEAVE_S if self.stuck else None)

    def _current(self) -> Run:
        if self._run is None or self._run.stopped:
            raise PlanError("weights are borrowed outside a planned step")
        return self._run

    def _serve(self, jobs: SimpleQueue, work) -> None:
        while (run := jobs.get()) is not None:
            try:
                work(run)
            except Stopped:
                pass
            except BaseException as error:
                with run.changed:
                    run.error = run.error or error
            with run.changed:
                run.threads_busy -= 1
                run.changed.notify_all()

    def _read_ahead(self, run: Run) -> None:
        window, plan, slots = self.near, run.plan.near, run.near_slots
        if self.far is not None:
            window, plan, slots = self.far, run.plan.far, run.far_slots
        for load in plan.loads:
            granule, slot = self._granules[load.granule], slots[load.slot]
            if self.far is None:
                run.wait(lambda after=load.after: after < 0 or run.released[after])
            else:
                run.wait(lambda after=load.after: run.loaded > after)
                if load.after >= 0:
                    with _naming(self._granules[run.plan.near.loads[load.after].granule], "copying to the device"):
                        self._device.host_wait(run.copies[load.after])
            if self._updates is not None:
                with _giving_up():
                    self._updates.await_file(Region.STREAM, load.granule)
                    if self.far is not None and (held := window.granule_in(slot)) is not None:
                        self._updates.await_written(held)
            window.begin_fill(slot)
            with _naming(granule, "reading"):
                self._reader.read_granule(granule, window.memory(slot))
            window.end_fill(slot, load.granule)
            with run.changed:
                self.disk_bytes += granule.nbytes
                if self.far is None:
                    run.loaded += 1
                else:
                    run.staged += 1
                run.changed.notify_all()

    def _copy_ahead(self, run: Run) -> None:
        for index, load in enumerate(run.plan.near.loads):
            staged = run.plan.far.load_at[index]
            run.wait(
                lambda staged=staged, after=load.after: run.staged > staged and (after < 0 or run.released[after]),
            )
            if self._updates is not None:
                with _giving_up():
                    self._updates.await_changed(Region.STREAM, load.granule)
            after = run.release_events[load.after] if load.after >= 0 else run.start_event
            granule, slot = self._granules[load.granule], run.near_slots[load.slot]
            source = self.far.slot(run.far_slots[run.plan.far.slot_at[index]])
            target = self.near.slot(slot)
            self.near.begin_fill(slot)
            with _naming(granule, "copying to the device"):
                copy = self._device.copy(target[: granule.nbytes], source[: granule.nbytes], after)
            self.near.end_fill(slot, load.granule)
            with run.changed:
                self.link_bytes += granule.nbytes
                run.copies.append(copy)
                run.loaded += 1
                run.changed.notify_all()


def _places(window: Window) -> list[int]:
    """Where the slots of a plan, those of :func:`numbered` and then the empty ones, are in ``window``."""
    resident = window.resident()
    filled = [resident[granule] for granule in numbered(resident)]
    return filled + sorted(set(range(window.n_slots)) - set(filled))


@contextmanager
def _giving_up() -> Iterator[None]:
    """A thread of a step that updates have abandoned drops what it was about to do."""
    try:
        yield
    except Abandoned:
        raise Stopped from None


@contextmanager
def _naming(granule: Granule, doing: str) -> Iterator[None]:
    """Turn an error of the device or the system into one that names tensor and file."""
    try:
        yield
    except LemaError:
        raise
    except Exception as error:
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise TransferError(f"{granule.reads[0].path}: {shown(granule.names)}: {doing} failed: {reason}") from error
