"""int8 by another library: its codes, this package's scales."""

from __future__ import annotations

from abc import abstractmethod

import torch
from torch import Tensor

from lema_core.quantization.codec import WeightCodec, row_absmax, row_chunks
from lema_core.quantization.formats import Int8Rows
from lema_quant.custom.int8 import MOST, divisors, row_scales

#: below it a library's 1 / scale or 127 / absmax may be infinite
_LEAST_ABSMAX = 2.0**-100
_LIFT = 2.0**100


class RowsByLibrary(WeightCodec):
    """What the int8 backends have in common: scales are absmax / 127, which torchao and quanto take from their caller
    and bitsandbytes has by itself, and every row reaches the library as numbers that it can scale."""

    format = Int8Rows()

    def encode(self, weight_rK: Tensor, parts: tuple[Tensor, ...]) -> None:
        for rows_rK, (codes_rK, scale_r), first in row_chunks(weight_rK, parts):
            absmax_r = row_absmax(rows_rK, first).float()
            row_scales(absmax_r, scale_r)
            numbers_rK, divisors_r1 = rows_rK.float(), divisors(scale_r)
            if (tiny_r := absmax_r < _LEAST_ABSMAX).any():
                # A power of two changes no code.
                lift_r1 = torch.where(tiny_r, _LIFT, 1.0)[:, None]
                numbers_rK, divisors_r1 = numbers_rK * lift_r1, divisors_r1 * lift_r1.where(scale_r[:, None] > 0, 1)
            codes_rK.copy_(self.codes(numbers_rK.contiguous(), divisors_r1).clamp_(-MOST, MOST))

    @abstractmethod
    def codes(self, numbers_rK: Tensor, scale_r1: Tensor) -> Tensor:
        """The library's int8 codes [r, K] of fp32 numbers; none is larger than 127 scales, but for rounding."""
