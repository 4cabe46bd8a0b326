"""How long a step will take, what bounds it, and what it moves: the transfer engine's work carried out on paper.

The disk carries loads out in their order, each as soon as its slot's last reader is over; so does the link. Compute
takes its accesses in their order, waits for what is not there yet, and gives each back when its product is done. On a
device with memory of its own, operations are queued ahead and cost time only where queueing them takes longer than
they do. Nothing here reads a weight: a plan and a few rates are all that it takes.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from lema_core.errors import BudgetError
from lema_core.memory import format_bytes
from lema_core.planning.hardware import Hardware
from lema_core.store.granules import Granule, Read
from lema_core.store.planner import Load
from lema_core.store.step_plan import StepPlan, numbered, plan_step
from lema_core.store.trace import Trace, Work

Lane = Literal["disk", "link", "compute", "wait"]
#: a step's plan repeats itself after a step or two; more are not looked at
_MOST_STEPS = 4
_GB = 1_000_000_000
_NOTHING = Work(0.0, 1, 0.0)


@dataclass(frozen=True)
class Span:
    """Something that a lane is busy with. ``granule``: what is read, copied, waited for, or computed with."""

    lane: Lane
    start_s: float
    stop_s: float
    granule: int


@dataclass(frozen=True)
class StepPrediction:
    """``step_s`` = ``compute_s`` + ``wait_s``. ``memory_s``: the part of ``compute_s`` beside products, reading and
    writing activations. ``disk_s``, ``link_s``: how long each is busy.

    ``read_bytes``: disk -> RAM. ``copied_bytes``: RAM -> device. ``timeline``: in rising order of ``start_s`` per lane.
    """

    step_s: float
    compute_s: float
    memory_s: float
    disk_s: float
    link_s: float
    wait_s: float
    read_bytes: int
    copied_bytes: int
    timeline: tuple[Span, ...]

    @property
    def bound_by(self) -> Literal["compute", "disk", "link", "memory"]:
        """What is busy longest. Of the two that take turns in computing, the longer."""
        if self.compute_s >= max(self.disk_s, self.link_s):
            return "memory" if self.memory_s > self.compute_s / 2 else "compute"
        return "disk" if self.disk_s >= self.link_s else "link"


@dataclass(frozen=True)
class SteadyStep:
    """A step like those before it: its plan, and what the windows hold when it begins (granule -> slot)."""

    plan: StepPlan
    near_before: Mapping[int, int]
    far_before: Mapping[int, int]


def steady_step(
    trace: Trace,
    near_slots: int,
    far_slots: int | None,
    prefetch_distance: int,
    changing: Collection[int] = (),
) -> SteadyStep:
    """The step that follows steps like it, the first of which began with empty windows. ``changing``: granules that
    change between steps, in the window in RAM: a device's own has to load them anew."""
    near: dict[int, int] = {}
    far: dict[int, int] = {}
    for _ in range(_MOST_STEPS):
        before = near, far
        plan = plan_step(trace, near_slots, near, far_slots, far, prefetch_distance)
        kept = plan.near.resident if far_slots is None else set(plan.near.resident) - set(changing)
        near, far = numbered(kept), numbered(plan.far.resident) if plan.far else {}
        if (near, far) == before:
            break
    return SteadyStep(plan, *before)


def predict_step(trace: Trace, plan: StepPlan, granules: Sequence[Granule], rates: Hardware) -> StepPrediction:
    """Carry ``plan`` out on paper. ``trace.work`` says what is computed; a trace without it only borrows.

    ``rates.link_bytes_per_s`` is looked at where the plan has a far window.
    """
    disk_bytes = _file_bytes(granules)
    lanes = _Lanes(plan, granules, disk_bytes, rates)
    disk_loads = (plan.far or plan.near).loads
    read_bytes = sum(disk_bytes[load.granule] for load in disk_loads)
    undisturbed_s = sum(sum(_work_s(work, rates, plan.far is not None)) for work in trace.work)
    drag = 1 + rates.read_drag_s_per_byte * read_bytes / undisturbed_s if undisturbed_s else 1.0
    released: list[float] = []
    spans = lanes.spans
    queued = plan.far is not None
    now = wait_s = memory_s = queued_s = 0.0
    for position, granule in enumerate(trace.accesses):
        load = plan.near.load_at[position]
        if load >= 0:
            there = lanes.arrival(load, released)
            if there > now:
                spans.append(Span("wait", now, there, granule))
                wait_s += there - now
                now = there
        started = now
        work = trace.work[position] if trace.work else _NOTHING
        product_s, beside_s = (drag * seconds for seconds in _work_s(work, rates, queued))
        # Nothing starts before it is queued.
        now = max(now, queued_s) + product_s
        # What follows the product no longer needs the weight.
        released.append(now)
        memory_s += beside_s
        now += beside_s
        if queued:
            queued_s += _overhead_s(work, rates)
            now = max(now, queued_s)
        spans.append(Span("compute", started, now, granule))
    return StepPrediction(
        step_s=now,
        compute_s=now - wait_s,
        memory_s=memory_s,
        disk_s=lanes.busy_s["disk"],
        link_s=lanes.busy_s["link"],
        wait_s=wait_s,
        read_bytes=read_bytes,
        copied_bytes=sum(granules[load.granule].nbytes for load in plan.near.loads) if plan.far else 0,
        timeline=tuple(spans),
    )


