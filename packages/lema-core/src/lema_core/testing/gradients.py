"""Accumulators of gradients that are simply there, to see what a step gives each weight."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from lema_core.adapter import ModelAdapter
from lema_core.errors import PlanError
from lema_core.ops.gradients import Gradients, with_tied
from lema_core.store.granules import Part

#: of a block of an embedding's rows
_ROWS = 16


class GradientsInMemory(Gradients):
    """Those of ``trained`` tensors of ``adapter``: ``totals``, fp32 by name; a tied one has that of what it is tied to.

    ``completed``: what was said to be so, in order. Raises PlanError for what is added after that, and where two parts
    are borrowed at a time.
    """

    def __init__(self, adapter: ModelAdapter, trained: Iterable[str], device: torch.device | None = None) -> None:
        names = with_tied(adapter, trained)
        specs = [spec for spec in adapter.tensors() if spec.name in names]
        self.totals = {spec.name: torch.zeros(spec.shape, device=device) for spec in specs if spec.tied_to is None}
        self._stored_as = {spec.name: spec.tied_to or spec.name for spec in specs}
        self._layers = {spec.name: spec.layer for spec in specs if spec.tied_to is None}
        self._lent: str | None = None
        self.completed: list[int | None] = []

    def begin_step(self) -> None:
        """From here on all are zeros."""
        self.completed.clear()
        for total in self.totals.values():
            total.zero_()

    def trains(self, tensor: str) -> bool:
        return tensor in self._stored_as

    @contextmanager
    def borrow(self, part: Part) -> Iterator[Tensor]:
        name = self._stored_as[part.tensor]
        if self._lent is not None:
            raise PlanError(f"the gradient of {name} is borrowed beside that of {self._lent}")
        if self._layers[name] in self.completed:
            raise PlanError(f"{name}: a gradient came after layer {self._layers[name]} was said to be complete")
        self._lent = name
        total = self.totals[name]
        try:
            yield total[part.start : part.stop] if total.ndim else total
        finally:
            self._lent = None

    def row_parts(self, tensor: str) -> tuple[Part, ...]:
        rows, columns = self.totals[self._stored_as[tensor]].shape
        starts = range(0, rows, _ROWS)
        bounds = [(start, min(rows, start + _ROWS)) for start in starts]
        return tuple(Part(tensor, 0, a, b, (b - a, columns), torch.float32, 0) for a, b in bounds)

    def complete(self, layer: int | None) -> None:
        self.completed.append(layer)
