"""What operations borrow weights from."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Protocol

import torch
from torch import Tensor

from lema_core.quantization.block import WeightBlock
from lema_core.store.granules import Part


class WeightSource(Protocol):
    """What operations borrow weights from: the store, or what stands in for it in a dry run."""

    def parts(self, name: str) -> tuple[Part, ...]:
        """The row blocks of a tensor, in order."""

    def borrow(self, part: Part) -> AbstractContextManager[WeightBlock]:
        """A row block in storage format on the device, valid inside the ``with`` only."""

    def routed(self, parts: Sequence[Part]) -> AbstractContextManager[None]:
        """Inside, exactly these parts of experts are borrowed, in this order: they are fetched ahead of it."""

    def rows(self, name: str, ids: Tensor, dtype: torch.dtype) -> Tensor:
        """Rows of an embedding: int64 ids [N] -> [N, C] as ``dtype`` on the device."""