def compute_s(trace: Trace, rates: Hardware) -> float:
    """Seconds of a step that waits for nothing."""
    queued = not rates.device_shares_ram
    working_s = sum(sum(_work_s(work, rates, queued)) for work in trace.work)
    return max(working_s, sum(_overhead_s(work, rates) for work in trace.work)) if queued else working_s


def _work_s(work: Work, rates: Hardware, queued: bool) -> tuple[float, float]:
    """Of the product with its borrow, and of all beside it: activations that are read and written, and, unless they are
    ``queued`` ahead, what operations cost."""
    product_s = rates.pace * rates.product_s(work.flops, work.tokens)
    beside_s = rates.pace * work.touched_bytes / rates.memory_bytes_per_s
    if queued:
        return product_s, beside_s
    first_s = rates.pace * rates.op_overhead_s
    return product_s + first_s, beside_s + _overhead_s(work, rates) - first_s


def _overhead_s(work: Work, rates: Hardware) -> float:
    return rates.pace * max(1, work.operations) * rates.op_overhead_s


class _Lanes:
    """When the disk and the link have done what."""

    def __init__(self, plan: StepPlan, granules: Sequence[Granule], disk_bytes: Sequence[int], rates: Hardware) -> None:
        self._plan = plan
        self._granules = granules
        self._disk_bytes = disk_bytes
        self._rates = rates
        self._free_s = {"disk": 0.0, "link": 0.0}
        self._copied: list[float] = []
        self.busy_s = {"disk": 0.0, "link": 0.0}
        self.spans: list[Span] = []

    def arrival(self, load: int, released: Sequence[float]) -> float:
        """When load ``load`` of the near window is there; loads are asked for in their order. ``released``: when each
        access so far was over."""
        near = self._plan.near.loads[load]
        slot_free = released[near.after] if near.after >= 0 else 0.0
        if self._plan.far is None:
            return self._read(near, slot_free)
        in_ram, staged = 0.0, self._plan.far.load_at[load]
        if staged >= 0:
            far = self._plan.far.loads[staged]
            in_ram = self._read(far, self._copied[far.after] if far.after >= 0 else 0.0)
        duration = self._granules[near.granule].nbytes / self._rates.link_bytes_per_s
        self._copied.append(self._occupy("link", max(in_ram, slot_free), duration, near.granule))
        return self._copied[-1]

    def _read(self, load: Load, slot_free: float) -> float:
        duration = self._disk_bytes[load.granule] / self._rates.disk_bytes_per_s
        return self._occupy("disk", slot_free, duration, load.granule)

    def _occupy(self, lane: Literal["disk", "link"], ready: float, duration: float, granule: int) -> float:
        start = max(self._free_s[lane], ready)
        self._free_s[lane] = start + duration
        self.busy_s[lane] += duration
        self.spans.append(Span(lane, start, start + duration, granule))
        return start + duration


def _file_bytes(granules: Iterable[Granule]) -> list[int]:
    """Bytes that reading each granule gives: all of its sectors but what of the last lies behind a file's end."""
    sizes: dict[Path, int] = {}

    def of(read: Read) -> int:
        if read.needed_bytes == read.nbytes:
            return read.nbytes
        if read.path not in sizes:
            sizes[read.path] = os.stat(read.path).st_size
        return min(read.nbytes, sizes[read.path] - read.file_offset)

    return [sum(map(of, granule.reads)) for granule in granules]


def floor_s(trace: Trace, prediction: StepPrediction, rates: Hardware) -> float:
    """What no schedule that moves as many bytes can beat: the longest of products alone, reads alone, copies alone."""
    products = sum(rates.product_s(work.flops, work.tokens) for work in trace.work)
    link = prediction.copied_bytes / rates.link_bytes_per_s if prediction.copied_bytes else 0.0
    return max(products, prediction.read_bytes / rates.disk_bytes_per_s, link)


def what_next_gb_buys(predict: Callable[[int], float], now_bytes: int) -> float:
    """Seconds per step that 1 GB more would save. ``predict``: bytes of one tier -> seconds per step."""
    return predict(now_bytes) - predict(now_bytes + _GB)


def smallest_memory(
    predict: Callable[[int], float], low: int, high: int, target_s: float, resolution_bytes: int = 1_000_000
) -> int:
    """The fewest bytes in [low, high], to ``resolution_bytes``, with which a step takes at most ``target_s``.

    ``predict``: bytes -> seconds per step, which more bytes never raise. Raises BudgetError, with what is possible,
    where ``high`` does not meet the target.
    """
    best_s = predict(high)
    if best_s > target_s:
        raise BudgetError(
            f"target_step_time_ms: {1000 * target_s:.0f} ms cannot be met: with all of {format_bytes(high)} a step is "
            f"predicted to take {1000 * best_s:.0f} ms; raise the target or shorten the step"
        )
    if predict(low) <= target_s:
        return low
    while high - low > resolution_bytes:
        middle = (low + high) // 2
        if predict(middle) <= target_s:
            high = middle
        else:
            low = middle
    return high
