"""Products with a borrowed weight, in plain torch.

Activations are kept feature-major: an [N, C] activation is the transpose of a contiguous [C, N] matrix, and ``W @
x_CN`` needs neither a transposed operand nor a transposed result. A weight stored in another dtype is widened, and a
quantized one decoded, a few rows at a time into one scratch area, so no second copy of it ever exists; one that a file
holds at an odd place is copied there, so that the place changes no bit. Shapes: N tokens, K inputs, R rows of one block
of a weight, r rank of a low-rank update.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from lema_core.ops.w8a8 import multiply_codes, round_inputs
from lema_core.quantization.block import QuantizedBlock, WeightBlock

#: rows that are widened together, in elements: small enough to stay in cache, large enough to keep the product fast
_SCRATCH_ELEMENTS = 1 << 20
_MIN_ROWS = 64
#: a BLAS chooses its code, and so the order of its sums, by addresses too
_ALIGNMENT_BYTES = 64

#: columns [start, stop) of one micro-batch
Columns = tuple[int, int]


class LinearKernel:
    """Forward and input gradient of ``y = W x`` for one block of rows of W at a time.

    ``segments`` are the micro-batches whose tokens stand beside each other, in order and without gaps; ``()`` means
    that all columns are one. The bits of a segment's columns depend on that segment alone: micro-batches computed
    together equal micro-batches computed apart.

    ``weights_compute``: "w8a8" rounds the inputs of int8 weights to int8 too, forward, see :mod:`lema_core.ops.w8a8`;
    what else there is ("auto", "dequant") decodes weights.
    """

    def __init__(self, weights_compute: str = "auto") -> None:
        self._rounds_inputs = weights_compute == "w8a8"
        self._scratch: dict[torch.dtype, Tensor] = {}

    def packed(self, x_KN: Tensor, segments: Sequence[Columns] = ()) -> Any:
        """What several products with the same right-hand side share, to be given as ``x`` to :meth:`forward` with the
        same ``segments``."""
        return apart(x_KN, segments)

    def forward(
        self,
        weight_RK: WeightBlock,
        x: Any,
        out_RN: Tensor,
        update: tuple[Tensor, Tensor, float] | None = None,
        segments: Sequence[Columns] = (),
    ) -> None:
        """out = W x, plus scale * B a where ``update`` is (B [R, r] in fp32, a [r, N], scale).

        ``x``: a tensor [K, N], or what :meth:`packed` returned; ``out`` has its dtype.
        """
        shares = x if isinstance(x, tuple) else apart(x, segments)
        columns = segments or ((0, out_RN.shape[1]),)
        if update is not None:
            low_rank, projected, scale = update[0].to(out_RN.dtype), apart(update[1], segments), update[2]
        if self._rounds_inputs and isinstance(weight_RK, QuantizedBlock) and weight_RK.format.name == "int8":
            for i, (first, last) in enumerate(columns):
                y = multiply_codes(weight_RK, *round_inputs(shares[i])).to(out_RN.dtype)
                out_RN[:, first:last] = y if update is None else y.addmm_(low_rank, projected[i], alpha=scale)
            return
        for start, stop, w in self._blocks(weight_RK, out_RN):
            for i, (first, last) in enumerate(columns):
                target = out_RN[start:stop, first:last]
                y = target if not segments or _settled(target) else target.new_empty(target.shape)
                torch.mm(w, shares[i], out=y)
                if update is not None:
                    y.addmm_(low_rank[start:stop], projected[i], alpha=scale)
                if y is not target:
                    target.copy_(y)

    def input_gradient(
        self,
        weight_RK: WeightBlock,
        dy_RN: Tensor,
        dx_KN: Tensor,
        first: bool,
        update: tuple[Tensor, Tensor] | None = None,
        segments: Sequence[Columns] = (),
    ) -> None:
        """dx = W^T dy, or dx += W^T dy when not ``first``; plus A^T da where ``update`` is (A [r, K] in fp32, da
        [r, N])."""
        sums = apart(dx_KN, segments)
        for start, stop, w in self._blocks(weight_RK, dy_RN):
            for dx, dy in zip(sums, apart(dy_RN[start:stop], segments), strict=True):
                if first and start == 0:
                    torch.mm(w.t(), dy, out=dx)
                else:
                    dx.addmm_(w.t(), dy)
        if update is not None:
            a_Kr = update[0].to(dx_KN.dtype).t()
            for dx, da in zip(sums, apart(update[1], segments), strict=True):
                dx.addmm_(a_Kr, da)
        for dx, (begin, end) in zip(sums, segments, strict=bool(segments)):
            if (target := dx_KN[:, begin:end]).data_ptr() != dx.data_ptr():
                target.copy_(dx)

    def _blocks(self, weight_RK: WeightBlock, like: Tensor) -> Iterator[tuple[int, int, Tensor]]:
        rows, k = weight_RK.shape
        if isinstance(weight_RK, Tensor) and weight_RK.dtype == like.dtype and _settled(weight_RK):
            yield 0, rows, weight_RK
            return
        step = self._rows_at_once(weight_RK, like)
        for start in range(0, rows, step):
            stop = min(rows, start + step)
            scratch = self._scratch_for((stop - start) * k, like.dtype, like).view(stop - start, k)
            self._fill(scratch, weight_RK, start)
            yield start, stop, scratch

    def _fill(self, scratch_rK: Tensor, weight_RK: WeightBlock, start: int) -> None:
        """Rows ``start`` and on of a weight, in the dtype of ``scratch``."""
        if isinstance(weight_RK, Tensor):
            scratch_rK.copy_(weight_RK[start : start + len(scratch_rK)])
        elif scratch_rK.dtype == torch.float32:
            weight_RK.decode(scratch_rK, start)
        else:
            decoded = self._scratch_for(scratch_rK.numel(), torch.float32, scratch_rK).view_as(scratch_rK)
            weight_RK.decode(decoded, start)
            scratch_rK.copy_(decoded)

    def _rows_at_once(self, weight_RK: WeightBlock, like: Tensor) -> int:
        """Rows of a block that is multiplied at once: all where nothing has to be widened or decoded."""
        rows, k = weight_RK.shape
        if isinstance(weight_RK, Tensor) and weight_RK.dtype == like.dtype:
            return rows
        return min(rows, max(_MIN_ROWS, _SCRATCH_ELEMENTS // k))

    def _scratch_for(self, elements: int, dtype: torch.dtype, like: Tensor) -> Tensor:
        """Where ``like`` is."""
        held = self._scratch.get(dtype)
        if held is None or held.numel() < elements or held.device != like.device:
            held = self._scratch[dtype] = torch.empty(elements, dtype=dtype, device=like.device)
        return held[:elements]


def apart(x: Tensor, segments: Sequence[Columns]) -> tuple[Tensor, ...]:
    """The columns of each segment, where a product cannot tell whether it stands alone; x itself without segments."""
    if not segments:
        return (x,)
    shares = (x[:, start:stop] for start, stop in segments)
    return tuple(share if _settled(share) else share.clone(memory_format=torch.contiguous_format) for share in shares)


def _settled(x: Tensor) -> bool:
    return x.is_contiguous() and x.data_ptr() % _ALIGNMENT_BYTES == 0
