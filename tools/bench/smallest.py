"""The smallest number for which something works, by halving; the smallest group that lema runs in."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from workers import ChildFailed, worker


def smallest(works: Callable[[int], bool], low: int, high: int, resolution: int) -> int:
    """The smallest value that works, to ``resolution``: what works at a value works above it.

    ``low`` is taken not to work, ``high`` to work: neither is tried. Returns a value that was tried, or ``high``.
    """
    while high - low > resolution:
        middle = (low + high) // 2
        if works(middle):
            high = middle
        else:
            low = middle
    return high


def smallest_group(
    options: dict[str, Any], name: str, low_mb: int, high_mb: int, resolution_mb: int, likely_mb: int | None = None
) -> int:
    """MB of the smallest group in which lema runs a whole step. Prints the step.

    First the smallest whose plan it accepts, by opening the model only; then a step in it, and in larger ones while
    that fails. It is more than ``low_mb``; ``likely_mb``, if the guess is good, is enough and little more. Ends the
    program when the model does not run at all.
    """

    def opens(mb: int) -> bool:
        try:
            with worker("lema", options, mb * 1_000_000):
                return True
        except ChildFailed as error:
            if "BudgetError" not in str(error) and not error.killed:
                raise SystemExit(f"{name} in {mb} MB: {error}") from error
            return False

    top_mb = high_mb
    if likely_mb is not None and opens(likely_mb):
        high_mb = likely_mb
    elif likely_mb is not None:
        low_mb = likely_mb
    mb = smallest(opens, low_mb, high_mb, resolution_mb)
    while True:
        try:
            with worker("lema", options, mb * 1_000_000) as child:
                row = child.step()
                peak = child.group.peak_bytes()
            break
        except ChildFailed as error:
            print(f"  {name} in {mb} MB: {error}", flush=True)
            mb += resolution_mb
            if mb > 4 * top_mb:
                raise SystemExit(f"{name}: not even {mb} MB are enough") from error
    print(
        f"{name}: smallest group {mb} MB; step {row['outside_s']:.2f} s, waited "
        f"{100 * row['wait_s'] / row['step_s']:.2f} %, group peak {peak / 1e6:.0f} MB, "
        f"rss peak {row['rss_peak_bytes'] / 1e6:.0f} MB",
        flush=True,
    )
    return mb
