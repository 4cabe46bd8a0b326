"""Learning-rate schedules: the rate is a pure function of the optimizer step's number.

Formulas are those of transformers' ``get_{constant,linear,cosine}_schedule_with_warmup``. Steps count from 0: with
a warm-up of w steps, step s < w runs at base * s / w, so the first step of a warm-up has rate 0. Being pure, a
resumed run continues exactly, and gradient accumulation cannot advance it: micro-batches have no step number of
their own.
"""

from __future__ import annotations

import math

from lema_core.errors import ConfigError
from lema_core.suggest import unknown_name

SCHEDULES = ("constant", "linear", "cosine")


def check_schedule(schedule: str, total_steps: int, warmup_steps: int) -> None:
    """Raises ConfigError for an unknown ``schedule`` or a warm-up that is negative or longer than the run."""
    if schedule not in SCHEDULES:
        raise ConfigError(f"lr_schedule: {unknown_name('schedule', schedule, SCHEDULES)}")
    if not 0 <= warmup_steps <= total_steps:
        raise ConfigError(
            f"warmup_steps: 0 to the run's {total_steps} optimizer steps expected, {warmup_steps} found: "
            "the rate would never reach learning_rate"
        )


def learning_rate_at(step: int, total_steps: int, base_lr: float, schedule: str, warmup_steps: int) -> float:
    """The rate of optimizer step ``step`` (from 0) of ``total_steps``; beyond the end, decaying schedules stay at 0.

    Options are checked by :func:`check_schedule` once, at the start of a run; an unknown ``schedule`` raises
    ConfigError here too.
    """
    if schedule not in SCHEDULES:
        raise ConfigError(f"lr_schedule: {unknown_name('schedule', schedule, SCHEDULES)}")
    if step < warmup_steps:
        return base_lr * (step / max(1, warmup_steps))
    if schedule == "constant":
        return base_lr
    decay_steps = max(1, total_steps - warmup_steps)
    if schedule == "linear":
        return base_lr * max(0.0, (total_steps - step) / decay_steps)
    # transformers' cosine rises again beyond the end of the run; the rate stays at 0 here
    progress = min(1.0, (step - warmup_steps) / decay_steps)
    return base_lr * max(0.0, 0.5 * (1.0 + math.cos(math.pi * progress)))
