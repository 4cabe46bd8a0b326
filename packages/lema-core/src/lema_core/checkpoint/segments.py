"""Where the bytes of one tensor are."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod
from pathlib import Path

import torch

from lema_core.quantization.formats import WireFormat


@dataclass(frozen=True)
class Segment:
    """A byte range of one file: ``nbytes`` bytes from ``offset``, counted from the file's first byte."""

    path: Path
    offset: int
    nbytes: int


@dataclass(frozen=True)
class Quantized:
    """How a weight is stored in fewer bits: its ``parts`` in the order of ``format``, the payload first."""

    format: WireFormat
    parts: tuple[TensorInfo, ...]


@dataclass(frozen=True)
class TensorInfo:
    """One tensor of a checkpoint: ``name`` as its file spells it, row-major data in ``segment``.

    Of a ``quantized`` one ``shape`` and ``dtype`` are those of the numbers that it stands for, and ``segment`` is its
    payload's.
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    segment: Segment
    quantized: Quantized | None = None

    @property
    def stored(self) -> tuple[TensorInfo, ...]:
        """The tensors that its files have of it: itself, or payload and scales."""
        return (self,) if self.quantized is None else self.quantized.parts

    @property
    def nbytes(self) -> int:
        """As it is stored."""
        return sum(prod(each.shape) * each.dtype.itemsize for each in self.stored)

    @property
    def storage(self) -> str:
        """What it is stored as, in a word: ``int4-32``, ``bfloat16``."""
        return str(self.dtype).removeprefix("torch.") if self.quantized is None else self.quantized.format.name

    def rows(self, name: str, start: int, stop: int) -> TensorInfo:
        """Rows ``start:stop`` as a tensor of its own, called ``name``, quantized or not: what adapters whose files
        join several weights cut them apart with."""
        row_bytes = prod(self.shape[1:]) * self.dtype.itemsize
        first = self.segment.offset + start * row_bytes
        quantized, segment = None, Segment(self.segment.path, first, (stop - start) * row_bytes)
        if self.quantized is not None:
            parts = tuple(part.rows(part.name, start, stop) for part in self.quantized.parts)
            quantized, segment = Quantized(self.quantized.format, parts), parts[0].segment
        shape = (stop - start, *self.shape[1:])
        return replace(self, name=name, shape=shape, segment=segment, quantized=quantized)
