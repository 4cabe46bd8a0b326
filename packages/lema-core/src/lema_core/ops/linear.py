"""Products with a borrowed weight, in plain torch.

Activations are kept feature-major: an [N, C] activation is the transpose of a contiguous [C, N] matrix, and ``W @
x_CN`` needs neither a transposed operand nor a transposed result. A weight stored in another dtype is widened a few
rows at a time into one scratch area, so no second copy of it ever exists. Shapes: N tokens, K inputs, O outputs, R rows
of one block.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

#: rows that are widened together, in elements: small enough to stay in cache, large enough to keep the product fast
_SCRATCH_ELEMENTS = 1 << 20
_MIN_ROWS = 64


class LinearKernel:
    """Forward and input gradient of ``y = W x`` for one block of rows of W at a time."""

    def __init__(self) -> None:
        self._scratch: Tensor | None = None

    def forward(self, weight_RK: Tensor, x_KN: Tensor, out_RN: Tensor) -> None:
        """out = W x, in the dtype of ``x``."""
        for start, stop, w in self._blocks(weight_RK, x_KN):
            torch.mm(w, x_KN, out=out_RN[start:stop])

    def input_gradient(self, weight_RK: Tensor, dy_RN: Tensor, dx_KN: Tensor, first: bool) -> None:
        """dx = W^T dy, or dx += W^T dy when not ``first``."""
        for start, stop, w in self._blocks(weight_RK, dy_RN):
            if first and start == 0:
                torch.mm(w.t(), dy_RN[start:stop], out=dx_KN)
            else:
                dx_KN.addmm_(w.t(), dy_RN[start:stop])

    def _blocks(self, weight_RK: Tensor, like: Tensor) -> Iterator[tuple[int, int, Tensor]]:
        rows, k = weight_RK.shape
        if weight_RK.dtype == like.dtype:
            yield 0, rows, weight_RK
            return
        step = max(_MIN_ROWS, _SCRATCH_ELEMENTS // k)
        for start in range(0, rows, step):
            stop = min(rows, start + step)
            scratch = self._scratch_for((stop - start) * k, like).view(stop - start, k)
            scratch.copy_(weight_RK[start:stop])
            yield start, stop, scratch

    def _scratch_for(self, elements: int, like: Tensor) -> Tensor:
        held = self._scratch
        if like.is_meta:
            return torch.empty(elements, dtype=like.dtype, device="meta")
        if held is None or held.numel() < elements or held.dtype != like.dtype or held.device != like.device:
            held = self._scratch = torch.empty(elements, dtype=like.dtype, device=like.device)
        return held[:elements]
