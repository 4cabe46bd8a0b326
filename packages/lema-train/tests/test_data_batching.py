"""Padding, order of rows, splits and the demo set (cases B23, B24, B44, B48)."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from datetime import date, datetime
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lema_core.errors import ConfigError, DataError
from lema_train.data import (
    IGNORED,
    BatchLoader,
    BatchPlan,
    Dataset,
    Report,
    Sample,
    Tokenizer,
    demo_rows,
    load_samples,
    make_batch,
    split_dataset,
    total_supervised_tokens,
    typical_micro_batch,
    write_demo,
)


def dataset(lengths: list[int]) -> Dataset:
    """Row i holds the id i, ``lengths[i]`` times."""
    return Dataset([Sample([i] * n, [i] * n, i + 1) for i, n in enumerate(lengths)], Report(Path("rows.jsonl")))


def test_b48_a_rows_own_eos_is_trained_though_padding_has_its_id() -> None:
    eos = 1
    rows = [Sample(ids, list(ids), i) for i, ids in enumerate(([2, 3, 4, 5, eos], [2, 3, 4, 5, 6, 7, 8, 9, eos]))]
    batch = make_batch(rows, fill_id=eos)
    assert batch.input_ids.shape == (2, 9) and batch.input_ids.dtype == batch.labels.dtype == torch.int64
    assert batch.attention_mask.sum(1).tolist() == [5, 9] and batch.attention_mask.dtype == torch.bool
    assert (batch.labels == eos).sum(1).tolist() == [1, 1]
    assert (batch.labels[~batch.attention_mask] == IGNORED).all()
    assert (batch.input_ids[~batch.attention_mask] == eos).all()

    # The loss equals that of the rows without padding.
    table = torch.randn(10, 10, generator=torch.Generator().manual_seed(0))
    loss = torch.nn.functional.cross_entropy
    alone = sum(loss(table[torch.tensor(r.ids[:-1])], torch.tensor(r.labels[1:]), reduction="sum") for r in rows)
    padded = loss(table[batch.input_ids[:, :-1]].flatten(0, 1), batch.labels[:, 1:].flatten(), reduction="sum")
    torch.testing.assert_close(padded, alone)
    assert batch.supervised_tokens == 4 + 8


def test_b24_position_0_does_not_count() -> None:
    first_only = make_batch([Sample([3, 4, 5], [3, IGNORED, IGNORED], 1)], 0)
    one = make_batch([Sample([3, 4, 5], [3, 4, IGNORED], 1)], 0)
    assert first_only.supervised_tokens == 0
    assert total_supervised_tokens([first_only, one, one]) == 2


def test_b23_five_micro_batches_make_three_steps() -> None:
    plan = BatchPlan([4] * 10, batch_size=2, gradient_accumulation_steps=2)
    assert plan.steps_per_epoch == 3
    assert [len(plan.micro_batches(step)) for step in range(6)] == [2, 2, 1, 2, 2, 1]


@pytest.mark.parametrize(("rows", "batch_size"), [(3, 4), (1, 8)])
def test_b62_fewer_rows_than_a_batch_are_one_step(rows: int, batch_size: int) -> None:
    loader = BatchLoader(dataset([2] * rows), BatchPlan([2] * rows, batch_size), 0)
    assert loader.plan.steps_per_epoch == 1
    (batch,) = next(loader)
    assert sorted(batch.sample_indices) == list(range(rows))
    assert batch.input_ids[:, 0].tolist() == batch.sample_indices


@settings(max_examples=80, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 50), min_size=1, max_size=40),
    batch_size=st.integers(1, 6),
    accumulate=st.integers(1, 4),
    pool=st.integers(1, 5),
    shuffle=st.booleans(),
    epoch=st.integers(0, 3),
)
def test_every_epoch_has_every_row_once(
    lengths: list[int], batch_size: int, accumulate: int, pool: int, shuffle: bool, epoch: int
) -> None:
    plan = BatchPlan(lengths, batch_size, accumulate, seed=1, shuffle=shuffle, pool_batches=pool)
    first = epoch * plan.steps_per_epoch
    steps = [plan.micro_batches(step) for step in range(first, first + plan.steps_per_epoch)]
    assert sorted(i for step in steps for batch in step for i in batch) == list(range(len(lengths)))
    assert all(1 <= len(batch) <= batch_size for step in steps for batch in step)
    assert all(len(step) == accumulate for step in steps[:-1]) and 1 <= len(steps[-1]) <= accumulate
    assert sum(len(batch) < batch_size for step in steps for batch in step) <= 1


def test_order_is_of_seed_and_epoch_alone() -> None:
    plan = BatchPlan([3] * 10, 2, seed=5)
    order = [plan.micro_batches(step) for step in range(10)]
    torch.manual_seed(1)
    assert [BatchPlan([3] * 10, 2, seed=5).micro_batches(step) for step in reversed(range(10))] == order[::-1]
    assert order[:5] != order[5:]
    assert [BatchPlan([3] * 10, 2, seed=6).micro_batches(step) for step in range(5)] != order[:5]
    # A changed order would break resuming runs of an earlier version.
    assert [batch for (batch,) in order[:5]] == [[2, 3], [7, 1], [4, 8], [9, 6], [0, 5]]


def test_without_shuffling_rows_keep_their_order() -> None:
    plan = BatchPlan([9, 1, 5, 2, 3], 2, shuffle=False)
    assert [plan.micro_batches(step) for step in range(3)] == [[[0, 1]], [[2, 3]], [[4]]]


def test_similar_lengths_share_a_batch() -> None:
    lengths = [(i * 37) % 100 + 1 for i in range(100)]

    def computed(pool: int) -> int:
        plan = BatchPlan(lengths, 4, pool_batches=pool)
        batches = [batch for step in range(plan.steps_per_epoch) for batch in plan.micro_batches(step)]
        return sum(len(batch) * max(lengths[i] for i in batch) for batch in batches)

    assert computed(25) < 1.1 * sum(lengths) < 1.3 * sum(lengths) < computed(1)


@pytest.mark.parametrize("stop", [1, 4, 5, 6, 8])
def test_b44_a_resumed_run_sees_the_rows_of_the_uninterrupted_one(stop: int) -> None:
    rows = dataset([3, 1, 4, 1, 5, 9, 2, 6, 5, 3])

    def loader() -> BatchLoader:
        return BatchLoader(rows, BatchPlan(rows.lengths, 2, 2, seed=3), 0)

    def take(source: BatchLoader, steps: int) -> list[list[list[int]]]:
        return [[batch.sample_indices for batch in next(source)] for _ in range(steps)]

    whole = take(loader(), 9)
    before = loader()
    assert take(before, stop) == whole[:stop]
    state = json.loads(json.dumps(before.state_dict()))
    assert state == {"epoch": stop // 3, "step_in_epoch": stop % 3}
    after = loader()
    after.load_state_dict(state)
    assert after.step == stop
    assert take(after, 9 - stop) == whole[stop:]


def test_b44_the_end_of_an_epoch_is_the_next_ones_beginning() -> None:
    plan = BatchPlan([1] * 10, 2, 2)
    assert plan.step_of({"epoch": 1, "step_in_epoch": 3}) == plan.step_of({"epoch": 2, "step_in_epoch": 0}) == 6
    with pytest.raises(DataError, match="step 4 of epoch 1, but an epoch now has 3 steps"):
        plan.step_of({"epoch": 1, "step_in_epoch": 4})


def test_bad_numbers_are_refused() -> None:
    with pytest.raises(ConfigError, match="batch_size=0: must be 1 or more"):
        BatchPlan([1], 0)
    with pytest.raises(DataError, match="no rows"):
        BatchPlan([], 1)


@pytest.mark.parametrize(("rows", "fraction", "held_out"), [(10, 0.2, 2), (2, 0.01, 1), (3, 0.99, 2)])
def test_split_shares_no_row_and_is_seeded(rows: int, fraction: float, held_out: int) -> None:
    whole = dataset([2] * rows)
    train, evaluation = split_dataset(whole, fraction, seed=4)
    lines = [[s.line for s in part] for part in (train, evaluation)]
    assert len(evaluation) == held_out
    assert sorted(lines[0] + lines[1]) == list(range(1, rows + 1))
    assert lines == [[s.line for s in part] for part in split_dataset(whole, fraction, seed=4)]


def test_split_needs_two_rows_and_a_fraction() -> None:
    with pytest.raises(DataError, match="1 usable rows cannot be split"):
        split_dataset(dataset([1]), 0.5)
    with pytest.raises(ConfigError, match="must be between 0 and 1"):
        split_dataset(dataset([1, 1]), 1.0)


def read_date(question: str) -> date:
    """Read a date back with strptime, an implementation that the demo set does not use."""
    text = re.sub(r"(\d)(st|nd|rd|th)\b", r"\1", question.split(": ", 1)[1])
    forms = ("%B %d, %Y", "%d %B %Y", "%d of %B, %Y", "the %d day of %B %Y", "%b %d, %Y", "%d-%b-%Y", "%A, %d %B %Y")
    for form in (*forms, "%Y/%m/%d"):
        try:
            return datetime.strptime(text, form).date()
        except ValueError:
            continue
    raise AssertionError(text)


def test_demo_rows_are_right_seeded_and_held_out_dates_are_apart(
    tmp_path: Path, make_tokenizer: Callable[..., Tokenizer]
) -> None:
    rows = demo_rows(300, seed=1)
    for row in rows:
        user, assistant = row["messages"]
        assert read_date(user["content"]).isoformat() == assistant["content"]
        if "day," in user["content"]:
            assert date.fromisoformat(assistant["content"]).strftime("%A") in user["content"]
    assert rows == demo_rows(300, seed=1) != demo_rows(300, seed=2)

    def answers(some: list[dict[str, Any]]) -> set[str]:
        return {row["messages"][-1]["content"] for row in some}

    assert len(answers(rows)) == 300
    every_training_date = answers(demo_rows(65_000))
    assert not answers(demo_rows(500, seed=9, held_out=True)) & every_training_date
    with pytest.raises(DataError, match="training dates, asked for 1000000"):
        demo_rows(1_000_000)

    paths = write_demo(tmp_path / "demo", train_rows=20, eval_rows=5)
    loaded = [load_samples(path, make_tokenizer(), 200, 128) for path in paths]
    assert [len(part) for part in loaded] == [20, 5]
    assert loaded[1][0].answer_text in answers(demo_rows(5, held_out=True))


def test_a_typical_micro_batch_is_the_mean_of_an_epoch() -> None:
    """Rows as they are padded, targets as they are trained."""
    rows = dataset([4, 4, 10, 10, 6, 6])
    plan = BatchPlan(rows.lengths, batch_size=2, seed=3)
    padded = [max(rows.lengths[i] for i in one) for step in range(3) for one in plan.micro_batches(step)]
    # A row of n tokens has n - 1 targets: 3 + 3 + 9 + 9 + 5 + 5 in 3 micro-batches.
    assert typical_micro_batch(rows, plan) == (round(sum(padded) / 3), round(34 / 3))


def test_a_typical_micro_batch_of_rows_without_targets_has_one() -> None:
    rows = Dataset([Sample([1, 2, 3], [IGNORED] * 3, 1)], Report(Path("rows.jsonl")))
    assert typical_micro_batch(rows, BatchPlan(rows.lengths, batch_size=4)) == (3, 1)
