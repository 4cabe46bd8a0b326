"""The order in which a step touches granules, recorded before the step runs."""

from __future__ import annotations

from collections.abc import Hashable
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
from torch import Tensor

from lema_core.store.granules import Part
from lema_core.store.model import StreamedModel


@dataclass(frozen=True)
class Work:
    """What is computed from one borrow to the next: ``flops`` of products with ``tokens`` columns, the bytes that other
    operations read and write, and how many ``operations`` these are, products and views included."""

    flops: float
    tokens: int
    touched_bytes: float
    operations: int = 0


@dataclass(frozen=True)
class Trace:
    """Granule indices in the order they are borrowed. ``key``: what the order depends on (mode, micro-batches, head
    chunks).

    ``work[k]``: what follows access k; empty where nobody asked.
    """

    key: Hashable
    accesses: tuple[int, ...]
    work: tuple[Work, ...] = ()


class _Recorded:
    __slots__ = ("_tensor",)

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor

    def __enter__(self) -> Tensor:
        return self._tensor

    def __exit__(self, *exc_info: object) -> None:
        return None


class TraceRecorder:
    """Stands in for the store while a step runs on the meta device, and writes down what is borrowed."""

    def __init__(self, model: StreamedModel) -> None:
        self._model = model
        self._accesses: list[int] = []

    def parts(self, name: str) -> tuple[Part, ...]:
        return self._model.layout.parts[name]

    def borrow(self, part: Part) -> AbstractContextManager[Tensor]:
        self._accesses.append(part.granule)
        return _Recorded(torch.empty(part.shape, dtype=part.dtype, device="meta"))

    def rows(self, name: str, ids: Tensor, dtype: torch.dtype) -> Tensor:
        return torch.empty(ids.numel(), self._model.embeddings[name].shape[1], dtype=dtype, device="meta")

    def trace(self, key: Hashable) -> Trace:
        return Trace(key, tuple(self._accesses))
