"""FP8 weights: E4M3 without infinities (Micikevicius et al. 2022, arXiv:2209.05433), one fp32 scale for each row.

Shapes: r rows of a block, K columns.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lema_core.quantization.codec import WeightCodec, divisors, row_absmax, row_chunks, row_scales
from lema_core.quantization.formats import WireFormat, WirePart

#: the largest number of E4M3
LARGEST = 448.0


class Fp8Rows(WireFormat):
    """``fp8-e4m3``: a float8_e4m3fn for each number and an fp32 scale for each row; a number is code * scale."""

    name, bits = "fp8-e4m3", 8

    def refuses(self, shape: tuple[int, ...]) -> str | None:
        if len(shape) != 2 or 0 in shape:
            return f"its shape is {list(shape)}, a matrix with something in it is expected"
        return None

    def parts(self, shape: tuple[int, int]) -> tuple[WirePart, ...]:
        rows, _ = shape
        return WirePart("", torch.float8_e4m3fn, shape), WirePart(".scale", torch.float32, (rows,))

    def decode(self, parts: tuple[Tensor, ...], out_rK: Tensor) -> None:
        codes_rK, scale_r = parts
        out_rK.copy_(codes_rK).mul_(scale_r[:, None])


class Fp8Codec(WeightCodec):
    """scale = absmax / 448; code = number / scale rounded to E4M3, half to even: a number is off by a sixteenth of
    itself at most, and by a 1024th of the scale where it is smaller than a 64th of it. A row of zeros has scale 0."""

    format = Fp8Rows()

    def encode(self, weight_rK: Tensor, parts: tuple[Tensor, ...]) -> None:
        for rows_rK, (codes_rK, scale_r), first in row_chunks(weight_rK, parts):
            absmax_r = row_absmax(rows_rK, first).float()
            row_scales(absmax_r, scale_r, LARGEST)
            # What is too large for E4M3 would become NaN.
            codes_rK.copy_((rows_rK.float() / divisors(scale_r)).clamp_(-LARGEST, LARGEST))
