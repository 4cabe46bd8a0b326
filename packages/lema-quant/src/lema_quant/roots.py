"""Signed numbers in 8 bits, for ``exp_avg`` and gradients: the fourth root in 127 steps, by the block's largest.

A code is k in [-127, 127] as two's complement; it stands for ``sign(k) (k / 127)^4 absmax``, and the block's header is
absmax, fp32. So the largest of a block is exact, neighbouring codes near it are 3 % of it apart, and the smallest is
4e-9 of it: a coordinate a million times below its neighbours still trains. Dettmers et al. 2022, "8-bit Optimizers via
Block-wise Quantization" (arXiv:2110.02861), use "dynamic tree quantization", which reaches down to 5e-7; fourth roots
have like steps on average, no jumps in their size from decade to decade, and need no table.

Shapes: K blocks of B numbers.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lema_quant.dither import thresholds

#: fp32 numbers of scratch per number of a chunk
SCRATCH = 4
#: 127^4 as fp32 computes it, so that the largest of a block is exact
_WHOLE = 260144640.0
#: headers are at least this, so that _WHOLE over one is finite
_SMALLEST = 2.0**-96
_ONE = torch.ones(())


def encode(values_KB: Tensor, codes_KB: Tensor, headers_K: Tensor, scratch_SKB: Tensor) -> None:
    """fp32 [K, B] to uint8 [K, B] and int32 [K]. A block with an element that is not finite gets the header NaN."""
    size_KB, root_KB, square_KB, gap_KB = scratch_SKB
    torch.abs(values_KB, out=size_KB)
    absmax_K1 = size_KB.amax(1, keepdim=True)
    finite_K1 = absmax_K1.isfinite()
    absmax_K1.clamp_(min=_SMALLEST)
    headers_K.view(torch.float32).copy_(absmax_K1[:, 0])
    if not finite_K1.all():
        headers_K.view(torch.float32).masked_fill_(~finite_K1[:, 0], torch.nan)
        absmax_K1.masked_fill_(~finite_K1, 1)
        size_KB.masked_fill_(~finite_K1, 0)
    size_KB.mul_(_WHOLE / absmax_K1)
    # k = floor(root): of a reciprocal the reciprocal root, as torch's plain one takes six times as long for zeros. A
    # root that is not the nearest number does no harm: just above and just below k^4 rounding leads to k.
    torch.rsqrt(size_KB, out=root_KB).rsqrt_().floor_()
    # the place of the size between k^4 and (k + 1)^4 = k^4 + (2k + 1)(2 (k^2 + k) + 1)
    torch.mul(root_KB, root_KB, out=square_KB)
    torch.add(square_KB, root_KB, out=gap_KB)
    torch.add(_ONE, gap_KB, alpha=2, out=gap_KB)
    gap_KB.addcmul_(gap_KB, root_KB, value=2)
    size_KB.sub_(square_KB.mul_(square_KB)).div_(gap_KB)
    size_KB.add_(thresholds(values_KB.view(torch.int32), out_KB=gap_KB)).floor_().add_(root_KB)
    codes_KB.view(torch.int8).copy_(size_KB.mul_(torch.sign(values_KB, out=root_KB)))


def decode(codes_KB: Tensor, headers_K: Tensor, values_KB: Tensor, scratch_SKB: Tensor) -> None:
    """uint8 [K, B] and int32 [K] to fp32 [K, B]."""
    size_KB = scratch_SKB[0]
    values_KB.copy_(codes_KB.view(torch.int8))
    for _ in range(2):
        values_KB.mul_(torch.abs(values_KB, out=size_KB))
    values_KB.div_(_WHOLE).mul_(headers_K.view(torch.float32)[:, None])
