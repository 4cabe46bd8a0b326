"""Schedules of training steps: what passes a layer together and what is kept, by the memory there is."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from lema_core.device import CpuDevice
from lema_core.errors import BudgetError
from lema_core.runtime.piece_run import Level
from lema_core.runtime.schedule import ENOUGH_TOKENS, MicroBatch, Scheduler, StepCosts, StepSchedule, StepShape
from lema_core.testing.toy import ToyConfig, linear_names, open_toy, toy_updates, write_toy

R, K, G = Level.RECOMPUTE, Level.KEEP, Level.GRAPH
CONFIG = ToyConfig(n_layers=4, hidden_size=32, feed_forward=80, max_positions=400)


@pytest.fixture(scope="module")
def costs(tmp_path_factory: pytest.TempPathFactory) -> StepCosts:
    tensors = write_toy(tmp_path_factory.mktemp("toy"), CONFIG, dtypes=(torch.bfloat16,))
    runner = open_toy(CONFIG, tensors, CpuDevice(), toy_updates(CONFIG, linear_names(CONFIG)))
    runner.store.close()
    return runner.scheduler.costs


def shape(*sizes: tuple[int, int], first_layer: int = 0) -> StepShape:
    return StepShape(tuple(MicroBatch(rows, tokens, rows * (tokens - 1)) for rows, tokens in sizes), first_layer)


def least_of(costs: StepCosts, step: StepShape, scheduler: Scheduler) -> StepSchedule:
    """Of all that it may choose, the one that holds least."""
    return min(scheduler.ways(step), key=lambda way: costs.activation_bytes(step, way))


micro_batches = st.builds(
    lambda rows, tokens, masked: MicroBatch(rows, tokens, rows * (tokens - 1), masked),
    st.integers(1, 3),
    st.integers(2, 200),
    st.booleans(),
)
shapes = st.builds(
    StepShape,
    st.lists(micro_batches, min_size=1, max_size=6).map(tuple),
    st.integers(0, CONFIG.n_layers),
    st.booleans(),
)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(step=shapes, share=st.floats(0.0, 1.2), recompute=st.sampled_from([None, None, True, False]))
def test_the_limit_is_kept_wherever_some_choice_keeps_it(
    costs: StepCosts, step: StepShape, share: float, recompute: bool | None
) -> None:
    for window_holds_layer in (True, False):
        ways = Scheduler(costs, None, recompute, window_holds_layer).ways(step)
        sizes = [costs.activation_bytes(step, way) for way in ways]
        limit = int(min(sizes) + share * (max(sizes) - min(sizes)))
        chosen = Scheduler(costs, limit, recompute, window_holds_layer).choose(step)
        assert costs.activation_bytes(step, chosen) <= limit
        assert chosen.groups in [way.groups for way in ways]
        assert sum(chosen.groups, ()) == tuple(range(len(step.micro_batches))), "in order, each once"
        assert all(level is R for level in chosen.levels[: step.first_layer])
        assert chosen.boundary_bytes is None


@settings(max_examples=30, deadline=None, derandomize=True)
@given(step=shapes)
def test_more_memory_never_gives_smaller_groups_nor_more_recomputation(costs: StepCosts, step: StepShape) -> None:
    sizes = [costs.activation_bytes(step, way) for way in Scheduler(costs).ways(step)]
    limits = [min(sizes) + (max(sizes) - min(sizes)) * i // 30 for i in range(32)]
    chosen = [Scheduler(costs, limit).choose(step) for limit in limits]
    for less, more in pairwise(chosen):
        assert len(more.groups) <= len(less.groups)
        if more.groups == less.groups:
            assert all(a <= b for a, b in zip(less.levels, more.levels, strict=True))
    assert chosen[-1] == Scheduler(costs).choose(step), "as without a limit"
    assert set(chosen[-1].levels[step.first_layer :]) <= {G}


@settings(max_examples=30, deadline=None, derandomize=True)
@given(step=shapes)
def test_each_choice_holds_at_least_what_the_one_before_does(costs: StepCosts, step: StepShape) -> None:
    # Costs are found on more tokens than that, and a few bytes off below.
    assume(min(one.size for one in step.micro_batches) >= 32)
    for groups in (tuple((i,) for i in range(len(step.micro_batches))), (tuple(range(len(step.micro_batches))),)):
        sizes = [costs.activation_bytes(step, choice) for choice in Scheduler(costs).choices(step, groups)]
        assert sizes == sorted(sizes)


def test_products_are_kept_before_graphs_and_from_the_last_layer_on(costs: StepCosts) -> None:
    apart, step = ((0,), (1,)), shape((1, 50), (2, 30))
    levels = [choice.levels for choice in Scheduler(costs).choices(step, apart)]
    assert levels[:3] == [(R, R, R, R), (R, R, R, K), (R, R, K, K)]
    assert levels[4:6] == [(K, K, K, K), (K, K, K, G)] and levels[-1] == (G, G, G, G)
    together = [choice.levels for choice in Scheduler(costs).choices(step, ((0, 1),))]
    assert together[0] == (R, R, R, G), "the last block's gradient comes next"
    trained = shape((1, 50), first_layer=2)
    assert [choice.levels for choice in Scheduler(costs).choices(trained, ((0,),))][-1] == (R, R, G, G)
    assert len(Scheduler(costs).choices(shape((1, 50), first_layer=4), ((0,),))) == 1, "only the head is trained"


@pytest.mark.parametrize("limit", [None, 1 << 40])
def test_recomputation_is_forced_whatever_the_memory(costs: StepCosts, limit: int | None) -> None:
    step = shape((1, 300), (1, 300))
    kept = Scheduler(costs, limit, recompute=False).choose(step)
    assert kept.levels == (G, G, G, G)
    again = Scheduler(costs, limit, recompute=True).choose(step)
    assert again.levels[:-1] == (R, R, R) and K not in again.levels


def test_groups_are_as_large_as_they_need_be(costs: StepCosts) -> None:
    step = shape(*[(1, 200)] * 8)
    assert Scheduler(costs).choose(step).groups == ((0, 1), (2, 3), (4, 5), (6, 7))
    assert all(
        sum(step.micro_batches[i].size for i in g) <= ENOUGH_TOKENS for g in Scheduler(costs).choose(step).groups
    )
    long = shape((1, 300), (2, 300), (1, 100), (1, 100))
    assert Scheduler(costs).choose(long).groups == ((0,), (1,), (2, 3)), "neighbours only"
    assert Scheduler(costs).choose(shape((3, 400))).groups == ((0,),)


def test_where_a_layer_does_not_stay_all_pass_it_together(costs: StepCosts) -> None:
    """Else each group would have it read again."""
    step = shape(*[(1, 200)] * 8)
    scheduler = Scheduler(costs, window_holds_layer=False)
    assert scheduler.choose(step).groups == (tuple(range(8)),)
    least = costs.activation_bytes(step, least_of(costs, step, Scheduler(costs, window_holds_layer=False)))
    together = costs.activation_bytes(step, Scheduler(costs, None, True, False).choose(step))
    assert least < together
    fewer = Scheduler(costs, together - 1, window_holds_layer=False).choose(step)
    assert 1 < len(fewer.groups) < 8, "as few groups as fit"


def test_blocks_inputs_go_down_only_where_nothing_else_fits(costs: StepCosts) -> None:
    step = shape((1, 200), (1, 200), (1, 150))
    here = least_of(costs, step, Scheduler(costs))
    least_here = costs.activation_bytes(step, here)
    assert here.groups == ((0,), (1,), (2,)) and set(here.levels) == {R}, "the one that holds least"
    assert Scheduler(costs, least_here, lower_tier=True).choose(step) == here
    lowest = Scheduler(costs).least(step, here)
    least = costs.activation_bytes(step, lowest)
    boundaries = costs.boundaries(step, here)
    assert boundaries == [4 * CONFIG.hidden_size * one.size for one in step.micro_batches] * CONFIG.n_layers
    assert lowest.boundary_bytes == 2 * max(boundaries)
    for limit in range(least, least_here, max(1, (least_here - least) // 7)):
        chosen = Scheduler(costs, limit, lower_tier=True).choose(step)
        assert costs.activation_bytes(step, chosen) <= limit
        assert lowest.boundary_bytes <= chosen.boundary_bytes < sum(boundaries)
    assert Scheduler(costs, least, lower_tier=True).choose(step) == lowest


@pytest.mark.parametrize("lower_tier", [False, True])
def test_what_fits_in_no_way_is_refused(costs: StepCosts, lower_tier: bool) -> None:
    step = shape((1, 200), (1, 150))
    least = costs.activation_bytes(step, least_of(costs, step, Scheduler(costs, lower_tier=lower_tier)))
    assert costs.activation_bytes(step, Scheduler(costs, least, lower_tier=lower_tier).choose(step)) == least
    with pytest.raises(BudgetError, match=rf"200 tokens needs 7 bytes .* {least - 7:,} that were set aside"):
        Scheduler(costs, least - 7, lower_tier=lower_tier).choose(step)


def test_a_schedule_says_what_it_does(costs: StepCosts) -> None:
    schedule = StepSchedule(((0, 1), (2,)), (R, K, K, G))
    assert schedule.describe() == ("graph kept of 1 layers, products of 2, 1 recomputed; 3 micro-batches in 2 groups")
    lower = StepSchedule(((0,),), (R,) * 4, 3_000_000)
    assert "3.00 MB of their inputs stay" in lower.describe()
