"""Children that take turns, step by step (A B A B ...), and the tables of what they took."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from workers import ChildFailed, Worker, worker


@dataclass(frozen=True)
class Entrant:
    """A child to be: which side, its options, and its group's caps (None: counted, not capped)."""

    name: str
    side: str
    options: dict[str, Any]
    cap_bytes: int | None = None
    read_bytes_per_s: int | None = None


@dataclass
class Result:
    """What a child took. ``first``: the step that is not counted; ``rows``: the others."""

    entrant: Entrant
    ready: dict[str, Any]
    first: dict[str, Any] = field(default_factory=dict)
    rows: list[dict[str, Any]] = field(default_factory=list)
    group_peak_bytes: int = 0

    def figures(self, key: str) -> list[float]:
        return [row[key] for row in self.rows]

    @property
    def step_s(self) -> float:
        """Median, taken from outside the child."""
        return median(self.figures("outside_s"))

    @property
    def memory_bytes(self) -> int:
        """The larger of what its group was charged and what it had mapped: library pages that another process loaded
        first are charged to that one."""
        return max(self.group_peak_bytes, *(row["rss_peak_bytes"] for row in [self.first, *self.rows]))


def contest(entrants: Sequence[Entrant], rounds: int) -> dict[str, Result]:
    """Start all of them, let each do one step that is not counted, then ``rounds`` rounds. One that fails is named
    and left out of the answer."""
    results: dict[str, Result] = {}
    with ExitStack() as stack:
        running: list[tuple[Worker, Result]] = []
        for entrant in entrants:
            try:
                child = stack.enter_context(
                    worker(entrant.side, entrant.options, entrant.cap_bytes, entrant.read_bytes_per_s)
                )
            except ChildFailed as error:
                print(f"{entrant.name}: {error}", flush=True)
                continue
            running.append((child, Result(entrant, child.ready)))
        started = time.perf_counter()
        for turn in range(rounds + 1):
            for child, result in list(running):
                try:
                    row = child.step()
                except ChildFailed as error:
                    print(f"{result.entrant.name}: {error}", flush=True)
                    running.remove((child, result))
                    continue
                if turn:
                    result.rows.append(row)
                else:
                    result.first = row
            if not turn:
                announce(f"{rounds} rounds of {len(running)}", rounds * (time.perf_counter() - started))
        for child, result in running:
            result.group_peak_bytes = child.group.peak_bytes()
            results[result.entrant.name] = result
    return results


def announce(what: str, seconds: float) -> None:
    """Say how long something will take before it starts."""
    text = f"{seconds / 60:.0f} min" if seconds >= 90 else f"{max(1, seconds):.0f} s"
    print(f"-- {what}: about {text}", flush=True)


def spread(values: Sequence[float], digits: int = 2) -> str:
    """``median (least-most)``."""
    return f"{median(values):.{digits}f} ({min(values):.{digits}f}-{max(values):.{digits}f})"


def verdict(met: bool) -> str:
    return "met" if met else "NOT MET"


def ratios(ours: Result, theirs: Result) -> list[float]:
    """Of each round."""
    return [o / t for o, t in zip(ours.figures("outside_s"), theirs.figures("outside_s"), strict=True)]


def compare(ours: Result, theirs: Result, at_most: float) -> None:
    """The rounds of a lema child beside those of its opponent, and whether the median ratio is what was aimed at."""
    print(f"\n{ours.entrant.name} / {theirs.entrant.name}")
    print(f"{'pair':>4} {'step s':>9} {'other s':>9} {'ratio':>6} {'waited %':>8} {'read GB':>8} {'rss peak MB':>12}")
    each = ratios(ours, theirs)
    for number, (row, other, ratio) in enumerate(zip(ours.rows, theirs.rows, each, strict=True), start=1):
        waited = 100 * row["wait_s"] / row["step_s"]
        print(
            f"{number:>4} {row['outside_s']:>9.3f} {other['outside_s']:>9.3f} {ratio:>6.3f} {waited:>8.2f} "
            f"{row['read_bytes'] / 1e9:>8.3f} {row['rss_peak_bytes'] / 1e6:>12.0f}"
        )
    cap = ours.entrant.cap_bytes
    print(
        f"  ratio {spread(each, 3)}, at most {at_most}: {verdict(median(each) <= at_most)}; steps "
        f"{spread(ours.figures('outside_s'))} s and {spread(theirs.figures('outside_s'))} s"
    )
    print(
        f"  memory: group peak {ours.group_peak_bytes / 1e6:.0f} MB of {cap / 1e6:.0f} MB"
        if cap is not None
        else f"  memory: group peak {ours.group_peak_bytes / 1e6:.0f} MB, not capped",
        f"rss peak {max(ours.figures('rss_peak_bytes')) / 1e6:.0f} MB",
        f"anonymous {max(ours.figures('anonymous_bytes')) / 1e6:.0f} MB",
        f"the other's rss peak {max(theirs.figures('rss_peak_bytes')) / 1e6:.0f} MB",
        sep="; ",
    )
    print(f"  first loss {ours.first['loss']:.6f}, difference {abs(ours.first['loss'] - theirs.first['loss']):.1e}")
    for line in ours.ready["budget"]:
        print(f"  {line}")
    print(flush=True)
