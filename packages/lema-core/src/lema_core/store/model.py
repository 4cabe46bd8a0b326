"""A model as the store sees it: granules, rows of embeddings, and how many slots a budget gives."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from lema_core.errors import BudgetError
from lema_core.store.granules import MAX_GRANULE_BYTES, GranuleLayout, StreamedTensor, lay_out
from lema_core.store.rows import bounce_bytes

if TYPE_CHECKING:
    from lema_core.adapter import ModelAdapter
    from lema_core.checkpoint.segments import TensorInfo

#: the fewest rows of an embedding that its region holds
_MIN_ROWS = 16
_ROWS_BYTES = 4_000_000


@dataclass(frozen=True)
class WindowSizes:
    """Slots per tier and the rows region, decided before the first byte moves. ``device_slots`` is 0 where RAM is the
    device's."""

    ram_slots: int
    device_slots: int
    n_rows: int


@dataclass(frozen=True)
class StreamedModel:
    """A model's tensors bound to their files, cut into granules. ``embeddings``: read by rows. ``transposed_modules``:
    linears whose weight lies as [in, out]."""

    layout: GranuleLayout
    embeddings: Mapping[str, TensorInfo]
    transposed_modules: frozenset[str] = frozenset()

    @property
    def matrix_dtype(self) -> torch.dtype:
        """What the products' weights are stored as; norms and biases may differ."""
        return next(parts[0].dtype for parts in self.layout.parts.values() if len(parts[0].shape) == 2)

    @property
    def biased_modules(self) -> frozenset[str]:
        """Modules whose linear adds a bias."""
        return frozenset(name.removesuffix(".bias") for name in self.layout.parts if name.endswith(".bias"))

    @property
    def row_bytes(self) -> int:
        return sum(info.shape[1] * info.dtype.itemsize for info in self.embeddings.values())

    def default_rows(self) -> int:
        """Rows of the region when nothing presses; follows from the model alone."""
        most = max((info.shape[0] for info in self.embeddings.values()), default=0)
        return min(most, max(_MIN_ROWS, _ROWS_BYTES // max(1, self.row_bytes)))

    @property
    def bounce_bytes(self) -> int:
        """What rows are read into on their way to the region."""
        return max(map(bounce_bytes, self.embeddings.values()), default=0)

    @property
    def smallest_bytes(self) -> int:
        """The least a window can be: one granule and a few rows."""
        return self.layout.slot_bytes + min(_MIN_ROWS, self.default_rows()) * self.row_bytes + self.bounce_bytes

    @property
    def total_bytes(self) -> int:
        """A window that holds everything."""
        return self.layout.total_bytes + self.default_rows() * self.row_bytes + self.bounce_bytes

    def sizes(self, ram_bytes: int | None, device_bytes: int | None, device_shares_ram: bool) -> WindowSizes:
        """Slots for budgets in bytes (None: everything). Raises BudgetError when not even one granule fits."""
        n = len(self.layout.granules)
        slot_bytes = self.layout.slot_bytes
        rows = self.default_rows()
        if ram_bytes is not None:
            if ram_bytes < self.smallest_bytes:
                raise BudgetError(
                    f"weights_ram gives {ram_bytes:,} bytes; the smallest window needs {self.smallest_bytes:,} "
                    f"(one granule of {slot_bytes:,} and a few embedding rows); raise weights_ram"
                )
            ram_bytes -= self.bounce_bytes
            beside = max(ram_bytes // 8, ram_bytes - n * slot_bytes)
            rows = max(min(_MIN_ROWS, rows), min(rows, min(beside, ram_bytes - slot_bytes) // max(1, self.row_bytes)))
        ram_slots = n if ram_bytes is None else min(n, (ram_bytes - rows * self.row_bytes) // slot_bytes)
        if device_shares_ram:
            return WindowSizes(ram_slots, 0, rows)
        if device_bytes is not None and device_bytes < slot_bytes:
            raise BudgetError(
                f"weights_vram gives {device_bytes:,} bytes; the smallest window needs {slot_bytes:,} (one granule); "
                "raise weights_vram"
            )
        device_slots = n if device_bytes is None else min(n, device_bytes // slot_bytes)
        return WindowSizes(ram_slots, device_slots, rows)


def cut_model(
    adapter: ModelAdapter, tensors: Mapping[str, TensorInfo], max_granule_bytes: int = MAX_GRANULE_BYTES
) -> StreamedModel:
    """Cut the bound ``tensors`` of ``adapter``. An embedding is read by rows, and as granules too where a tied head
    uses it."""
    streamed: list[StreamedTensor] = []
    embeddings: dict[str, TensorInfo] = {}
    for spec in adapter.tensors():
        if spec.role == "embedding":
            embeddings[spec.name] = tensors[spec.name]
        else:
            streamed.append(StreamedTensor(spec.name, tensors[spec.name], spec.layer))
    transposed = frozenset(spec.module for spec in adapter.tensors() if spec.transposed)
    return StreamedModel(lay_out(streamed, max_granule_bytes), embeddings, transposed)
