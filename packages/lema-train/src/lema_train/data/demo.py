"""A task to try training on without a data set at hand: dates, written in many ways, to ISO 8601.

The rows are generated from a seed. Every form names the month or puts the year first, so each has one right answer, and
a small chat model that gets none right before gets nearly all right after some tens of steps.
"""

from __future__ import annotations

import json
import random
from datetime import date
from pathlib import Path
from typing import Any

from lema_core.errors import DataError

# English whatever the locale, which strftime would follow.
_MONTHS = (
    "January", "February", "March", "April", "May", "June",
    "July", "August", "September", "October", "November", "December",
)  # fmt: skip
_WEEKDAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
_FORMS = (
    "{month} {day}, {year}",
    "{day} {month} {year}",
    "{nth} of {month}, {year}",
    "the {nth} day of {month} {year}",
    "{mon} {nth}, {year}",
    "{dd}-{mon}-{year}",
    "{weekday}, {day} {month} {year}",
    "{year}/{mm}/{dd}",
)
_FIRST_DAY, _LAST_DAY = date(1900, 1, 1).toordinal(), date(2099, 12, 31).toordinal()
# One day in so many is never in training rows, whatever their number and seed.
_HELD_OUT_EVERY = 10


def demo_rows(n: int, seed: int = 0, held_out: bool = False) -> list[dict[str, Any]]:
    """``n`` chat rows (``{"messages": [...]}``), each about another date, with the forms in turn.

    Args:
        n: how many.
        seed: which dates; the same seed always gives the same rows.
        held_out: take the dates that no row without it ever has.

    Raises:
        DataError: there are not as many dates.
    """
    days = [day for day in range(_FIRST_DAY, _LAST_DAY + 1) if (day % _HELD_OUT_EVERY == 0) == held_out]
    if not 0 <= n <= len(days):
        raise DataError(f"the demo set has {len(days)} {'held-out' if held_out else 'training'} dates, asked for {n}")
    rng = random.Random(f"demo/{seed}/{held_out}")
    keys = [rng.random() for _ in days]
    chosen = sorted(range(len(days)), key=keys.__getitem__)[:n]
    return [_row(date.fromordinal(days[i]), _FORMS[k % len(_FORMS)]) for k, i in enumerate(chosen)]


def write_demo(folder: Path, train_rows: int = 512, eval_rows: int = 48, seed: int = 0) -> tuple[Path, Path]:
    """Write ``train.jsonl`` and ``eval.jsonl``, which share no date, into a folder (made if need be); their paths."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    paths = folder / "train.jsonl", folder / "eval.jsonl"
    for path, rows in zip(paths, (demo_rows(train_rows, seed), demo_rows(eval_rows, seed, held_out=True)), strict=True):
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return paths


def _row(day: date, form: str) -> dict[str, Any]:
    month = _MONTHS[day.month - 1]
    written = form.format(
        year=day.year,
        month=month,
        mon=month[:3],
        mm=f"{day.month:02}",
        day=day.day,
        dd=f"{day.day:02}",
        nth=f"{day.day}{_ordinal_suffix(day.day)}",
        weekday=_WEEKDAYS[day.weekday()],
    )
    return {
        "messages": [
            {"role": "user", "content": f"Write this date in ISO 8601: {written}"},
            {"role": "assistant", "content": day.isoformat()},
        ]
    }


def _ordinal_suffix(day: int) -> str:
    if 11 <= day <= 13:
        return "th"
    return {1: "st", 2: "nd", 3: "rd"}.get(day % 10, "th")
