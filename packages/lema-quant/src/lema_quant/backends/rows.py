"""int8 by another library: its codes, this package's scales."""

from __future__ import annotations

from abc import abstractmethod

import torch
from torch import Tensor

from lema_core.quantization.codec import WeightCodec, divisors, row_absmax, row_chunks, row_scales
from lema_core.quantization.formats import Int8Rows
from lema_quant.custom.int8 import MOST, row_codes

#: below it a library's 1 / scale or 127 / absmax may be infinite
_LEAST_ABSMAX = 2.0**-100


class RowsByLibrary(WeightCodec):
    """What the int8 backends have in common: scales are absmax / 127, which torchao and quanto take from their caller
    and bitsandbytes has by itself. Rows of zeros, and of numbers too small for the library, get their codes here."""

    format = Int8Rows()

    def encode(self, weight_rK: Tensor, parts: tuple[Tensor, ...]) -> None:
        for rows_rK, (codes_rK, scale_r), first in row_chunks(weight_rK, parts):
            absmax_r = row_absmax(rows_rK, first).float()
            row_scales(absmax_r, scale_r, MOST)
            numbers_rK = rows_rK.float().contiguous()
            codes_rK.copy_(self.codes(numbers_rK, divisors(scale_r)))
            if (tiny_r := absmax_r < _LEAST_ABSMAX).any():
                codes_rK[tiny_r] = row_codes(numbers_rK[tiny_r], scale_r[tiny_r]).to(torch.int8)

    @abstractmethod
    def codes(self, numbers_rK: Tensor, scale_r1: Tensor) -> Tensor:
        """The library's int8 codes [r, K] of fp32 numbers, of which none is larger than 127 scales but for rounding."""
