"""A step under way: what its threads and the compute tell each other, and what updates of weights see of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from threading import Condition
from typing import Protocol

from lema_core.device import Device, Event
from lema_core.store.step_plan import StepPlan
from lema_core.store.trace import Trace


@dataclass(frozen=True)
class Use:
    """Where a pass uses a granule first: for access ``position``, in ``slot``, once ``load`` is carried out (-1: it is
    there)."""

    position: int
    slot: int
    load: int


class PassView(Protocol):
    """What an update needs to know of a pass under way, about granules of the announced region and slots of the window
    in RAM. Where the device has a window of its own, it is copying that uses them."""

    def uses(self) -> Mapping[int, Use]:
        """By granule."""

    def stays(self, granule: int) -> bool:
        """What is in its slot before the pass is there all the time until it is over."""

    def await_load(self, load: int) -> None:
        """Returns when it is carried out; raises Abandoned when the pass is."""

    def await_copies(self, granule: int) -> None:
        """Returns when the copies of the granule that the pass makes are there; all of them are on their way."""

    def last_slot(self, granule: int) -> int | None:
        """Where a granule that the pass does not use any more stays until its end; None where it does not."""


class Abandoned(Exception):
    """The pass that updates were applied in was given up."""


@dataclass
class Run:
    """One step under way. ``near_slots``, ``far_slots``: where in its window each slot of the plan is. ``loaded``,
    ``staged``: loads completed from the front; guarded by ``changed``.

    With a far window, a near load is completed when its copy is queued: ``arrived`` are those that compute has waited
    for.
    """

    trace: Trace
    plan: StepPlan
    near_slots: Sequence[int]
    far_slots: Sequence[int]
    start_event: Event
    changed: Condition = field(default_factory=Condition)
    released: bytearray = field(init=False)
    release_events: dict[int, Event] = field(default_factory=dict)
    copies: list[Event] = field(default_factory=list)
    arrived: set[int] = field(default_factory=set)
    loaded: int = 0
    staged: int = 0
    error: BaseException | None = None
    stopped: bool = False
    threads_busy: int = 0

    def __post_init__(self) -> None:
        self.released = bytearray(len(self.trace.accesses))

    def wait(self, ready: Callable[[], bool]) -> None:
        """Until ``ready()``. Raises Stopped as soon as the step is abandoned or has failed, ready or not."""
        with self.changed:
            self.changed.wait_for(lambda: ready() or self.stopped or self.error is not None)
            if self.stopped or self.error is not None:
                raise Stopped


class Stopped(Exception):
    """The step was abandoned; its threads drop what they were about to do."""


class RunView:
    """A step under way, as updates see it: what happens in the window in RAM."""

    def __init__(self, run: Run, device: Device) -> None:
        self._run = run
        self._device = device
        self._has_far = run.plan.far is not None
        self._plan = run.plan.far or run.plan.near
        self._slots = run.far_slots if self._has_far else run.near_slots
        self._loaded = {load.granule for load in self._plan.loads}

    @cached_property
    def _uses(self) -> dict[int, Use]:
        uses = enumerate(self._run.trace.accesses)
        if self._has_far:
            uses = ((load.position, load.granule) for load in self._run.plan.near.loads)
        found: dict[int, Use] = {}
        for index, (position, granule) in enumerate(uses):
            if granule not in found:
                found[granule] = Use(position, self._slots[self._plan.slot_at[index]], self._plan.load_at[index])
        return found

    def uses(self) -> Mapping[int, Use]:
        return self._uses

    def stays(self, granule: int) -> bool:
        # given up without being loaded again: only in a pass that goes one way
        return granule not in self._loaded and granule in self._plan.resident

    def last_slot(self, granule: int) -> int | None:
        slot = self._plan.resident.get(granule)
        return None if slot is None else self._slots[slot]

    def await_load(self, load: int) -> None:
        run = self._run
        try:
            run.wait(lambda: (run.staged if self._has_far else run.loaded) > load)
        except Stopped:
            raise Abandoned from None

    def await_copies(self, granule: int) -> None:
        if self._has_far:
            loads = [index for index, load in enumerate(self._run.plan.near.loads) if load.granule == granule]
            if loads:
                self._device.host_wait(self._run.copies[loads[-1]])
