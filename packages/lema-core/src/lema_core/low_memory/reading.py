"""Reads bytes of checkpoint files into tensors, past the page cache, with a few MB of memory beside them."""

from __future__ import annotations

from types import TracebackType

import torch
from torch import Tensor

from lema_core.checkpoint import Segment
from lema_core.checkpoint.reading import tensor_bytes
from lema_core.device import map_ram
from lema_core.store.disk import DiskReader
from lema_core.store.granules import SECTOR_BYTES, whole_sectors

#: how much is read at once; a multiple of every element size
_PIECE_BYTES = 4 << 20


class SegmentReader:
    """Fills tensors of any device, dtype and memory format. A context manager that holds the files open."""

    def __init__(self) -> None:
        self._reader = DiskReader()
        self._bounce = map_ram(_PIECE_BYTES + 2 * SECTOR_BYTES)
        self._bytes = tensor_bytes(self._bounce)

    def __enter__(self) -> SegmentReader:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._reader.close()

    def fill(self, target: Tensor, name: str, segment: Segment, stand_in: Tensor) -> None:
        """Give ``target`` the elements of ``segment`` that ``stand_in`` shows of its storage, cast as ``copy_`` does.

        Both in row-major order takes a few MB, otherwise as much again as the elements span. Raises CheckpointError
        naming tensor and file when the file cannot give them.
        """
        if target.numel() == 0:
            return
        first = stand_in.storage_offset()
        if stand_in.is_contiguous() and target.is_contiguous():
            self._fill_rows(target.view(-1), name, segment, first * stand_in.dtype.itemsize, stand_in.dtype)
        else:
            strides = zip(stand_in.shape, stand_in.stride(), strict=True)
            span = torch.empty(1 + sum((n - 1) * step for n, step in strides), dtype=stand_in.dtype, device="cpu")
            self._fill_rows(span, name, segment, first * stand_in.dtype.itemsize, stand_in.dtype)
            target.copy_(span.as_strided(stand_in.shape, stand_in.stride()))

    def _fill_rows(self, target_N: Tensor, name: str, segment: Segment, start: int, dtype: torch.dtype) -> None:
        """Fill [N] ``target_N`` from byte ``start`` of the segment on, where elements are ``dtype``."""
        direct = target_N.dtype == dtype and target_N.device.type == "cpu"
        most = min(len(target_N), _PIECE_BYTES // dtype.itemsize)
        piece_N = target_N if direct else torch.empty(most, dtype=dtype, device="cpu")
        view, total = tensor_bytes(piece_N), len(target_N) * dtype.itemsize
        for done in range(0, total, _PIECE_BYTES):
            count = min(_PIECE_BYTES, total - done)
            at = done if direct else 0
            self._read(view[at : at + count], name, segment, start + done)
            if not direct:
                elements = count // dtype.itemsize
                target_N.narrow(0, done // dtype.itemsize, elements).copy_(piece_N[:elements])

    def _read(self, view: memoryview, name: str, segment: Segment, start: int) -> None:
        offset = segment.offset + start
        skipped = offset % SECTOR_BYTES
        needed = skipped + len(view)
        self._reader.read(segment.path, offset - skipped, self._bytes[: whole_sectors(needed)], needed, (name,))
        view[:] = self._bytes[skipped:needed]
