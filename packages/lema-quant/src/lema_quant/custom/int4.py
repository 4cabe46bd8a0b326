"""int4 with one bf16 scale, of either sign, for each group of columns.

Shapes: n groups, g columns of a group, G groups of a row.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lema_core.quantization.codec import WeightCodec, check_finite, divisors, row_chunks
from lema_core.quantization.formats import Int4Groups
from lema_quant.custom.packing import pack_low_first

#: the number of largest size in a group is about -8 scales. Either it is one exactly, and the group's range is used to
#: its end, or it is clipped a little, and the others are nearer to their codes: what gives less error is taken. More
#: divisors lessen the error by another 1 % of it.
DIVISORS = (-8.0, -8.625)
_LEAST, _MOST = -8, 7
_SMALLEST = 2.0**-133  # of bf16
_LARGEST = 2.0**125 * (1 - 2**-8)  # eight times it is finite


class Int4Codec(WeightCodec):
    """For each of DIVISORS: scale = m / divisor rounded to bf16, m the group's number of largest size (of two, the
    negative one); code - 8 = round(number / scale), half to even, in [-8, 7]. The divisor with the smaller sum of
    squared errors counts, the first where they are equal: errors of number / scale, squared, added up half to half,
    times (scale / m)^2, all in fp32.

    A number is off by half a scale at most, or, if its sign is not that of m, by a scale where it is as large as m.
    """

    def __init__(self, group: int) -> None:
        self.format = Int4Groups(group)

    def encode(self, weight_rK: Tensor, parts: tuple[Tensor, ...]) -> None:
        group, columns = self.format.group, weight_rK.shape[1]
        groups = -(-columns // group)
        padded = groups * group != columns
        for rows_rK, (packed_rB, scale_rG), first in row_chunks(weight_rK, parts):
            if padded:  # zeros change neither a group's largest number nor its error
                whole_rK = torch.zeros(len(rows_rK), groups * group)
                whole_rK[:, :columns] = rows_rK
            else:
                whole_rK = rows_rK.to(torch.float32, copy=True, memory_format=torch.contiguous_format)
            codes_ng, scale_n = _encode_groups(whole_rK.view(-1, group), rows_rK, first)
            scale_rG.copy_(scale_n.view(-1, groups))
            if not padded:
                pack_low_first(codes_ng.view(len(rows_rK), -1), packed_rB)
                continue
            whole_rB = packed_rB.new_empty(len(rows_rK), groups * group // 2)
            pack_low_first(codes_ng.view(len(rows_rK), -1), whole_rB)
            packed_rB.copy_(whole_rB[:, : packed_rB.shape[1]])
            if columns % 2:
                packed_rB[:, -1] &= 15


def _encode_groups(numbers_ng: Tensor, rows_rK: Tensor, first_row: int) -> tuple[Tensor, Tensor]:
    """uint8 codes of 0 to 15 in the place of the numbers, and scales in bf16."""
    # Two passes: torch's aminmax takes five times as long as both.
    low_n, high_n = numbers_ng.amin(1), numbers_ng.amax(1)
    largest_n = torch.where(-low_n >= high_n, low_n, high_n)
    check_finite(largest_n, rows_rK, first_row)
    first_n, *others = (_scales(largest_n, divisor) for divisor in DIVISORS)
    scale_n, least_n = first_n, _error(numbers_ng, first_n, largest_n)
    for other_n in others:
        error_n = _error(numbers_ng, other_n, largest_n)
        better_n = error_n < least_n
        scale_n, least_n = torch.where(better_n, other_n, scale_n), torch.where(better_n, error_n, least_n)
    rounded_ng = numbers_ng.div_(divisors(scale_n)).round_().clamp_(_LEAST, _MOST)
    return rounded_ng.sub_(_LEAST).to(torch.int8).view(torch.uint8), scale_n.bfloat16()


def _scales(largest_n: Tensor, divisor: float) -> Tensor:
    """bf16 numbers in fp32, 0 where all numbers of a group are."""
    exact_n = largest_n / divisor
    size_n = exact_n.abs().clamp_(_SMALLEST, _LARGEST).copysign_(exact_n)
    return size_n.bfloat16().float().masked_fill_(largest_n == 0, 0)


def _error(numbers_ng: Tensor, scale_n: Tensor, largest_n: Tensor) -> Tensor:
    """For each group the sum of squared errors over largest^2; NaN where all numbers are zero."""
    scaled_ng = numbers_ng / divisors(scale_n)
    rounded_ng = scaled_ng.round().clamp_(_LEAST, _MOST)
    # Of scaled numbers, so that no square is too large or too small for fp32.
    return _add_halves(scaled_ng.sub_(rounded_ng).square_()).mul_((scale_n / largest_n).square_())


def _add_halves(values_ng: Tensor) -> Tensor:
    """The sum of each row, by adding its second half to its first until one number is left: always in this order."""
    while (half := values_ng.shape[1] // 2) > 0:
        values_ng = values_ng[:, :half] + values_ng[:, half:]
    return values_ng[:, 0]
