"""The backward pass from a tensor whose gradient is known.

``torch.autograd.backward(y, dy)`` does the same, but compares the two shapes by way of torch's symbolic ones, which
imports SymPy: 37 MB, and up to seconds, in every process that trains.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def backward_from(y: Tensor, dy: Tensor) -> None:
    """Accumulate gradients into the leaves of ``y``'s graph, given that of ``y``, of the same shape and dtype."""
    torch.autograd.backward(_Known.apply(y, dy))


class _Known(torch.autograd.Function):
    """A scalar whose gradient with respect to ``y`` is ``dy``."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, dy: Tensor) -> Tensor:
        if y.shape != dy.shape:
            raise ValueError(f"the gradient of {list(y.shape)} has the shape {list(dy.shape)}")
        ctx.save_for_backward(dy)
        return y.new_zeros(())

    @staticmethod
    def backward(ctx: Any, one: Tensor) -> tuple[Tensor, None]:
        return ctx.saved_tensors[0], None
