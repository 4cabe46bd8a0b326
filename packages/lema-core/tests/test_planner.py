"""The planner against exhaustive search, closed forms and a machine that carries its plans out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lema_core.store.planner import TierPlan, next_uses, plan_tier


def fewest_loads(accesses: Sequence[int], n_slots: int, resident: frozenset[int]) -> int:
    """Exhaustive search over every eviction there could be: how many loads cannot be avoided."""

    @cache
    def from_here(k: int, held: frozenset[int]) -> int:
        if k == len(accesses):
            return 0
        granule = accesses[k]
        if granule in held:
            return from_here(k + 1, held)
        if len(held) < n_slots:
            return 1 + from_here(k + 1, held | {granule})
        return 1 + min(from_here(k + 1, (held - {victim}) | {granule}) for victim in held)

    return from_here(0, resident)


def carry_out(accesses: Sequence[int], n_slots: int, before: Mapping[int, int], plan: TierPlan) -> None:
    """Execute a plan one access after the other; asserts that it never touches what it must not."""
    slots: dict[int, int] = {slot: granule for granule, slot in before.items()}
    last_read: dict[int, int] = {}
    loads = list(plan.loads)
    done = 0
    for k, granule in enumerate(accesses):
        index = plan.load_at[k]
        if index >= 0:
            assert index == done, "loads come in the order they are needed"
            load = loads[index]
            assert (load.position, load.granule, load.slot) == (k, granule, plan.slot_at[k])
            assert 0 <= load.slot < n_slots
            assert granule not in slots.values(), "a granule is never in two slots"
            assert load.after == last_read.get(load.slot, -1), "after is the last access of what was in the slot"
            if load.after >= 0:
                assert load.after in plan.last_use
            slots[load.slot] = granule
            done += 1
        assert slots[plan.slot_at[k]] == granule, "an access finds its granule"
        last_read[plan.slot_at[k]] = k
    assert done == len(loads)
    assert {granule: slot for slot, granule in slots.items()} == dict(plan.resident)
    assert plan.last_use == {load.after for load in loads if load.after >= 0}
    filled = set(before.values()) | {load.slot for load in loads}
    assert plan.peak_slots(before) == len(filled) <= n_slots


small = st.tuples(st.lists(st.integers(0, 4), min_size=1, max_size=9), st.integers(1, 4), st.integers(0, 2**16))


@settings(max_examples=150, deadline=None)
@given(small)
def test_loads_are_the_fewest_possible_from_any_start_and_over_repeated_steps(case: tuple[list[int], int, int]) -> None:
    accesses, n_slots, seed = case
    held = [granule for granule in range(6) if seed >> granule & 1][:n_slots]
    resident = {granule: (slot + seed) % n_slots for slot, granule in enumerate(held)}
    start, total = frozenset(resident), 0
    for steps in range(1, 4):
        plan = plan_tier(accesses, n_slots, resident, 0)
        carry_out(accesses, n_slots, resident, plan)
        total += len(plan.loads)
        assert total == fewest_loads(tuple(accesses) * steps, n_slots, start)
        resident = plan.resident


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(0, 11), min_size=1, max_size=60), st.integers(1, 12), st.integers(0, 8))
def test_every_plan_can_be_carried_out_and_respects_the_prefetch_distance(
    accesses: list[int], n_slots: int, distance: int
) -> None:
    resident: Mapping[int, int] = {}
    for _ in range(3):
        plan = plan_tier(accesses, n_slots, resident, distance)
        carry_out(accesses, n_slots, resident, plan)
        for load in plan.loads:
            # Of the other slots, none had been idle for so long: a load was hurried only where it had to be.
            if load.after >= 0 and load.position - load.after <= distance:
                last = dict.fromkeys(range(n_slots), -1)
                for k in range(load.position):
                    last[plan.slot_at[k]] = k
                assert all(load.position - k <= distance for k in last.values())
        resident = plan.resident


@pytest.mark.parametrize(("n", "c"), [(2, 1), (5, 1), (5, 2), (8, 3), (8, 7), (40, 11)])
def test_a_palindrome_loads_what_does_not_stay_twice(n: int, c: int) -> None:
    accesses = [*range(n), *reversed(range(n))]
    resident: Mapping[int, int] = {}
    plan = plan_tier(accesses, c, resident, 0)
    assert len(plan.loads) == n + (n - c), "the end of the forward pass serves the start of the backward pass"
    for _ in range(3):
        plan = plan_tier(accesses, c, plan.resident, 0)
        assert len(plan.loads) == 2 * (n - c)


@pytest.mark.parametrize("distance", [1, 2, 4])
def test_a_prefetch_distance_costs_a_palindrome_at_most_that_many_slots(distance: int) -> None:
    n, c = 40, 16
    accesses = [*range(n), *reversed(range(n))]
    plan = plan_tier(accesses, c, {}, distance)
    for _ in range(4):
        plan = plan_tier(accesses, c, plan.resident, distance)
        assert len(plan.loads) <= 2 * (n - c + distance)


@pytest.mark.parametrize("distance", [0, 3, 8])
def test_nothing_is_loaded_once_everything_fits(distance: int) -> None:
    accesses = [*range(7), *reversed(range(7)), 3, 3]
    first = plan_tier(accesses, 7, {}, distance)
    assert len(first.loads) == 7 and not first.last_use
    again = plan_tier(accesses, 7, first.resident, distance)
    assert not again.loads and again.load_at == (-1,) * len(accesses) and again.resident == first.resident


@pytest.mark.parametrize(("n", "c", "distance"), [(10, 4, 0), (10, 4, 2), (30, 20, 8), (3, 1, 0)])
def test_a_repeated_forward_pass_pins_what_fits(n: int, c: int, distance: int) -> None:
    plan = plan_tier(range(n), c, {}, distance)
    for _ in range(12):
        plan = plan_tier(range(n), c, plan.resident, distance)
    # One slot, and those that wait out the distance, are what the rest passes through.
    for _ in range(3):
        plan = plan_tier(range(n), c, plan.resident, distance)
        assert len(plan.loads) <= n - (c - 1 - distance)


def test_what_a_step_does_not_touch_goes_first() -> None:
    plan = plan_tier([0, 1, 0, 1], 2, {8: 0, 9: 1}, 0)
    assert [(load.granule, load.after) for load in plan.loads] == [(0, -1), (1, -1)]
    plan = plan_tier([0, 1, 0, 1], 3, {8: 0, 0: 1, 1: 2}, 0)
    assert not plan.loads and plan.resident == {8: 0, 0: 1, 1: 2}


@given(st.lists(st.integers(0, 5), min_size=1, max_size=20))
def test_next_uses_count_on_into_the_next_step(accesses: list[int]) -> None:
    twice = accesses * 2
    expected = [twice.index(granule, k + 1) for k, granule in enumerate(accesses)]
    assert next_uses(accesses) == expected
