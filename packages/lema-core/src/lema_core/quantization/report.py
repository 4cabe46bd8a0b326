"""What quantizing cost, tensor by tensor: bits, bytes, and how far the numbers went.

Shapes: r rows of a block, K columns.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from math import prod

import torch
from torch import Tensor

from lema_core.ops.quantize import native_quantize
from lema_core.quantization.codec import row_chunks
from lema_core.quantization.formats import WireFormat

#: above it a warning: normally distributed numbers come back from 4 bits with 0.08 to 0.1
MOST_ERROR = 0.2
#: above it a warning: a column that others of its groups push out has 0.4 and more, up to 1
MOST_COLUMN_ERROR = 0.4
#: sums of squares that fp32 gives well, columns that are a billion times smaller than the largest one among them
_SMALLEST, _LARGEST = 1e-15, 1e30


class ErrorMeter:
    """Adds up, block by block, how far a weight's numbers are from what its codes stand for, to some six digits."""

    def __init__(self, columns: int) -> None:
        self._squares_K = torch.zeros(columns, dtype=torch.float64)
        self._errors_K = torch.zeros(columns, dtype=torch.float64)
        self._kernel = native_quantize()

    def add(self, format: WireFormat, weight_rK: Tensor, parts: tuple[Tensor, ...]) -> None:
        """A block of rows and its parts in ``format``, on the CPU."""
        if self._kernel is not None and format.name in self._kernel.formats and weight_rK.is_contiguous():
            self._kernel.add_errors(format.name, weight_rK, parts, self._squares_K, self._errors_K)
            return
        for rows_rK, parts_of_rows, _ in row_chunks(weight_rK, parts):
            decoded_rK = torch.empty(rows_rK.shape)
            format.decode(parts_of_rows, decoded_rK)
            exact_rK = rows_rK.float()
            self._squares_K += _column_squares(exact_rK)
            self._errors_K += _column_squares(decoded_rK.sub_(exact_rK))

    def include(self, other: ErrorMeter) -> None:
        """What another meter saw of the same weight's other rows."""
        self._squares_K += other._squares_K
        self._errors_K += other._errors_K

    @property
    def error(self) -> float:
        """||W - W^|| / ||W||, Frobenius norms."""
        return _root_of_ratio(self._errors_K.sum().item(), self._squares_K.sum().item())

    def worst_column(self) -> tuple[int, float]:
        """The column with the largest relative error, and that error: the norm of its differences over its own norm or,
        where that is smaller, over that of the median column.

        A few large columns make the error of the whole look small, whatever becomes of the others: here it is seen. A
        column of numbers so small that nobody misses them is not.
        """
        usual = self._squares_K.median()
        errors_K = self._errors_K / self._squares_K.clamp(min=max(usual.item(), torch.finfo(torch.float64).tiny))
        worst = int(errors_K.argmax())
        return worst, errors_K[worst].sqrt().item()


@dataclass(frozen=True)
class TensorReport:
    """One tensor. ``shape`` is the logical one; bytes are those of all parts, before and after. ``format`` None: it
    stays as it is, and ``reason`` says why; errors are then None too."""

    name: str
    shape: tuple[int, ...]
    bytes_before: int
    bytes_after: int
    format: str | None = None
    backend: str | None = None
    error: float | None = None
    worst_column: int | None = None
    worst_column_error: float | None = None
    reason: str | None = None

    @classmethod
    def quantized(
        cls, name: str, shape: tuple[int, int], bytes_before: int, format: WireFormat, backend: str, meter: ErrorMeter
    ) -> TensorReport:
        """Of a weight that was encoded, with what ``meter`` saw."""
        column, column_error = meter.worst_column()
        bytes_after = format.nbytes(shape)
        return cls(name, shape, bytes_before, bytes_after, format.name, backend, meter.error, column, column_error)

    @property
    def bits(self) -> float:
        """Of a number, scales counted."""
        return 8 * self.bytes_after / max(1, prod(self.shape))

    @property
    def warning(self) -> str | None:
        """One line where more was lost than a model may bear."""
        if self.error is None or self.worst_column_error is None:
            return None
        if self.error > MOST_ERROR:
            return f"{self.name}: {self.format} changes it by {self.error:.1%}, relative by norm"
        if self.worst_column_error > MOST_COLUMN_ERROR:
            return (
                f"{self.name}: {self.format} changes column {self.worst_column} by {self.worst_column_error:.0%}, the "
                f"whole by {self.error:.1%}: some of its columns are much larger than those beside them; smaller "
                "groups or more bits lose less"
            )
        return None

    def __str__(self) -> str:
        size = f"{'x'.join(map(str, self.shape))}, {self.bytes_before} -> {self.bytes_after} bytes"
        if self.format is None:
            return f"{self.name}: {size}: {self.bits:.2f} bits, stays as it is: {self.reason}"
        return (
            f"{self.name}: {size}: {self.bits:.2f} bits, {self.format} by {self.backend}, error {self.error:.4f}, "
            f"at worst {self.worst_column_error:.4f} in column {self.worst_column}"
        )


@dataclass(frozen=True)
class QuantizationReport:
    """All tensors of a model, in order."""

    tensors: tuple[TensorReport, ...]

    @classmethod
    def of(cls, tensors: Iterable[TensorReport]) -> QuantizationReport:
        return cls(tuple(tensors))

    @property
    def bytes_before(self) -> int:
        return sum(each.bytes_before for each in self.tensors)

    @property
    def bytes_after(self) -> int:
        return sum(each.bytes_after for each in self.tensors)

    @property
    def warnings(self) -> list[str]:
        return [line for each in self.tensors if (line := each.warning) is not None]

    def to_json(self) -> dict[str, object]:
        """For a file beside the weights."""
        return {
            "bytes_before": self.bytes_before,
            "bytes_after": self.bytes_after,
            "warnings": self.warnings,
            "tensors": [{**asdict(each), "bits": each.bits} for each in self.tensors],
        }


def _column_squares(numbers_rK: Tensor) -> Tensor:
    """The sum of the squares of each column of some rows, in fp64."""
    sums_K = torch.linalg.vecdot(numbers_rK, numbers_rK, dim=0)
    # squares of tiny and of huge numbers need fp64 themselves
    return sums_K.double() if _SMALLEST < sums_K.max().item() < _LARGEST else numbers_rK.double().square_().sum(0)


def _root_of_ratio(above: float, below: float) -> float:
    if above == 0:
        return 0.0
    return (above / below) ** 0.5 if below else float("inf")
