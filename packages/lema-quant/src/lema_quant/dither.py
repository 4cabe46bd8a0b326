"""Where between two codes rounding goes up: elsewhere in every block and every step, and the same for the same input.

Moments change by little from step to step: ``exp_avg_sq`` by 0.1 % with beta2 0.999, where neighbouring codes are
several percent apart. Rounding to the nearest code would undo every such change, for ever. So a number x between two
codes goes to the upper one for a share of the thresholds that is its place between them, and is right on average.

Shapes: K blocks of B numbers.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

#: thresholds are odd multiples of half of 1 / this: exact in fp32, also added to a number of up to 256
_STEPS = 4096
#: 2^32 over the golden ratio, as int32: multiplying by it spreads what differs in few bits (Knuth, vol. 3, 6.4)
_SPREAD = 0x9E3779B1 - 2**32
#: the plastic number's reciprocal: its multiples, less their whole parts, are spread evenly
_TURN = 0.7548776662466927


def thresholds(bits_KB: Tensor, out_KB: Tensor) -> Tensor:
    """Fills fp32 ``out_KB`` with what is added before rounding down, in (0, 1), and returns it.

    ``bits_KB``: the numbers' bits, int32. A block's thresholds follow from their sum, so they depend on nothing
    outside the block, and the zeros that fill up a last block do not count.
    """
    sums_K1 = bits_KB.sum(1, keepdim=True, dtype=torch.int32)
    phase_K1 = sums_K1.mul_(_SPREAD).bitwise_right_shift_(20).to(torch.float32)  # -_STEPS / 2 ... _STEPS / 2 - 1
    torch.add(_places(bits_KB.shape[1], bits_KB.device), phase_K1, alpha=1 / _STEPS, out=out_KB)
    return out_KB.frac_()


@cache
def _places(block: int, device: torch.device) -> Tensor:
    """fp32 [B], odd multiples of half of 1 / _STEPS in (1, 2)."""
    turns_B = torch.arange(block, dtype=torch.float64) * _TURN
    return (1 + ((turns_B.frac() * _STEPS).floor() + 0.5) / _STEPS).to(device, torch.float32)
