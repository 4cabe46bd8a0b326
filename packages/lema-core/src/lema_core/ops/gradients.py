"""Where gradients of weights that train are added up, in fp32, and how.

The share of a micro-batch is added after the shares of those before it, computed from what looks as it does when that
micro-batch is alone: what is packed together changes no bit. No sum needs a temporary of a weight's size. Shapes: N
tokens of all micro-batches of a pass, n of one, R rows and K columns of a block of a weight, C features, M a multiple
of N.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from lema_core.adapter import ModelAdapter
from lema_core.ops.linear import Columns, apart
from lema_core.store.granules import Part

#: elements of a block of a product that is not computed in fp32
_BLOCK_ELEMENTS = 1 << 20

#: given to an operation whose weights train, so that autograd sees it even where nothing else needs a gradient; it
#: never gets one itself
ANCHOR = torch.empty(0, requires_grad=True)


class Gradients(ABC):
    """Accumulators of the tensors that train; a tied head and its embedding have the same ones."""

    @abstractmethod
    def trains(self, tensor: str) -> bool:
        """Whether ``tensor`` has accumulators; a tied one where what it is tied to has some."""

    @abstractmethod
    def borrow(self, part: Part) -> AbstractContextManager[Tensor]:
        """The accumulator of a block of rows: fp32 of ``part.shape``, contiguous, zeros at the start of a step. What is
        added to it inside the ``with`` stays."""

    @abstractmethod
    def row_parts(self, tensor: str) -> tuple[Part, ...]:
        """The blocks of rows of an embedding that trains, in order."""

    @abstractmethod
    def complete(self, layer: int | None) -> None:
        """No more gradients come for the tensors of this block in this step; None, said last: for those outside."""

    def add_product(self, part: Part, left_RN: Tensor, right_KN: Tensor, columns: Sequence[Columns]) -> None:
        """``+= left right^T``. ``columns``: of each micro-batch, in order; empty where all are one."""
        with self.borrow(part) as total_RK:
            for left_Rn, right_Kn in zip(apart(left_RN, columns), apart(right_KN, columns), strict=True):
                self._add_product(total_RK, left_Rn, right_Kn)

    def add(self, part: Part, values: Iterable[Tensor]) -> None:
        """``+=`` each of ``values``, of ``part.shape``, one after another."""
        with self.borrow(part) as total:
            for value in values:
                self._add(total, value)

    def add_rows(self, tensor: str, ids_N: Tensor, rows_NC: Tensor, columns: Sequence[Columns]) -> None:
        """``+= rows`` at the rows ``ids`` (int64, on the CPU; below 0: nowhere) of an embedding, token after token. A
        block that no id falls into is not borrowed."""
        for part in self.row_parts(tensor):
            inside_N = (ids_N >= part.start) & (ids_N < part.stop)
            if not inside_N.any():
                continue
            with self.borrow(part) as total_RC:
                for start, stop in columns or ((0, len(ids_N)),):
                    (places_n,) = inside_N[start:stop].nonzero(as_tuple=True)
                    where_n = ids_N[start:stop][places_n] - part.start
                    chosen_nC = rows_NC[start:stop].index_select(0, places_n.to(rows_NC.device))
                    self._add_rows(total_RC, where_n.to(rows_NC.device), chosen_nC)

    def _add_product(self, total_RK: Tensor, left_Rn: Tensor, right_Kn: Tensor) -> None:
        if left_Rn.dtype == total_RK.dtype:
            total_RK.addmm_(left_Rn, right_Kn.t())
            return
        rows = max(1, _BLOCK_ELEMENTS // len(right_Kn))
        for total, left in zip(total_RK.split(rows), left_Rn.split(rows), strict=True):
            total += left @ right_Kn.t()

    def _add(self, total: Tensor, value: Tensor) -> None:
        total += value

    def _add_rows(self, total_RC: Tensor, ids_n: Tensor, rows_nC: Tensor) -> None:
        rows_nC = rows_nC.to(total_RC.dtype)
        if total_RC.device.type == "cpu":
            total_RC.index_add_(0, ids_n, rows_nC)
        else:
            # index_add_ adds equal ids in any order there
            total_RC.index_put_((ids_n,), rows_nC, accumulate=True)


def with_tied(adapter: ModelAdapter, trained: Iterable[str]) -> frozenset[str]:
    """``trained`` with what shares storage with one of them."""
    names = set(trained)
    for spec in adapter.tensors():
        if spec.tied_to is not None and names & {spec.name, spec.tied_to}:
            names |= {spec.name, spec.tied_to}
    return frozenset(names)


@dataclass(frozen=True)
class Sink:
    """Where the gradient of one small tensor goes, from one pass. ``columns``: as in Gradients.add_product."""

    gradients: Gradients
    part: Part
    columns: Sequence[Columns]

    def add_sums(self, terms_CM: Tensor) -> None:
        """Add the sum over the tokens of each micro-batch. ``terms_CM``: every token's share; M is the tokens, or
        several times the tokens, one set after another (of each head, say)."""
        self.gradients.add(self.part, (self._sum(terms) for terms in by_micro_batch(terms_CM, self.columns)))

    def add(self, values: Iterable[Tensor]) -> None:
        """Add what each micro-batch gives."""
        self.gradients.add(self.part, (value.view(self.part.shape) for value in values))

    def _sum(self, terms_CHn: Tensor) -> Tensor:
        return terms_CHn.sum(dim=(1, 2), dtype=torch.float32).view(self.part.shape)


def by_micro_batch(terms_CM: Tensor, columns: Sequence[Columns]) -> Iterator[Tensor]:
    """[C, M / N, n] of each micro-batch, laid out as if it were alone."""
    n_tokens = columns[-1][1] if columns else terms_CM.shape[1]
    terms_CHN = terms_CM.unflatten(1, (-1, n_tokens))
    for start, stop in columns or ((0, n_tokens),):
        yield terms_CHN[:, :, start:stop].contiguous()


class Collected(torch.autograd.Function):
    """A tensor whose gradient goes to a sink, all micro-batches of a pass at once."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, sink: Sink, anchor: Tensor) -> Tensor:
        ctx.sink = sink
        return values

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_values: Tensor) -> tuple[None, ...]:
        ctx.sink.add([d_values])
        return None, None, None


class Rows(torch.autograd.Function):
    """Rows of an embedding that trains, [N, C]; their gradient goes to ``gradients``."""

    @staticmethod
    def forward(
        ctx: Any,
        rows_NC: Tensor,
        gradients: Gradients,
        name: str,
        ids_N: Tensor,
        columns: Sequence[Columns],
        anchor: Tensor,
    ) -> Tensor:
        ctx.gradients, ctx.name, ctx.ids_N, ctx.columns = gradients, name, ids_N, columns
        return rows_NC

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_rows_NC: Tensor) -> tuple[None, ...]:
        ctx.gradients.add_rows(ctx.name, ctx.ids_N, d_rows_NC, ctx.columns)
        return (None,) * 6
