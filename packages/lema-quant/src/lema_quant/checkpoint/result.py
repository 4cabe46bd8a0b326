"""A quantized checkpoint that is there, and the file in it that says what became of each tensor."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from lema_core.quantization.report import QuantizationReport, TensorReport

REPORT_FILE = "quantization_report.json"


@dataclass(frozen=True)
class QuantizedCheckpoint:
    """``path`` holds a model in ``format``, by ``backend``; ``report``: tensor by tensor in the order of its files.
    ``made``: False when it was there already; ``reused_files``: those that an earlier, interrupted run had finished."""

    path: Path
    bits: int
    format: str
    backend: str
    #: hash of all that decides its bytes
    identity: str
    report: QuantizationReport
    made: bool = True
    reused_files: int = 0

    def to_json(self) -> dict[str, Any]:
        """What :data:`REPORT_FILE` says of it."""
        own = {"identity": self.identity, "bits": self.bits, "format": self.format, "backend": self.backend}
        return {**own, **self.report.to_json()}

    @classmethod
    def from_json(cls, path: Path, found: Mapping[str, Any]) -> QuantizedCheckpoint:
        """Of a checkpoint that was there. Raises KeyError or TypeError for anything else than :meth:`to_json` gives."""
        report = QuantizationReport.of(map(tensor_from_json, found["tensors"]))
        return cls(path, *(found[name] for name in ("bits", "format", "backend", "identity")), report, made=False)


def read_quantized(folder: Path) -> QuantizedCheckpoint | None:
    """The checkpoint in ``folder`` by its report; None where there is none, or its files are not as they were left."""
    try:
        found = json.loads((folder / REPORT_FILE).read_text(encoding="utf-8"))
        sizes = {name: (folder / name).stat().st_size for name in found["files"]}
        return QuantizedCheckpoint.from_json(folder, found) if sizes == found["files"] else None
    except (OSError, ValueError, KeyError, TypeError):
        return None  # none, or another's: it is made anew


def tensor_to_json(tensor: TensorReport) -> dict[str, Any]:
    return asdict(tensor)


def tensor_from_json(found: Mapping[str, Any]) -> TensorReport:
    """The inverse of :func:`tensor_to_json`. Raises KeyError or TypeError for anything else."""
    return TensorReport(
        **{each.name: found[each.name] for each in fields(TensorReport)} | {"shape": tuple(found["shape"])}
    )
