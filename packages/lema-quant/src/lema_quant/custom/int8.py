"""int8 with one scale for each row."""

from __future__ import annotations

import torch
from torch import Tensor

from lema_core.quantization.codec import WeightCodec, divisors, row_absmax, row_chunks, row_scales
from lema_core.quantization.formats import Int8Rows

MOST = 127


class Int8Codec(WeightCodec):
    """scale = absmax / 127; code = round(number / scale), half to even, in [-127, 127]: a number is off by half a scale
    at most, down to scales of 1e-38, below which scales have fewer digits themselves. A row of zeros has scale 0."""

    format = Int8Rows()

    def encode(self, weight_rK: Tensor, parts: tuple[Tensor, ...]) -> None:
        for rows_rK, (codes_rK, scale_r), first in row_chunks(weight_rK, parts):
            numbers_rK = rows_rK.to(torch.float32, copy=True)
            row_scales(row_absmax(numbers_rK, first), scale_r, MOST)
            codes_rK.copy_(row_codes(numbers_rK, scale_r))


def row_codes(numbers_rK: Tensor, scale_r: Tensor) -> Tensor:
    """Codes, still in fp32, in the place of the numbers."""
    return numbers_rK.div_(divisors(scale_r)).round_().clamp_(-MOST, MOST)
