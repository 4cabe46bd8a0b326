"""Decide, before a step runs, which granule is loaded into which slot and when the slot is free for it.

Which granules to keep follows Belady ("A study of replacement algorithms for a virtual-storage computer", 1966): slots
are equal, so giving up the one whose next use is furthest costs the fewest loads. A step is followed by one like it:
uses past its end are those of its beginning.

*When* to give it up follows Cao, Felten, Karlin and Li ("A study of integrated prefetching and caching strategies",
1995, their "conservative"): at its last use before the eviction, not when the slot is needed. The earliest slot given
up serves the first load, so that with the fewest loads each has the longest time to arrive.

Where even that leaves no time (a cycle through more than the window holds), what was released less than ``lead``
accesses ago is not given up, and some granules, spread evenly, are pinned so that loads are spread too. Both cost
loads, and are done where a model of the step says that they save time.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

#: a next use that never comes
_NEVER = 1 << 60
#: the model's step computes this much longer than it transfers: where overlap is just possible, and matters most
_COMPUTE_PER_TRANSFER = 1.2
#: a step that is modelled to be shorter by less than this is not worth a load
_WORTH = 0.02
#: steps until the windows hold what they will hold at the start of every step
_WARM_STEPS = 3


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

    def modelled_s(self, load_s: Sequence[float], compute_s: Sequence[float]) -> float:
        """The step's time where load i takes ``load_s[i]``, one after another, and access k computes for
        ``compute_s[k]``."""
        over = [0.0] * len(compute_s)
        loaded = now = 0.0
        for k, seconds in enumerate(compute_s):
            if (index := self.load_at[k]) >= 0:
                after = self.loads[index].after
                loaded = max(loaded, over[after] if after >= 0 else 0.0) + load_s[index]
                now = max(now, loaded)
            now += seconds
            over[k] = now
        return now


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


def plan_tier(
    accesses: Sequence[int],
    n_slots: int,
    resident: Mapping[int, int],
    prefetch_distance: int,
    work: Sequence[float] = (),
) -> TierPlan:
    """Plan one tier.

    ``resident``: granule -> slot before the step. ``prefetch_distance``: the most accesses that a slot may be kept idle
    for, so that its load has that long to arrive. ``work``: how long each access computes, in any unit; empty where all
    take the same.

    A step planned from the ``resident`` of the last one, over and over, loads the fewest granules there can be, or more
    where it is modelled to be shorter by 2 % or more for it.
    """
    accesses = tuple(accesses)
    policy = _choose(accesses, n_slots, prefetch_distance, tuple(work))
    return _plan(accesses, next_uses(accesses), n_slots, resident, policy)


@dataclass(frozen=True)
class _Policy:
    """``lead``: accesses that a slot is idle for, where it can be, before it is filled. ``pinned``: never given up."""

    lead: int
    pinned: frozenset[int]


@lru_cache(maxsize=64)
def _choose(accesses: tuple[int, ...], n_slots: int, prefetch_distance: int, work: tuple[float, ...]) -> _Policy:
    """The policy with which a step like this, repeated, is modelled to be the shortest; of equals the fewest loads."""
    optimal = _Policy(0, frozenset())
    granules = list(dict.fromkeys(accesses))
    most = min(prefetch_distance, n_slots - 1)
    if len(granules) <= n_slots or most <= 0:
        return optimal
    total = sum(work)
    shares = [share / total for share in work] if total > 0 else [1 / len(accesses)] * len(accesses)
    following = next_uses(accesses)
    compute_s: list[float] = []
    enough = 0.0
    modelled: list[tuple[float, int, _Policy]] = []
    for lead in (0, *(1 << bit for bit in range(most.bit_length()))):
        n_pinned = n_slots - 1 - lead
        spread = frozenset(granules[i * len(granules) // n_pinned] for i in range(n_pinned))
        for policy in dict.fromkeys((_Policy(lead, frozenset()), _Policy(lead, spread))):
            plan = _plan(accesses, following, n_slots, {}, policy)
            for _ in range(_WARM_STEPS):
                plan = _plan(accesses, following, n_slots, plan.resident, policy)
            if not compute_s:
                compute_s = [_COMPUTE_PER_TRANSFER * len(plan.loads) * share for share in shares]
                enough = (1 + _WORTH) * _least_s(plan, n_slots, compute_s)
            seconds = plan.modelled_s([1.0] * len(plan.loads), compute_s)
            modelled.append((seconds, len(plan.loads), policy))
            if seconds <= enough:
                return policy
    enough = (1 + _WORTH) * min(seconds for seconds, _, _ in modelled)
    return min((m for m in modelled if m[0] <= enough), key=lambda m: m[1])[2]


def _least_s(optimal: TierPlan, n_slots: int, compute_s: Sequence[float]) -> float:
    """Less than the modelled time of any plan that begins as ``optimal`` does: none needs fewer loads up to any access,
    and no more than ``n_slots`` can be under way or waiting to be used."""
    earlier = [-1] * n_slots + [load.position for load in optimal.loads]
    loads = tuple(replace(load, after=after) for load, after in zip(optimal.loads, earlier, strict=False))
    return replace(optimal, loads=loads).modelled_s([1.0] * len(loads), compute_s)


def _plan(
    accesses: tuple[int, ...], following: Sequence[int], n_slots: int, resident: Mapping[int, int], policy: _Policy
) -> TierPlan:
    given_up, unused = _evictions(accesses, following, n_slots, resident, policy)
    slot_of = dict(resident)
    # Slots that may be filled, in the order they became free, with the access that has to be over.
    free = deque((slot, -1) for slot in sorted(set(range(n_slots)) - set(slot_of.values())))
    free.extend((slot_of[granule], -1) for granule in unused)
    doomed = {slot_of[granule]: granule for granule in unused}
    loads: list[Load] = []
    slot_at, load_at, last_use = [], [], set()
    for k, granule in enumerate(accesses):
        slot = slot_of.get(granule)
        if slot is None:
            slot, after = free.popleft()
            if slot in doomed:
                del slot_of[doomed.pop(slot)]
            if after >= 0:
                last_use.add(after)
            slot_of[granule] = slot
            load_at.append(len(loads))
            loads.append(Load(k, granule, slot, after))
        else:
            load_at.append(-1)
            # With idle slots, what was given up may be wanted before its slot is.
            if slot in doomed:
                del doomed[slot]
                free = deque(entry for entry in free if entry[0] != slot)
        slot_at.append(slot)
        if k in given_up:
            free.append((slot, k))
            doomed[slot] = granule
    return TierPlan(tuple(loads), tuple(slot_at), tuple(load_at), frozenset(last_use), slot_of)


def _evictions(
    accesses: Sequence[int], following: Sequence[int], n_slots: int, resident: Mapping[int, int], policy: _Policy
) -> tuple[set[int], list[int]]:
    """The accesses after which a granule is given up, and what is given up without having been used.

    A load gives up the granule used furthest in the future among those released at least ``policy.lead`` accesses ago,
    where there is one, else among all.
    """
    first_use: dict[int, int] = {}
    for k, granule in enumerate(accesses):
        first_use.setdefault(granule, k)
    last_use = dict.fromkeys(resident, -1)
    # To the choice of a victim, what is pinned is always needed next.
    upcoming = {g: -1 if g in policy.pinned else first_use.get(g, _NEVER) for g in resident}
    heap = [(-use, granule) for granule, use in upcoming.items()]
    heapq.heapify(heap)
    n_free = n_slots - len(resident)
    given_up: set[int] = set()
    unused: list[int] = []
    for k, granule in enumerate(accesses):
        if granule not in upcoming:
            if n_free:
                n_free -= 1
            else:
                victim = _furthest(heap, upcoming, last_use, k - 1 - policy.lead)
                del upcoming[victim]
                after = last_use.pop(victim)
                if after >= 0:
                    given_up.add(after)
                else:
                    unused.append(victim)
        last_use[granule] = k
        upcoming[granule] = -1 if granule in policy.pinned else following[k]
        heapq.heappush(heap, (-upcoming[granule], granule))
    return given_up, unused


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
