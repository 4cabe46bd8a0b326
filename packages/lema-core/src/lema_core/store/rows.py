"""Rows of an embedding: demand accesses, fetched as soon as the token ids are known, in a region of their own."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lema_core.checkpoint.reading import as_numbers, scales_error, tensor_bytes
from lema_core.device import map_ram
from lema_core.errors import DataError
from lema_core.ops.widen import TorchWiden, Widen
from lema_core.store.disk import DiskReader
from lema_core.store.granules import SECTOR_BYTES, Read, whole_sectors

if TYPE_CHECKING:
    from lema_core.checkpoint.segments import TensorInfo

_BOUNCE_BYTES = 1 << 20


def bounce_bytes(info: TensorInfo) -> int:
    """Sector-aligned bytes that rows of [V, C] ``info`` are read into: one row at least, the whole tensor at most."""
    wanted = max(_row_bytes(info), min(_BOUNCE_BYTES, info.nbytes))
    return whole_sectors(wanted) + 2 * SECTOR_BYTES * len(info.stored)


class RowCache:
    """The rows used most recently of one [V, C] tensor, in storage format; quantized ones are decoded row by row.

    ``n_rows`` is the region's capacity; ``bounce``: uint8, at least :func:`bounce_bytes`, aligned to SECTOR_BYTES, and
    possibly shared. ``widen`` is the kernel that gives fp32 rows.
    """

    def __init__(
        self, info: TensorInfo, reader: DiskReader, n_rows: int, bounce: Tensor, widen: Widen | None = None
    ) -> None:
        self._info = info
        self._reader = reader
        self._widen = widen or TorchWiden()
        self._row_bytes = _row_bytes(info)
        self.n_rows = min(n_rows, info.shape[0])
        #: of each tensor that the files have of it
        self._rows = [self._region(part) for part in info.stored]
        self._bounce = bounce
        self._bounce_memory = tensor_bytes(bounce)
        self._slots: OrderedDict[int, int] = OrderedDict()
        self._free = list(range(self.n_rows))
        self._ever_filled = 0
        self.bytes_read = 0

    def _region(self, part: TensorInfo) -> Tensor:
        nbytes = self.n_rows * _row_bytes(part)
        return map_ram(nbytes)[:nbytes].view(part.dtype).view(self.n_rows, *part.shape[1:])

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
            at = torch.tensor([self._slots[row] for row in wanted], dtype=torch.int64)
            found = tuple(region[at] for region in self._rows)
            if self._info.quantized is not None:
                numbers = target if dtype == torch.float32 else torch.empty(target.shape)
                self._info.quantized.format.decode(found, numbers)
                if numbers is not target:
                    target.copy_(numbers)
            elif dtype == torch.float32 and found[0].dtype in (torch.float16, torch.bfloat16):
                self._widen(found[0], target)
            else:
                target.copy_(found[0])
        return out

    def forget(self) -> None:
        """The table has changed: no row is kept."""
        self._slots.clear()
        self._free = list(range(self.n_rows))

    def free(self) -> None:
        """Give the region's memory back."""
        self._rows = [region[:0].clone() for region in self._rows]
        self._slots.clear()

    def _fetch(self, rows: list[int]) -> None:
        missing = []
        for row in rows:
            if row in self._slots:
                self._slots.move_to_end(row)
            else:
                missing.append(row)
        batch: list[range] = []
        room = len(self._bounce)
        for span in self._spans(missing):
            nbytes = self._span_bytes(len(span))
            if batch and nbytes > room:
                self._read(batch)
                batch, room = [], len(self._bounce)
            batch.append(span)
            room -= nbytes
        if batch:
            self._read(batch)

    def _spans(self, rows: list[int]) -> Iterator[range]:
        """Neighbours among rows in rising order, as many as the bounce area holds."""
        start = 0
        for stop in range(1, len(rows) + 1):
            count = stop - start
            ends = stop == len(rows) or rows[stop] != rows[stop - 1] + 1
            if ends or self._span_bytes(count + 1) > len(self._bounce):
                yield range(rows[start], rows[start] + count)
                start = stop

    def _span_bytes(self, count: int) -> int:
        """At most, of the sectors that so many neighbours lie in."""
        return sum(whole_sectors(count * _row_bytes(part)) + SECTOR_BYTES for part in self._info.stored)

    def _read(self, spans: Sequence[range]) -> None:
        """Read rows through the aligned bounce area, all at once. Raises CheckpointError, for scales that are none
        too."""
        rows = [row for span in spans for row in span]
        slots = [self._free.pop() if self._free else self._slots.popitem(last=False)[1] for _ in rows]
        at = torch.tensor(slots)
        try:
            reads = self._reads(spans)
            self.bytes_read += self._reader.read_all(reads, self._bounce_memory, (self._info.name,))
            read = iter(reads)
            for part, region in zip(self._info.stored, self._rows, strict=True):
                region[at] = torch.cat([self._found(part, span, next(read)) for span in spans])
            if self._info.quantized is not None:
                form = self._info.quantized.format
                if (wrong := form.wrong_scales(region[at] for region in self._rows[1:])) is not None:
                    raise scales_error(self._info.segment.path, self._info.name, form, wrong)
        except BaseException:
            self._free += slots
            raise
        self._slots.update(zip(rows, slots, strict=True))
        self._ever_filled = max(self._ever_filled, len(self._slots))

    def _reads(self, spans: Sequence[range]) -> list[Read]:
        """Of each part, where each span lies; a row starts anywhere in the file."""
        reads, end = [], 0
        for part in self._info.stored:
            for span in spans:
                first = part.segment.offset + span.start * _row_bytes(part)
                low = first - first % SECTOR_BYTES
                needed = first + len(span) * _row_bytes(part) - low
                reads.append(Read(part.segment.path, low, whole_sectors(needed), needed, end))
                end += whole_sectors(needed)
        return reads

    def _found(self, part: TensorInfo, span: range, read: Read) -> Tensor:
        stop = read.slot_offset + read.needed_bytes
        found = self._bounce[stop - len(span) * _row_bytes(part) : stop]
        return as_numbers(found, part.dtype, (len(span), *part.shape[1:]))


def _row_bytes(part: TensorInfo) -> int:
    return part.nbytes // part.shape[0]
