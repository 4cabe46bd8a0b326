"""Decide, before a step runs, which granule is loaded into which slot and when the slot is free for it.

Slots are equal, so evicting the granule whose next use is furthest is optimal (Belady, "A study of replacement
algorithms for a virtual-storage computer", 1966). A step is followed by one like it: uses past its end are those of its
beginning.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

#: a next use that never comes
_NEVER = 1 << 60


@dataclass(frozen=True)
class Load:
    """Bring ``granule`` into ``slot`` for access ``position``, once access ``after`` has been released (-1: at
    once)."""

    position: int
    granule: int
    slot: int
    after: int


@dataclass(frozen=True)
class TierPlan:
    """``slot_at[k]``: the slot that access k finds its granule in. ``load_at[k]``: the load it waits for, -1 for a hit.

    ``last_use``: positions after which the granule in the slot is evicted within this step. ``resident``: granule ->
    slot at the end.
    """

    loads: tuple[Load, ...]
    slot_at: tuple[int, ...]
    load_at: tuple[int, ...]
    last_use: frozenset[int]
    resident: Mapping[int, int]

    def peak_slots(self, resident_before: Mapping[int, int]) -> int:
        """The most slots that ever held a granule; slots once filled stay filled."""
        return len({*resident_before.values(), *(load.slot for load in self.loads)})


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
    """Plan every tier of one step; ``*_before``: granule -> slot of what a window holds when it begins. ``far_slots``
    is None where the device shares RAM.

    What the near window loads is what the far one is asked for.
    """
    near = plan_tier(accesses, near_slots, near_before, _distance(prefetch_distance, near_slots))
    if far_slots is None:
        return StepPlan(near, None)
    copied = [load.granule for load in near.loads]
    return StepPlan(near, plan_tier(copied, far_slots, far_before, _distance(prefetch_distance, far_slots)))


def _distance(prefetch_distance: int, n_slots: int) -> int:
    return min(prefetch_distance, n_slots // 2)


def next_uses(accesses: Sequence[int]) -> list[int]:
    """For each access, the position at which its granule is used next, counting on into a repetition of the
    sequence."""
    n = len(accesses)
    upcoming: dict[int, int] = {}
    for k in range(n - 1, -1, -1):
        upcoming[accesses[k]] = k + n
    result = [0] * n
    for k in range(n - 1, -1, -1):
        result[k] = upcoming[accesses[k]]
        upcoming[accesses[k]] = k
    return result


def plan_tier(accesses: Sequence[int], n_slots: int, resident: Mapping[int, int], prefetch_distance: int) -> TierPlan:
    """Plan one tier.

    ``resident``: granule -> slot before the step. ``prefetch_distance``: a load prefers slots that were released at
    least so many accesses before it is needed, so that it has that long to arrive; where there is none, any released
    slot serves.
    """
    following = next_uses(accesses)
    first_use: dict[int, int] = {}
    for k, granule in enumerate(accesses):
        first_use.setdefault(granule, k)
    slot_of = dict(resident)
    last_use = dict.fromkeys(slot_of, -1)
    upcoming = {granule: first_use.get(granule, _NEVER) for granule in slot_of}
    heap = [(-use, granule) for granule, use in upcoming.items()]
    heapq.heapify(heap)
    free = sorted(set(range(n_slots)) - set(slot_of.values()), reverse=True)
    loads: list[Load] = []
    slot_at, load_at, evictions = [], [], set()
    for k, granule in enumerate(accesses):
        if granule in slot_of:
            load_at.append(-1)
        else:
            if free:
                slot, after = free.pop(), -1
            else:
                victim = _furthest(heap, upcoming, last_use, k - 1 - prefetch_distance)
                slot, after = slot_of.pop(victim), last_use.pop(victim)
                del upcoming[victim]
                if after >= 0:
                    evictions.add(after)
            slot_of[granule] = slot
            load_at.append(len(loads))
            loads.append(Load(k, granule, slot, after))
        slot_at.append(slot_of[granule])
        last_use[granule] = k
        upcoming[granule] = following[k]
        heapq.heappush(heap, (-following[k], granule))
    return TierPlan(tuple(loads), tuple(slot_at), tuple(load_at), frozenset(evictions), slot_of)


def _furthest(
    heap: list[tuple[int, int]], upcoming: Mapping[int, int], last_use: Mapping[int, int], newest: int
) -> int:
    """Pop the granule used furthest in the future among those last used at ``newest`` or before, else the furthest of
    all."""
    too_recent = []
    victim = None
    while heap:
        entry = heapq.heappop(heap)
        granule = entry[1]
        if upcoming.get(granule) != -entry[0]:
            continue
        if last_use[granule] <= newest:
            victim = granule
            break
        too_recent.append(entry)
    if victim is None:
        victim = too_recent.pop(0)[1]
    for entry in too_recent:
        heapq.heappush(heap, entry)
    return victim
