"""A block of rows of a quantized weight, as products borrow it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lema_core.quantization.formats import WireFormat


@dataclass(frozen=True)
class QuantizedBlock:
    """Rows of a weight in ``format``; ``parts`` are views of the slot that it was borrowed from, contiguous.

    ``shape``: [r, K] of the numbers that it stands for.
    """

    format: WireFormat
    shape: tuple[int, int]
    parts: tuple[Tensor, ...]

    @property
    def device(self) -> torch.device:
        return self.parts[0].device

    def decode(self, out_rK: Tensor, start: int = 0) -> None:
        """Rows ``start`` and on, as many as fp32 ``out`` has."""
        stop = start + len(out_rK)
        self.format.decode(tuple(part[start:stop] for part in self.parts), out_rK)


#: what products are given: a block in a storage dtype, or quantized
WeightBlock = Tensor | QuantizedBlock
