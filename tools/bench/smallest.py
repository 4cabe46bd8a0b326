"""The smallest number for which something works, by halving."""

from __future__ import annotations

from collections.abc import Callable


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
