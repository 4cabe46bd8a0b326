"""NF4: the quantiles of a normal distribution, as bitsandbytes encodes them."""

from __future__ import annotations

import torch
from torch import Tensor

from lema_core.quantization.codec import WeightCodec, check_finite, row_chunks
from lema_core.quantization.formats import NF4, NF4_BLOCK, NF4_VALUES
from lema_quant.custom.packing import pack_high_first

#: bitsandbytes does not divide by less: a block of smaller numbers comes back as zeros
LEAST_ABSMAX = 1e-38


class NF4Codec(WeightCodec):
    """The bytes of ``quantize_4bit(weight, blocksize=64, quant_type="nf4")``: each number times 1 / absmax, in fp32, is
    between two midpoints of neighbouring values; one that lies on a midpoint belongs to the lower value."""

    format = NF4()

    def encode(self, weight_rK: Tensor, parts: tuple[Tensor, ...]) -> None:
        values = torch.tensor(NF4_VALUES)
        midpoints = (values[:-1] + values[1:]) / 2
        for rows_rK, (packed_rB, absmax_rG), first in row_chunks(weight_rK, parts):
            blocks_rGB = rows_rK.to(torch.float32).contiguous().unflatten(1, (-1, NF4_BLOCK))
            low_rG, high_rG = torch.aminmax(blocks_rGB, dim=2)
            torch.maximum(high_rG, low_rG.neg_(), out=absmax_rG)
            check_finite(absmax_rG, rows_rK, first)
            factor_rG = absmax_rG.clamp(min=LEAST_ABSMAX).reciprocal_()
            scaled_rGB = (blocks_rGB * factor_rG[:, :, None]).clamp_(-1, 1)
            codes_rGB = torch.bucketize(scaled_rGB, midpoints, out_int32=True).to(torch.uint8)
            pack_high_first(codes_rGB.view(len(rows_rK), -1), packed_rB)
