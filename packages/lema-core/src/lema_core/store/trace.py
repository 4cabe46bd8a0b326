"""The order in which a step touches granules, known before the step runs."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass


@dataclass(frozen=True)
class Work:
    """What is computed from one borrow to the next: ``flops`` of products with ``tokens`` columns, the bytes that other
    operations read and write, and how many ``operations`` these are, products and views included."""

    flops: float
    tokens: int
    touched_bytes: float
    operations: int = 0


@dataclass(frozen=True)
class Trace:
    """Granule indices in the order they are borrowed. ``key``: what the order depends on (mode, micro-batches, head
    chunks).

    ``work[k]``: what follows access k; empty where nobody asked.
    """

    key: Hashable
    accesses: tuple[int, ...]
    work: tuple[Work, ...] = ()
