"""One piece of a step by itself, on tokens that are made up: a block's pass, its gradient, a chunk of the head.

An observer sees what a piece does; whoever wants to know how long it takes needs none. Shapes: B rows, T tokens,
N = B * T, C hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from enum import IntEnum

import torch
from torch import Tensor

from lema_core.adapter import ModelAdapter
from lema_core.ops.context import Dropout, ForwardContext, Segment
from lema_core.ops.gradient import backward_from
from lema_core.ops.streamed import Pass, StreamedOps
from lema_core.ops.tape import Tape
from lema_core.runtime.head_loss import chunk_loss

_CPU = torch.device("cpu")


class Level(IntEnum):
    """What a block leaves in memory for its gradient: its input, its products too, or all of autograd's graph."""

    RECOMPUTE = 0
    KEEP = 1
    GRAPH = 2


class Observer:
    """Sees a piece run. This one looks at nothing."""

    def watching(self) -> AbstractContextManager[None]:
        """Entered around the piece and what it needs to have gone before."""
        return nullcontext()

    def started(self) -> None:
        """What comes next is the piece; told where something went before it."""

    def over(self) -> None:
        """The piece is over, its results are still alive."""


class PieceRun:
    """Pieces of ``adapter`` with ``ops`` on the tokens of ``segments``, micro-batches that are packed together."""

    def __init__(
        self, adapter: ModelAdapter, ops: StreamedOps, segments: Sequence[Segment], observer: Observer | None = None
    ) -> None:
        self._adapter = adapter
        self._ops = ops
        self._segments = tuple(segments)
        self._observer = observer or Observer()
        self._tokens = segments[-1].stop
        self.ids = torch.zeros(1, self._tokens, dtype=torch.int64)
        positions = torch.arange(self._tokens, device=ops.device)
        padded = any(each.mask_BTS is not None for each in segments)
        valid_BT = torch.ones(1, self._tokens, dtype=torch.bool, device=ops.device) if padded else None
        shares = (1 / len(segments),) * len(segments)
        self.ctx = ForwardContext(
            positions[None], valid_BT=valid_BT, real_BT=valid_BT, segments=self._segments, shares=shares
        )
        adapter.prepare(self.ctx)
        self._dropout = Dropout(0, 0, self._segments)

    def _x(self) -> Tensor:
        shape = self._adapter.hidden_size, self._tokens
        return torch.zeros(shape, dtype=self._ops.dtype, device=self._ops.device).t()[None]

    def embed(self) -> None:
        with torch.no_grad(), self._ops.during(Pass(self._segments)), self._observer.watching():
            _kept = self._adapter.embed(self._ops, self.ids, self.ctx)
            self._observer.over()

    def embed_gradient(self) -> None:
        """The embedding again, and the gradient of what trains in it."""
        dy_BTC = self._x()
        with self._observer.watching():
            with torch.enable_grad(), self._ops.during(Pass(self._segments, self._dropout, again=True)):
                x_BTC = self._adapter.embed(self._ops, self.ids, self.ctx)
            backward_from(x_BTC, dy_BTC)
            del x_BTC
            self._observer.over()

    def forward(self, layer: int, level: Level) -> None:
        if level is Level.GRAPH:
            with self._observer.watching():
                _kept = self.graph(layer)
                self._observer.over()
            return
        x_BTC, tape = self._x(), Tape() if level is Level.KEEP else None
        with torch.no_grad(), self._ops.during(Pass(self._segments, self._dropout, tape)), self._observer.watching():
            _kept = self._adapter.block(self._ops, layer, x_BTC, self.ctx)
            self._observer.over()

    def graph(self, layer: int, wants_dx: bool = True) -> tuple[Tensor, Tensor]:
        """A block's input and its output with the graph between them."""
        x_BTC = self._x().requires_grad_(wants_dx)
        with torch.enable_grad(), self._ops.during(Pass(self._segments, self._dropout)):
            return x_BTC, self._adapter.block(self._ops, layer, x_BTC, self.ctx)

    def evaluation(self, layer: int) -> None:
        ctx = ForwardContext(self.ctx.positions_BT.view(2, -1))
        self._adapter.prepare(ctx)
        x_BTC = self._x().view(2, -1, self._adapter.hidden_size)
        with torch.no_grad(), self._observer.watching():
            _kept = self._adapter.block(self._ops, layer, x_BTC, ctx)
            self._observer.over()

    def backward(self, layer: int, level: Level, wants_dx: bool) -> None:
        x_BTC, dy_BTC = self._x().requires_grad_(wants_dx), self._x()
        first = Pass(self._segments, self._dropout, Tape() if level is Level.KEEP else None)
        with self._observer.watching():
            # What the forward pass left is let go as the gradient is computed.
            if level is Level.KEEP:
                with torch.no_grad(), self._ops.during(first):
                    self._adapter.block(self._ops, layer, x_BTC, self.ctx)
            if level is Level.GRAPH:
                x_BTC, y = self.graph(layer, wants_dx)
            self._observer.started()
            if level is not Level.GRAPH:
                with torch.enable_grad(), self._ops.during(replace(first, again=True)):
                    y = self._adapter.block(self._ops, layer, x_BTC, self.ctx)
            if y.requires_grad:
                backward_from(y, dy_BTC)
            del y
            self._observer.over()

    def head(self, trained: bool, wants_dx: bool) -> None:
        x_NC = self._x()[0]
        targets = torch.zeros(self._tokens, dtype=torch.int64, device=self._ops.device)
        with self._ops.during(Pass(self._segments)), self._observer.watching():
            _kept = chunk_loss(self._adapter, self._ops, x_NC, targets, 1.0 if trained else None, wants_dx)
            self._observer.over()


def segment(micro_batch: int, start: int, stop: int, rows: int, masked: bool, device: torch.device = _CPU) -> Segment:
    """Tokens ``start:stop`` in ``rows`` rows; ``masked``: with a mask, as padding needs one."""
    tokens = (stop - start) // rows
    mask = torch.ones(rows, tokens, tokens, dtype=torch.bool, device=device) if masked else None
    return Segment(start, stop, rows, tokens, micro_batch, mask)
