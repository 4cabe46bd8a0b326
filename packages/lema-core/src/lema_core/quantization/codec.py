"""What turns a weight into a wire format. Codecs are reached through the hook ``lema_quant_backends``.

Shapes: R rows of a weight, K columns, r rows of a block.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator

import torch
from torch import Tensor

from lema_core.errors import NonFiniteError
from lema_core.quantization.formats import WireFormat

#: numbers that codecs work on at a time: an fp32 copy has a megabyte, which stays in a core's cache, and the cost of
#: torch's calls does not count
CHUNK_NUMBERS = 1 << 18
_SMALLEST_SCALE = 2.0**-149
WEIGHT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class NotFiniteWeight(NonFiniteError):
    """A weight has an infinite number or NaN. ``row`` counts from the first row that ``encode`` was given; who knows
    the tensor's name and where the block begins says so in a line of its own."""

    def __init__(self, row: int, column: int, value: float) -> None:
        super().__init__(f"row {row}, column {column} is {value}, which no code stands for")
        self.row, self.column, self.value = row, column, value


class WeightCodec(ABC):
    """How one backend encodes weights in one wire format. A QuantBackend record names what makes it, without arguments:
    the class itself, as a rule.

    Rows are independent of each other, so that any cut of a weight into blocks of rows gives the same bytes. Blocks may
    be encoded by several threads at once.
    """

    #: what it emits
    format: WireFormat
    #: changes when the same weight would give other bytes: packed weights that were kept are packed anew
    version: str = "1"

    def refuses(self, shape: tuple[int, ...]) -> str | None:
        """Why it cannot encode a weight of this shape; None when it can. No more than the format refuses, unless its
        library does."""
        return self.format.refuses(shape)

    @abstractmethod
    def encode(self, weight_rK: Tensor, parts: tuple[Tensor, ...]) -> None:
        """A block of rows, fp32, bf16 or fp16 on the CPU, each row contiguous, into these rows of each part of the
        format, contiguous; every byte of them is written. What the numbers are counts, not their dtype.

        Raises :class:`NotFiniteWeight` for infinite numbers and NaN.
        """


def row_chunks(weight_rK: Tensor, parts: tuple[Tensor, ...]) -> Iterator[tuple[Tensor, tuple[Tensor, ...], int]]:
    """Some rows of a block after the others, about CHUNK_NUMBERS at a time: the rows, as they are, the same rows of
    each part, and the first one's number. Raises ValueError where the arguments do not fit each other."""
    if weight_rK.ndim != 2 or weight_rK.dtype not in WEIGHT_DTYPES or weight_rK.device.type != "cpu":
        raise ValueError(
            f"the weight is {weight_rK.dtype} {list(weight_rK.shape)} on {weight_rK.device}, expected rows in "
            "fp32, bf16 or fp16 on the CPU"
        )
    rows, columns = weight_rK.shape
    if any(len(part) != rows or not part.is_contiguous() for part in parts):
        raise ValueError(
            f"parts {[list(part.shape) for part in parts]} are not {rows} contiguous rows each, as the weight has"
        )
    at_a_time = max(1, CHUNK_NUMBERS // max(1, columns))
    for first in range(0, rows, at_a_time):
        of_chunk = slice(first, min(first + at_a_time, rows))
        yield weight_rK[of_chunk], tuple(part[of_chunk] for part in parts), first


def row_absmax(rows_rK: Tensor, first_row: int = 0) -> Tensor:
    """The largest size in each row, [r] in the rows' own dtype, without a copy of them. Raises
    :class:`NotFiniteWeight`; ``first_row`` is the number of the first row there."""
    # Two passes: torch's aminmax takes ten times as long as both.
    absmax_r = torch.maximum(rows_rK.amax(1), rows_rK.amin(1).neg_())
    check_finite(absmax_r, rows_rK, first_row)
    return absmax_r


def row_scales(absmax_r: Tensor, scale_r: Tensor, most: float) -> None:
    """The scales of rows, fp32 as their largest sizes, which become ``most`` scales: 0 where all numbers are zero,
    never 0 or too large elsewhere."""
    torch.div(absmax_r, most, out=scale_r)
    # ``most`` times the largest one is finite
    largest = torch.finfo(torch.float32).max * (1 - 2**-23) / most
    scale_r.clamp_(_SMALLEST_SCALE, largest).masked_fill_(absmax_r == 0, 0)


def divisors(scale: Tensor) -> Tensor:
    """What numbers are divided by, a column: the scale, or 1 where there are only zeros."""
    return scale.masked_fill(scale == 0, 1).unsqueeze(-1)


def check_finite(absmax: Tensor, rows_rK: Tensor, first_row: int = 0) -> None:
    """Raises :class:`NotFiniteWeight` where the largest sizes of rows, or of parts of them, are not finite."""
    if absmax.isfinite().all():
        return
    row, column = divmod(int(rows_rK.isfinite().logical_not_().flatten().int().argmax()), rows_rK.shape[1])
    raise NotFiniteWeight(first_row + row, column, rows_rK[row, column].item())
