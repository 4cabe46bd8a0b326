"""Plan every tier of one step, from what the windows hold when it begins."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lema_core.store.planner import TierPlan, plan_tier


@dataclass(frozen=True)
class StepPlan:
    """``near``: the window that compute borrows from. ``far``: the RAM window behind it, None where the device shares
    RAM."""

    near: TierPlan
    far: TierPlan | None

    def disk_loads(self) -> int:
        return len((self.far or self.near).loads)


def plan_step(
    accesses: Sequence[int],
    near_slots: int,
    near_before: Mapping[int, int],
    far_slots: int | None,
    far_before: Mapping[int, int],
    prefetch_distance: int,
) -> StepPlan:
    """``*_before``: granule -> slot of what a window holds. ``far_slots`` is None where the device shares RAM.

    What the near window loads is what the far one is asked for.
    """
    near = plan_tier(accesses, near_slots, near_before, _distance(prefetch_distance, near_slots))
    if far_slots is None:
        return StepPlan(near, None)
    copied = [load.granule for load in near.loads]
    return StepPlan(near, plan_tier(copied, far_slots, far_before, _distance(prefetch_distance, far_slots)))


def _distance(prefetch_distance: int, n_slots: int) -> int:
    return min(prefetch_distance, n_slots // 2)
