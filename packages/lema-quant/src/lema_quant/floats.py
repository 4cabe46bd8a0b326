"""Numbers from zero up in 8 bits, for ``exp_avg_sq``: even steps in a float's bits, by the block's range.

The update divides by the root of these numbers, so what counts is their relative error, and none may come back as
zero or far too small: the update would explode. The bits of an fp32 number, read as an integer, grow like its
logarithm, evenly within a power of two. A block's codes are these bits in even steps from its smallest number above
zero to its largest: code 0 is zero, code c is the float with the bits ``low + (c - 1) step``. Where the numbers of a
block lie within a factor of 1000, steps are 2 to 4 % of a number, so its root is right to 1 to 2 %, the smallest as
well as the largest.

Steps are ``(4 + j) 2^e``, and ``low`` is a multiple of the step: while a block's range does not change by much, neither
do the numbers that its codes stand for, so most numbers are rounded from a place near where they were rounded to. The
header is ``low``, whose lower seven bits are free, with ``4 e + j`` in them.

Numbers under 2^-40 of the block's largest are rounded up to that. Its root is the fourth smallest share of a block's
largest that ``lema_quant.roots`` can give to ``exp_avg``: a rounding up among the smallest codes there, which are far
apart, never meets a much smaller root here. Coordinates whose gradients are that small beside others train slowly.

Shapes: K blocks of B numbers.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lema_quant.dither import thresholds

#: fp32 numbers of scratch per number of a chunk
SCRATCH = 3
#: the largest span of bits that is kept apart: 40 powers of two
_SPAN = 40 << 23
#: steps from smallest to largest. With the two that rounding both ends away from each other may add, and zero: 255.
_STEPS = 252
#: 4 e + j of the finest step, 512: a multiple of it has its seven lowest bits free
_FINEST = 28
_INDEX = 127
#: the sign, the exponent and two more bits of the fp32 number 4
_FOUR = (127 + 2) << 2
#: the bits of 2^127: from here on a number counts as infinite, a step above it might be
_INFINITE = 0x7F000000
_NAN = 0x7FC00000
_INT32_MAX = 2**31 - 1


def encode(values_KB: Tensor, codes_KB: Tensor, headers_K: Tensor, scratch_SKB: Tensor) -> None:
    """fp32 [K, B] to uint8 [K, B] and int32 [K]. A block with a negative number, or with one that is infinite or NaN,
    comes back as NaN, as its root would."""
    held_KB, place_KB, other_KB = scratch_SKB
    bits_KB, moved_KB = (each.view(torch.int32) for each in (held_KB, place_KB))
    torch.add(values_KB, 0.0, out=held_KB)  # -0 to 0
    high_K1 = bits_KB.amax(1, keepdim=True)
    bad_K1 = (bits_KB.amin(1, keepdim=True) < 0) | (high_K1 >= _INFINITE)
    high_K1.masked_fill_(bad_K1, 0)
    # The smallest above zero: adding the largest integer wraps round, to the largest for zero, to the smallest for one.
    low_K1 = torch.add(bits_KB, _INT32_MAX, out=moved_KB).amin(1, keepdim=True).sub_(_INT32_MAX)
    low_K1 = torch.maximum(low_K1.masked_fill_(bad_K1, 0), high_K1 - _SPAN)
    index_K1 = _index(high_K1 - low_K1)
    step_K1 = _step(index_K1)
    low_K1 = low_K1.div_(step_K1, rounding_mode="floor").clamp_(min=1).mul_(step_K1)  # code 1 is not zero
    torch.maximum(torch.sub(bits_KB, low_K1 - step_K1, out=moved_KB), step_K1, out=moved_KB)
    codes = other_KB.copy_(moved_KB).div_(step_K1.to(torch.float32))
    codes.add_(thresholds(bits_KB, out_KB=place_KB)).mul_(torch.sign(held_KB, out=place_KB))
    codes_KB.copy_(bits_KB.copy_(codes))  # by way of int32: faster
    headers_K.copy_((low_K1 | index_K1)[:, 0])
    if bad_K1.any():
        headers_K.masked_fill_(bad_K1[:, 0], _NAN | _FINEST)
        codes_KB.masked_fill_(bad_K1, 1)


def decode(codes_KB: Tensor, headers_K: Tensor, values_KB: Tensor, scratch_SKB: Tensor) -> None:
    """uint8 [K, B] and int32 [K] to fp32 [K, B]."""
    bits_KB, above_zero_KB = values_KB.view(torch.int32), scratch_SKB[0].view(torch.int32)
    step_K1 = _step(headers_K[:, None] & _INDEX)
    bits_KB.copy_(codes_KB)
    torch.clamp(bits_KB, max=1, out=above_zero_KB)
    bits_KB.mul_(step_K1).add_((headers_K[:, None] & ~_INDEX) - step_K1).mul_(above_zero_KB)


def _index(span_K1: Tensor) -> Tensor:
    """4 e + j of the finest step by which each span of bits has at most _STEPS: of a float just as long, exponent and
    the two bits behind it, rounded up."""
    least_K1 = span_K1.to(torch.float32).div_(_STEPS).view(torch.int32)
    return least_K1.add_((1 << 21) - 1).bitwise_right_shift_(21).sub_(_FOUR).clamp_(min=_FINEST)


def _step(index_K1: Tensor) -> Tensor:
    return (4 + (index_K1 & 3)) << (index_K1 >> 2)
