"""W8A8 in plain torch: an int8 weight times inputs that are rounded to int8 too, each token by a scale of its own.

It changes numbers, so it is computed only where somebody asked for it (``weights_compute=w8a8``), and only forward:
input gradients are those of the weight and the inputs as they were. Shapes: N tokens, K inputs, R rows of one block.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lema_core.quantization.block import QuantizedBlock

MOST = 127
#: products of two codes whose sum an int32 holds, and those whose sums are exact in fp32, in whatever order
MOST_INPUTS = 1 << 17
_EXACT = 1024
#: numbers of a weight that are widened together
_SCRATCH_ELEMENTS = 1 << 20


def round_inputs(x_KN: Tensor) -> tuple[Tensor, Tensor]:
    """Codes [K, N] in [-127, 127] as fp32, and the scales [N]: largest size / 127 of each token; code = x / scale,
    rounded half to even. A token of zeros has scale 0 and zeros; one with an infinity or NaN has scale NaN."""
    x_KN = x_KN.float()
    absmax_N = x_KN.abs().amax(dim=0) if len(x_KN) else x_KN.new_zeros(x_KN.shape[1])
    scale_N = torch.where(absmax_N.isfinite(), absmax_N / MOST, torch.nan)
    codes_KN = (x_KN / scale_N.masked_fill(scale_N == 0, 1)).round_().clamp_(-MOST, MOST)
    return codes_KN.nan_to_num_(0.0), scale_N


def multiply_codes(weight_RK: QuantizedBlock, codes_KN: Tensor, scale_N: Tensor) -> Tensor:
    """fp32 [R, N]: the exact sum of the codes' products, times the row's scale, times the token's. ``weight``: int8."""
    codes_RK, scale_R = weight_RK.parts
    rows, k = weight_RK.shape
    if k > MOST_INPUTS:
        raise ValueError(f"{k} inputs, and W8A8 sums {MOST_INPUTS} products at most")
    out_RN = codes_KN.new_empty(rows, codes_KN.shape[1])
    step = max(1, _SCRATCH_ELEMENTS // _EXACT)
    for start in range(0, rows, step):
        sums_rN = torch.zeros_like(out_RN[start : start + step], dtype=torch.int32)
        for first in range(0, k, _EXACT):
            some_rk = codes_RK[start : start + step, first : first + _EXACT].float()
            sums_rN += (some_rk @ codes_KN[first : first + _EXACT]).int()
        out_RN[start : start + step] = sums_rN.float() * scale_R[start : start + step, None] * scale_N
    return out_RN
