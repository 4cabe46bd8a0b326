"""NF4: the quantiles of a normal distribution, as bitsandbytes encodes them."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from lema_core.quantization.codec import WeightCodec, check_finite, row_chunks
from lema_core.quantization.formats import NF4, NF4_BLOCK, NF4_VALUES
from lema_quant.custom.packing import pack_high_first

#: bitsandbytes does not divide by less: a block of smaller numbers comes back as zeros
LEAST_ABSMAX = 1e-38
#: cells to a unit in which a number's code is looked up; none has two midpoints
_CELLS = 64


class NF4Codec(WeightCodec):
    """The bytes of ``quantize_4bit(weight, blocksize=64, quant_type="nf4")``: each number times 1 / absmax, in fp32, is
    between two midpoints of neighbouring values; one that lies on a midpoint belongs to the lower value."""

    format = NF4()

    def encode(self, weight_rK: Tensor, parts: tuple[Tensor, ...]) -> None:
        lowest_j, midpoint_j = _cells()
        for rows_rK, (packed_rB, absmax_rG), first in row_chunks(weight_rK, parts):
            numbers_nb = rows_rK.to(torch.float32, copy=True, memory_format=torch.contiguous_format).view(-1, NF4_BLOCK)
            absmax_n = torch.maximum(numbers_nb.amax(1), numbers_nb.amin(1).neg_())
            check_finite(absmax_n, rows_rK, first)
            absmax_rG.copy_(absmax_n.view_as(absmax_rG))
            scaled_nb = numbers_nb.mul_(absmax_n.clamp_(min=LEAST_ABSMAX).reciprocal_()[:, None]).clamp_(-1, 1)
            cell = (scaled_nb * _CELLS).add_(_CELLS).to(torch.int32).flatten()
            above = midpoint_j.index_select(0, cell)
            torch.gt(scaled_nb.flatten(), above, out=above)
            codes = lowest_j.index_select(0, cell).add_(above.to(torch.int8))
            pack_high_first(codes.view(torch.uint8).view(len(rows_rK), -1), packed_rB)


@cache
def _cells() -> tuple[Tensor, Tensor]:
    """For each cell the lowest code of numbers in it, int8, and the midpoint above which they have the next one, or
    infinity."""
    values = torch.tensor(NF4_VALUES)
    midpoints = (values[:-1] + values[1:]) / 2
    begins = torch.arange(2 * _CELLS + 1) / _CELLS - 1
    lowest = torch.bucketize(begins, midpoints)
    following = torch.cat([midpoints, midpoints.new_tensor([torch.inf])])[lowest]
    return lowest.to(torch.int8), following
