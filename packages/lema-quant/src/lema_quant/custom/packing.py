"""Two codes of 4 bits in a byte."""

from __future__ import annotations

import torch
from torch import Tensor


def pack_low_first(codes_rK: Tensor, packed_rB: Tensor) -> None:
    """uint8 codes, K even, to bytes [r, K / 2] with the even column's code in the lower half. Contiguous."""
    # A little-endian pair: the even column's code is its lower byte.
    pairs_rB = codes_rK.view(torch.int16)
    packed_rB.copy_(pairs_rB | (pairs_rB >> 4))


def pack_high_first(codes_rK: Tensor, packed_rB: Tensor) -> None:
    """The same with the even column's code in the upper half."""
    pairs_rB = codes_rK.view(torch.int16)
    packed_rB.copy_((pairs_rB << 4) | (pairs_rB >> 8))
