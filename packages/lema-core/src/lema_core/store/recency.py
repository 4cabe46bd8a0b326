"""Plan the fetching of what is known only when it is wanted: the experts that a router picked for one layer.

What lies beyond the layer is not known, so what was used least recently is given up first. A forward pass is followed
by a backward pass in the opposite order, and that by the next forward pass; for such a palindrome the least recently
used is also what is wanted furthest in the future (Mattson et al. 1970, "Evaluation techniques for storage
hierarchies").
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence

from lema_core.store.planner import Load, TierPlan

_NEVER = 1 << 60


def plan_by_recency(
    accesses: Sequence[int], n_slots: int, resident: Mapping[int, int], oldest_first: Sequence[int]
) -> TierPlan:
    """Plan one tier for ``accesses``. ``resident``: granule -> slot, of slots 0, 1 ...; ``oldest_first``: these
    granules, and maybe others, by their last use.

    Gives up what these accesses do not want, the oldest first; then what they want no more; then what they want last.
    Loads come as early as that allows.
    """
    following = [_NEVER] * len(accesses)
    upcoming: dict[int, int] = {}
    for k in range(len(accesses) - 1, -1, -1):
        following[k] = upcoming.get(accesses[k], _NEVER)
        upcoming[accesses[k]] = k
    outsiders = deque(g for g in oldest_first if g in resident and g not in upcoming)
    finished: deque[tuple[int, int]] = deque()
    next_use: dict[int, int] = {g: upcoming[g] for g in resident if g in upcoming}
    slot_of = dict(resident)
    empty = deque(range(len(resident), n_slots))
    latest: dict[int, int] = {}
    slot_at: list[int] = []
    load_at: list[int] = []
    loads: list[Load] = []
    last_use: set[int] = set()
    for k, granule in enumerate(accesses):
        if granule in slot_of:
            load_at.append(-1)
        else:
            after = -1
            if empty:
                slot = empty.popleft()
            else:
                if outsiders:
                    victim = outsiders.popleft()
                elif finished:
                    after, victim = finished.popleft()
                else:
                    victim = max(next_use, key=next_use.__getitem__)
                    after = latest.get(victim, -1)
                next_use.pop(victim, None)
                slot = slot_of.pop(victim)
                if after >= 0:
                    last_use.add(after)
            slot_of[granule] = slot
            load_at.append(len(loads))
            loads.append(Load(k, granule, slot, after))
        slot_at.append(slot_of[granule])
        latest[granule] = k
        if following[k] == _NEVER:
            next_use.pop(granule, None)
            finished.append((k, granule))
        else:
            next_use[granule] = following[k]
    return TierPlan(tuple(loads), tuple(slot_at), tuple(load_at), frozenset(last_use), slot_of)
