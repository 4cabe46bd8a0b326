"""Where the bytes of one tensor are."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch


@dataclass(frozen=True)
class Segment:
    """A byte range of one file: ``nbytes`` bytes from ``offset``, counted from the file's first byte."""

    path: Path
    offset: int
    nbytes: int


@dataclass(frozen=True)
class TensorInfo:
    """One tensor of a checkpoint: ``name`` as its file spells it, row-major data in ``segment``."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    segment: Segment
