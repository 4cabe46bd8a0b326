"""What a block's products gave in the forward pass, kept for the pass that runs the block again for its gradient."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from lema_core.errors import PlanError


@dataclass(frozen=True)
class Products:
    """One call of ``linears``: ``outputs`` [O, N] by module, and ``projected`` [sum of ranks, N], None without low-rank
    updates."""

    outputs: Sequence[Tensor]
    projected: Tensor | None


class Tape:
    """Products in the order they were computed; replayed once, in the same order."""

    def __init__(self) -> None:
        self._products: deque[Products] = deque()

    def record(self, products: Products) -> None:
        self._products.append(products)

    def replay(self) -> Products:
        """The next call's products. Raises PlanError when the block computes something else the second time."""
        if not self._products:
            raise PlanError("a block asks for more products when it runs again than it computed before")
        return self._products.popleft()
