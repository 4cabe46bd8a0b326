"""The order in which a step touches granules, recorded before the step runs."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass


@dataclass(frozen=True)
class Trace:
    """Granule indices in the order they are borrowed. ``key``: what the order depends on (mode, micro-batches, head
    chunks)."""

    key: Hashable
    accesses: tuple[int, ...]
