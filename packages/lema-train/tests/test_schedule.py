"""Learning rates against transformers' schedules."""

from __future__ import annotations

import pytest
import torch
from transformers import (
    get_constant_schedule_with_warmup,
    get_cosine_schedule_with_warmup,
    get_linear_schedule_with_warmup,
)

from lema_core.errors import ConfigError
from lema_train.schedule import check_schedule, learning_rate_at


def oracle(schedule: str, total: int, warmup: int) -> list[float]:
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=3e-4)
    if schedule == "constant":
        scheduler = get_constant_schedule_with_warmup(optimizer, warmup)
    else:
        make = {"linear": get_linear_schedule_with_warmup, "cosine": get_cosine_schedule_with_warmup}[schedule]
        scheduler = make(optimizer, warmup, total)
    rates = []
    for _ in range(total + 1):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return rates


@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine"])
@pytest.mark.parametrize(("total", "warmup"), [(5, 2), (10, 3), (7, 0), (1, 0), (4, 4), (1, 1), (100, 10)])
def test_rates_equal_transformers(schedule: str, total: int, warmup: int) -> None:
    rates = [learning_rate_at(step, total, 3e-4, schedule, warmup) for step in range(total + 1)]
    assert rates == oracle(schedule, total, warmup)


def test_twenty_micro_batches_of_four_are_five_rates() -> None:
    optimizer_steps = [micro // 4 for micro in range(20) if micro % 4 == 3]
    rates = [learning_rate_at(step, 5, 1.0, "cosine", 2) for step in optimizer_steps]
    assert rates == pytest.approx([0.0, 0.5, 1.0, 0.75, 0.25])


def test_beyond_the_end_the_rate_stays_at_zero() -> None:
    for schedule in ("linear", "cosine"):
        assert learning_rate_at(12, 8, 1e-3, schedule, 2) == 0.0
    assert learning_rate_at(12, 8, 1e-3, "constant", 2) == 1e-3


@pytest.mark.parametrize("warmup", [11, -1])
def test_a_warmup_that_does_not_fit_is_refused(warmup: int) -> None:
    with pytest.raises(ConfigError, match=f"10 optimizer steps expected, {warmup} found"):
        check_schedule("cosine", 10, warmup)


def test_an_unknown_schedule_is_refused_with_a_near_match() -> None:
    for call in (lambda: check_schedule("cosin", 10, 0), lambda: learning_rate_at(0, 10, 1.0, "cosin", 0)):
        with pytest.raises(ConfigError, match="did you mean 'cosine'"):
            call()
    check_schedule("cosine", 10, 10)
