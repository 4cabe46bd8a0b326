"""What quantizing made of each tensor, and how much of it was lost."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lema_core.checkpoint.describe import shorten

REPORT_FILE = "quantization_report.json"
#: errors above these are worth a word, by the bits of a code: three times what numbers spread like a bell lose
THRESHOLDS = {8: 0.03, 4: 0.3}
#: sums of squares beyond these are taken again in fp64
_SMALLEST, _LARGEST = 1e-20, 1e30


@dataclass(frozen=True)
class TensorReport:
    """One tensor. ``stored``: a wire format or a dtype; ``bits``: of a number's code; ``kept``: why it was not
    quantized, None for one that was.

    ``relative_error``: |decoded - weight| / |weight| over the tensor. ``column_error``: the root mean square of the
    same of each column by itself, which is near 1 where a few large columns took all the codes.
    """

    name: str
    shape: tuple[int, ...]
    stored: str
    bits: int
    nbytes: int
    source_nbytes: int
    backend: str | None = None
    relative_error: float | None = None
    column_error: float | None = None
    kept: str | None = None

    @property
    def error(self) -> float:
        """The larger of the two; 0 for what stays as it is."""
        return max(self.relative_error or 0.0, self.column_error or 0.0)

    @property
    def loses_much(self) -> bool:
        return self.kept is None and self.error > THRESHOLDS.get(self.bits, THRESHOLDS[4])

    @property
    def outcome(self) -> str:
        """Its errors, or why it stays as it is."""
        if self.kept is not None:
            return f"as it is: {self.kept}"
        lost = f"relative error {100 * self.relative_error:.3g} %, by columns {100 * self.column_error:.3g} %"
        return f"{lost}: much" if self.loses_much else lost

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "shape": list(self.shape)}

    @classmethod
    def from_json(cls, found: Mapping[str, Any]) -> TensorReport:
        """The inverse of :meth:`to_json`. Raises KeyError or TypeError for anything else."""
        return cls(**{each.name: found[each.name] for each in fields(cls)} | {"shape": tuple(found["shape"])})


@dataclass(frozen=True)
class QuantizationReport:
    """A quantized checkpoint in ``path``, tensor by tensor in the order of its files. ``made``: False when it was
    there already; ``reused_files``: those that an earlier, interrupted run had finished."""

    path: Path
    bits: int
    format: str
    backend: str
    tensors: tuple[TensorReport, ...]
    made: bool = True
    reused_files: int = 0

    @property
    def quantized(self) -> tuple[TensorReport, ...]:
        return tuple(each for each in self.tensors if each.kept is None)

    @property
    def nbytes(self) -> int:
        return sum(each.nbytes for each in self.tensors)

    @property
    def source_nbytes(self) -> int:
        return sum(each.source_nbytes for each in self.tensors)

    def describe_lossy(self) -> str | None:
        """A line that names the tensors which lost more than weights of their bits usually do, None when none did."""
        lossy = sorted((each for each in self.quantized if each.loses_much), key=lambda each: -each.error)
        if not lossy:
            return None
        named = shorten([f"{each.name} {100 * each.error:.3g} % in {each.stored}" for each in lossy])
        return (
            f"{len(lossy)} tensors lose more than is usual for their bits: {named}; keep them as they are with "
            f"quant_exclude=[{lossy[0].name}], or take more bits"
        )

    def to_json(self) -> dict[str, Any]:
        return {
            "bits": self.bits,
            "format": self.format,
            "backend": self.backend,
            "bytes": self.nbytes,
            "source_bytes": self.source_nbytes,
            "warning": self.describe_lossy(),
            "tensors": [each.to_json() for each in self.tensors],
        }

    @classmethod
    def from_json(cls, path: Path, found: Mapping[str, Any]) -> QuantizationReport:
        """Of a checkpoint that was there. Raises KeyError or TypeError for anything else than :meth:`to_json` gives."""
        tensors = tuple(map(TensorReport.from_json, found["tensors"]))
        return cls(path, found["bits"], found["format"], found["backend"], tensors, made=False)


class ErrorMeter:
    """The relative errors of one tensor, from blocks of its rows; K columns."""

    def __init__(self, columns: int) -> None:
        self._lost_K = torch.zeros(columns, dtype=torch.float64)
        self._whole_K = torch.zeros(columns, dtype=torch.float64)

    def add(self, weight_rK: Tensor, decoded_rK: Tensor) -> None:
        """fp32 blocks; ``decoded`` is overwritten."""
        self._whole_K += _column_squares(weight_rK)
        self._lost_K += _column_squares(decoded_rK.sub_(weight_rK))

    @property
    def relative(self) -> float:
        return _ratio(self._lost_K.sum(), self._whole_K.sum())

    @property
    def by_columns(self) -> float:
        some = self._whole_K > 0
        if not bool(some.any()):
            return self.relative
        return float((self._lost_K[some] / self._whole_K[some]).mean().sqrt())


def _column_squares(values_rK: Tensor) -> Tensor:
    """The sum of the squares in each column, fp64 [K]."""
    sums_K = torch.linalg.vecdot(values_rK, values_rK, dim=0)
    largest = float(sums_K.max()) if len(sums_K) else 0.0
    if not _SMALLEST < largest < _LARGEST:
        wide_rK = values_rK.double()
        return wide_rK.square_().sum(0)
    return sums_K.double()


def _ratio(lost: Tensor, whole: Tensor) -> float:
    return float((lost / whole).sqrt()) if whole > 0 else 0.0
