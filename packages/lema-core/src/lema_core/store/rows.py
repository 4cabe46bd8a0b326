"""Rows of an embedding: demand accesses, fetched as soon as the token ids are known, in a region of their own."""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lema_core.checkpoint.reading import tensor_bytes
from lema_core.device import map_ram
from lema_core.errors import DataError
from lema_core.ops.widen import TorchWiden, Widen
from lema_core.store.disk import DiskReader
from lema_core.store.granules import SECTOR_BYTES, whole_sectors

if TYPE_CHECKING:
    from lema_core.checkpoint.segments import TensorInfo

_BOUNCE_BYTES = 1 << 20


def bounce_bytes(info: TensorInfo) -> int:
    """Sector-aligned bytes that rows of [V, C] ``info`` are read into: one row at least, the whole tensor at most."""
    row_bytes = info.shape[1] * info.dtype.itemsize
    wanted = max(row_bytes, min(_BOUNCE_BYTES, info.shape[0] * row_bytes))
    return whole_sectors(wanted) + 2 * SECTOR_BYTES


class RowCache:
    """The rows used most recently of one [V, C] tensor, in storage format.

    ``n_rows`` is the region's capacity; ``bounce``: uint8, at least :func:`bounce_bytes`, aligned to SECTOR_BYTES, and
    possibly shared. ``widen`` is the kernel that gives fp32 rows.
    """

    def __init__(
        self, info: TensorInfo, reader: DiskReader, n_rows: int, bounce: Tensor, widen: Widen | None = None
    ) -> None:
        self._info = info
        self._reader = reader
        self._widen = widen or TorchWiden()
        self._row_bytes = info.shape[1] * info.dtype.itemsize
        self.n_rows = min(n_rows, info.shape[0])
        self._rows = map_ram(self.n_rows * self._row_bytes)[: self.n_rows * self._row_bytes]
        self._rows = self._rows.view(info.dtype).view(self.n_rows, info.shape[1])
        self._bounce = bounce
        self._bounce_memory = tensor_bytes(bounce)
        self._slots: OrderedDict[int, int] = OrderedDict()
        self._ever_filled = 0
        self.bytes_read = 0

    @property
    def bytes_now(self) -> int:
        return len(self._slots) * self._row_bytes

    @property
    def peak_bytes(self) -> int:
        return self._ever_filled * self._row_bytes

    def gather(self, ids: Tensor, dtype: torch.dtype) -> Tensor:
        """int64 ids [N] -> rows [N, C] as ``dtype``, on the CPU. Raises DataError for an id outside 0 .. V-1."""
        # Behind the table's end lie the bytes of another tensor, which would be read without a complaint.
        outside = (ids < 0) | (ids >= self._info.shape[0])
        if outside.any():
            raise DataError(
                f"{self._info.name}: row {ids[outside][0].item()} is asked for, there are {self._info.shape[0]} rows"
            )
        out = torch.empty(ids.numel(), self._info.shape[1], dtype=dtype)
        # A set of rows wider than the region goes through it piece by piece.
        for piece, target in zip(ids.split(self.n_rows), out.split(self.n_rows), strict=True):
            wanted = piece.tolist()
            self._fetch(sorted(set(wanted)))
            found = self._rows[torch.tensor([self._slots[row] for row in wanted], dtype=torch.int64)]
            if dtype == torch.float32 and found.dtype in (torch.float16, torch.bfloat16):
                self._widen(found, target)
            else:
                target.copy_(found)
        return out

    def forget(self) -> None:
        """The table has changed: no row is kept."""
        self._slots.clear()

    def free(self) -> None:
        """Give the region's memory back."""
        self._rows = self._rows[:0].clone()
        self._slots.clear()

    def _fetch(self, rows: list[int]) -> None:
        missing = []
        for row in rows:
            if row in self._slots:
                self._slots.move_to_end(row)
            else:
                missing.append(row)
        start = 0
        while start < len(missing):
            stop = start + 1
            while stop < len(missing) and missing[stop] == missing[stop - 1] + 1 and self._span_fits(stop + 1 - start):
                stop += 1
            self._read(missing[start:stop])
            start = stop

    def _span_fits(self, count: int) -> bool:
        return count * self._row_bytes + 2 * SECTOR_BYTES <= len(self._bounce)

    def _read(self, rows: list[int]) -> None:
        """Read neighbouring rows through the aligned bounce area; a row starts anywhere in the file."""
        first = self._info.segment.offset + rows[0] * self._row_bytes
        last = first + len(rows) * self._row_bytes
        low = first - first % SECTOR_BYTES
        span = whole_sectors(last - low)
        target, names = self._bounce_memory[:span], (self._info.name,)
        self.bytes_read += self._reader.read(self._info.segment.path, low, target, last - low, names)
        found = self._bounce[first - low : last - low]
        if found.storage_offset() % self._info.dtype.itemsize:
            found = found.clone()
        found = found.view(self._info.dtype).view(len(rows), -1)
        for i, row in enumerate(rows):
            if len(self._slots) < self.n_rows:
                slot = len(self._slots)
                self._ever_filled = max(self._ever_filled, slot + 1)
            else:
                slot = self._slots.popitem(last=False)[1]
            self._rows[slot] = found[i]
            self._slots[row] = slot
