"""The planner against exhaustive search, closed forms and a machine that carries its plans out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lema_core.store.planner import TierPlan, _least_s, next_uses, plan_tier


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


def steady(
    accesses: Sequence[int], n_slots: int, distance: int, work: Sequence[float] = (), steps: int = 4
) -> TierPlan:
    """The last of some steps like this, each carried out."""
    resident: Mapping[int, int] = {}
    for _ in range(steps):
        plan = plan_tier(accesses, n_slots, resident, distance, work)
        carry_out(accesses, n_slots, resident, plan)
        resident = plan.resident
    return plan


def share_computing(plan: TierPlan, accesses: Sequence[int], n_loads: int) -> float:
    """How much of the step is not waited, where ``n_loads`` loads take 1 / 1.2 of what all accesses compute."""
    compute_s = 1.2 * n_loads
    return compute_s / plan.modelled_s([1.0] * len(plan.loads), [compute_s / len(accesses)] * len(accesses))


def training_step(
    layers: int, per_layer: int, groups: int = 1, recomputed: bool = False, head: int = 1
) -> tuple[list[int], int]:
    """The accesses of a layer-major step, and how many granules there are. A block's last product is not recomputed."""
    blocks = [list(range(layer * per_layer, (layer + 1) * per_layer)) for layer in range(layers)]
    last = list(range(layers * per_layer, layers * per_layer + head))
    accesses = [granule for block in blocks for _ in range(groups) for granule in block] + last + last[::-1]
    for block in reversed(blocks):
        accesses += ((block[:-1] if recomputed else []) + block[::-1]) * groups
    return accesses, layers * per_layer + head


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.integers(0, 11), min_size=1, max_size=60),
    st.integers(1, 12),
    st.integers(0, 8),
    st.lists(st.sampled_from([0.0, 0.1, 1.0, 7.0]), min_size=60, max_size=60),
    st.booleans(),
)
def test_a_plan_costs_loads_only_where_it_is_modelled_to_save_time(
    accesses: list[int], n_slots: int, distance: int, work: list[float], weighted: bool
) -> None:
    work = work[: len(accesses)] if weighted and any(work[: len(accesses)]) else [1.0] * len(accesses)
    optimal, plan = steady(accesses, n_slots, 0, work), steady(accesses, n_slots, distance, work)
    compute_s = [1.2 * len(optimal.loads) * share / sum(work) for share in work]
    seconds, best = (p.modelled_s([1.0] * len(p.loads), compute_s) for p in (plan, optimal))
    assert seconds <= best
    assert len(plan.loads) <= len(optimal.loads) or seconds < best


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(0, 11), min_size=1, max_size=40), st.integers(1, 12), st.integers(0, 8))
def test_no_plan_is_modelled_to_be_shorter_than_the_bound_it_is_held_against(
    accesses: list[int], n_slots: int, distance: int
) -> None:
    before = steady(accesses, n_slots, 0).resident
    optimal, plan = (plan_tier(accesses, n_slots, before, d) for d in (0, distance))
    compute_s = [1.2 * len(optimal.loads) / len(accesses)] * len(accesses)
    seconds = [p.modelled_s([1.0] * len(p.loads), compute_s) for p in (optimal, plan)]
    assert sum(compute_s) <= _least_s(optimal, n_slots, compute_s) <= min(seconds) + 1e-9


def test_the_model_of_a_step_waits_for_slots_and_for_loads() -> None:
    plan = plan_tier([0, 1, 2, 0], 2, {}, 0)
    assert [(load.granule, load.slot, load.after) for load in plan.loads] == [(0, 0, -1), (1, 1, -1), (2, 1, 1)]
    # 0 arrives at 2, 1 at 5 (computed until 6), and 2, which needs the slot of 1, from 6 to 10.
    assert plan.modelled_s([2, 3, 4], [1, 1, 1, 1]) == 12


