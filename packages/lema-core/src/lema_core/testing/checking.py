"""A store that trusts nothing: every block handed to compute is held against the file's bytes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import TracebackType

import torch
from torch import Tensor

from lema_core.checkpoint import TensorInfo, read_tensor
from lema_core.device import Device
from lema_core.quantization.block import WeightBlock
from lema_core.store.granules import Part
from lema_core.store.model import StreamedModel, WindowSizes
from lema_core.store.reads import Reads
from lema_core.store.store import Borrow, TensorStore


class CheckingStore(TensorStore):
    """Compares each borrowed row block with its file when it is borrowed and again when it is given back.

    ``tensors``: canonical name -> where the tensor is. ``visits``: the parts borrowed so far, in order. A block that
    differs raises AssertionError naming tensor and rows.
    """

    def __init__(
        self,
        tensors: Mapping[str, TensorInfo],
        model: StreamedModel,
        device: Device,
        sizes: WindowSizes,
        prefetch_distance: int,
        reads: Reads | None = None,
    ) -> None:
        super().__init__(model, device, sizes, prefetch_distance, reads)
        self._expected = {name: tuple(map(read_tensor, tensors[name].stored)) for name in model.layout.parts}
        self.visits: list[Part] = []

    def borrow(self, part: Part) -> CheckedBorrow:
        self.visits.append(part)
        expected = [w[part.start : part.stop] if w.ndim else w for w in self._expected[part.tensor]]
        return CheckedBorrow(super().borrow(part), part, expected)


class CheckedBorrow:
    """One access under way, with what it must hold."""

    def __init__(self, borrow: Borrow, part: Part, expected: Sequence[Tensor]) -> None:
        self._borrow = borrow
        self._part = part
        self._expected = expected

    def tensor(self) -> WeightBlock:
        return self._borrow.tensor()

    def __enter__(self) -> WeightBlock:
        held = self._borrow.__enter__()
        self._check(held, "borrowed")
        return held

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if error is None:
                self._check(self._borrow.tensor(), "given back")
        finally:
            self._borrow.__exit__(kind, error, trace)

    def _check(self, block: WeightBlock, when: str) -> None:
        part, parts = self._part, (block,) if isinstance(block, Tensor) else block.parts
        for held, expected in zip(parts, self._expected, strict=True):
            same = held.cpu().contiguous().view(torch.uint8).equal(expected.contiguous().view(torch.uint8))
            assert same and held.dtype == expected.dtype, (
                f"{part.tensor} rows {part.start}:{part.stop}: not the file's bytes when {when}"
            )
