"""Plan every tier of one step, from what the windows hold when it begins."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from lema_core.store.planner import TierPlan, plan_tier
from lema_core.store.trace import Trace


@dataclass(frozen=True)
class StepPlan:
    """``near``: the window that compute borrows from. ``far``: the RAM window behind it, None where the device shares
    RAM."""

    near: TierPlan
    far: TierPlan | None

    def disk_loads(self) -> int:
        return len((self.far or self.near).loads)


def numbered(resident: Iterable[int]) -> dict[int, int]:
    """granule -> slot, for a plan that does not depend on where things are in a window: granules in rising order."""
    return {granule: slot for slot, granule in enumerate(sorted(resident))}


def plan_step(
    trace: Trace,
    near_slots: int,
    near_before: Mapping[int, int],
    far_slots: int | None,
    far_before: Mapping[int, int],
    prefetch_distance: int,
) -> StepPlan:
    """``*_before``: granule -> slot of what a window holds. ``far_slots`` is None where the device shares RAM.

    What the near window loads is what the far one is asked for.
    """
    flops = [work.flops for work in trace.work]
    near = plan_tier(trace.accesses, near_slots, near_before, _distance(prefetch_distance, near_slots), flops)
    if far_slots is None:
        return StepPlan(near, None)
    copied = [load.granule for load in near.loads]
    between = _between([load.position for load in near.loads], flops)
    return StepPlan(near, plan_tier(copied, far_slots, far_before, _distance(prefetch_distance, far_slots), between))


def _between(positions: Sequence[int], flops: Sequence[float]) -> list[float]:
    """What is computed from each position up to the next, the last one's next being the first's of the next step."""
    if not positions or not flops:
        return []
    sums = [sum(flops[start:stop]) for start, stop in pairwise(positions)]
    return [*sums, sum(flops[positions[-1] :]) + sum(flops[: positions[0]])]


def _distance(prefetch_distance: int, n_slots: int) -> int:
    return min(prefetch_distance, n_slots // 2)