@pytest.mark.parametrize("n", [2, 3, 5, 9, 14])
@pytest.mark.parametrize("distance", [0, 1, 2, 8, 30])
def test_a_palindrome_loads_what_does_not_stay_twice_and_in_good_time(n: int, distance: int) -> None:
    accesses = [*range(n), *reversed(range(n))]
    for n_slots in range(1, n + 1):
        plan, resident = plan_tier(accesses, n_slots, {}, distance), {}
        assert len(plan.loads) == n + (n - n_slots), "the end of the forward pass serves the start of the backward pass"
        for _ in range(4):
            resident = plan.resident
            plan = plan_tier(accesses, n_slots, resident, distance)
            carry_out(accesses, n_slots, resident, plan)
            assert len(plan.loads) == 2 * (n - n_slots)
        # Only what is read at the turn is in the way of a load.
        assert all(load.after < 0 or load.position - load.after >= n_slots for load in plan.loads)
        assert n < 14 or not 1 < n_slots < 12 or share_computing(plan, accesses, len(plan.loads)) > 0.95


@pytest.mark.parametrize("recomputed", [False, True])
@pytest.mark.parametrize(("layers", "per_layer", "groups"), [(2, 2, 1), (3, 2, 1), (2, 3, 1), (2, 2, 2), (2, 3, 2)])
def test_training_steps_against_exhaustive_search(layers: int, per_layer: int, groups: int, recomputed: bool) -> None:
    accesses, n = training_step(layers, per_layer, groups, recomputed)
    for n_slots in range(1, n + 1):
        for distance in (0, 2, 8):
            resident = steady(accesses, n_slots, distance).resident
            fewest = fewest_loads(tuple(accesses), n_slots, frozenset(resident))
            plan = plan_tier(accesses, n_slots, resident, distance)
            if distance == 0 or groups == 1 or n_slots > per_layer:
                assert len(plan.loads) <= fewest + (distance > 0)
            if n_slots >= per_layer:
                assert len(plan.loads) <= 2 * (n - n_slots) + 1, "whatever the number of groups"


@pytest.mark.parametrize("distance", [1, 4, 8])
@pytest.mark.parametrize("recomputed", [False, True])
def test_training_steps_hide_their_loads_behind_compute(distance: int, recomputed: bool) -> None:
    accesses, n = training_step(8, 7, recomputed=recomputed, head=2)
    for n_slots in range(2, n):
        plan = steady(accesses, n_slots, distance)
        forward = sum(load.position < n for load in plan.loads)
        # A recomputed step computes a third of it forward, and loads half there: that much is waited for.
        n_loads = len(plan.loads) if not recomputed else max(len(plan.loads), 2.5 * forward)
        assert share_computing(plan, accesses, n_loads) >= 0.95
        assert n_slots < 7 or len(plan.loads) <= 2 * (n - n_slots) + 1


@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize("n_slots", [2, 3, 4])
def test_with_few_slots_something_is_loaded_while_something_is_computed(n_slots: int, groups: int) -> None:
    accesses, _ = training_step(6, 7, groups)
    plan = steady(accesses, n_slots, 8)
    hurried = [load for load in plan.loads if load.after == load.position - 1]
    assert len(hurried) <= len(plan.loads) // 20
    assert share_computing(plan, accesses, len(plan.loads)) >= 0.95


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


@pytest.mark.parametrize("n_slots", [2, 3, 8, 15, 30])
def test_a_repeated_forward_pass_spreads_its_loads(n_slots: int) -> None:
    n = 40
    plan = steady(range(n), n_slots, 4)
    assert len(plan.loads) <= n - n_slots + 5
    assert share_computing(plan, range(n), len(plan.loads)) > 0.9


@pytest.mark.parametrize("n_slots", [3, 6, 10])
def test_a_load_is_hidden_behind_what_computes_not_behind_any_access(n_slots: int) -> None:
    """Every other granule, say of norms, is borrowed and computes nothing."""
    n, work = 60, [0.0, 1.0] * 30
    informed, blind = (steady(range(n), n_slots, 8, known) for known in (work, ()))
    compute_s = [1.2 * n * share / sum(work) for share in work]
    seconds = [plan.modelled_s([1.0] * len(plan.loads), compute_s) for plan in (informed, blind)]
    assert seconds[0] <= 1.05 * sum(compute_s) < 1.2 * sum(compute_s) < seconds[1]


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
