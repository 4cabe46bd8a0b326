"""Read file ranges into slots, past the page cache where the file system can."""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from math import prod
from pathlib import Path
from threading import Lock

import torch
from torch import Tensor

from lema_core.checkpoint.reading import as_numbers, scales_error
from lema_core.errors import CheckpointError
from lema_core.store.granules import Granule, Part, Piece, Read
from lema_core.store.reads import PythonReads, Range, Reads


class DiskReader:
    """Reads with O_DIRECT; a file system without it is read through the page cache, which is dropped behind the read.

    ``reads`` moves the bytes. ``buffered_files`` names the files read the second way. Safe to use from several threads.
    """

    def __init__(self, reads: Reads | None = None) -> None:
        self._reads = reads or PythonReads()
        self._files: dict[Path, int] = {}
        self._retired: list[int] = []
        self._lock = Lock()
        self.buffered_files: set[Path] = set()
        self.bytes_read = 0
        #: first reads of granules whose scales were looked at
        self._sound: set[Read] = set()

    def read_granule(self, granule: Granule, slot: memoryview) -> None:
        """Fill ``slot`` (at least granule.nbytes, aligned to SECTOR_BYTES). Raises CheckpointError naming tensors and
        file; the first time for scales that are none, too."""
        self.read_all(granule.reads, slot, granule.names)
        if granule.quantized and granule.reads[0] not in self._sound:
            for part in granule.quantized:
                _check_scales(part, granule, slot)
            self._sound.add(granule.reads[0])

    def read(self, path: Path, offset: int, target: memoryview, needed_bytes: int, names: tuple[str, ...]) -> int:
        """Fill ``target`` from ``offset`` on; at least ``needed_bytes`` must be there, the rest may lie past the file's
        end. Returns the bytes that were read."""
        return self.read_all([Read(path, offset, len(target), needed_bytes, 0)], target, names)

    def read_all(self, wanted: Sequence[Read], slot: memoryview, names: tuple[str, ...]) -> int:
        """Fill ``slot`` at the places that the reads say, several at a time where the kernel does so. Returns the bytes
        that were read. Raises CheckpointError as :meth:`read_granule` does."""
        total = 0
        while wanted:
            ranges = [self._range(read, slot) for read in wanted]
            self._reads.read(ranges)
            complete = next((i for i, each in enumerate(ranges) if not each.complete), len(ranges))
            done = sum(each.done_bytes for each in ranges[:complete])
            total += done
            with self._lock:
                self.bytes_read += done
            wanted = wanted[complete:]
            if wanted:
                failed = ranges[complete]
                if failed.error != errno.EINVAL or not failed.direct:
                    raise _failure(wanted[0], failed, names)
                self._reopen_buffered(wanted[0].path)
        return total

    def _range(self, read: Read, slot: memoryview) -> Range:
        target = slot[read.slot_offset : read.slot_offset + read.nbytes]
        file, direct = self._open(read.path)
        return Range(file, read.file_offset, target, read.needed_bytes, direct)

    def adopt(self, path: Path, file: int, direct: bool) -> None:
        """Read what goes by the name ``path`` from this descriptor, a duplicate of which is kept."""
        with self._lock:
            self._files[path] = os.dup(file)
            if not direct:
                self.buffered_files.add(path)

    def _open(self, path: Path) -> tuple[int, bool]:
        """The descriptor of a file, and whether it bypasses the page cache."""
        with self._lock:
            if path not in self._files:
                direct = getattr(os, "O_DIRECT", 0)
                try:
                    file = os.open(path, os.O_RDONLY | direct)
                except OSError as error:
                    if error.errno != errno.EINVAL:
                        raise _cannot_open(path, error) from error
                    file, direct = _open_buffered(path), 0
                self._files[path] = file
                if not direct:
                    self.buffered_files.add(path)
            return self._files[path], path not in self.buffered_files

    def _reopen_buffered(self, path: Path) -> None:
        with self._lock:
            if path not in self.buffered_files:
                file = _open_buffered(path)
                # Another thread may be reading from the first descriptor.
                self._retired.append(self._files[path])
                self._files[path] = file
                self.buffered_files.add(path)

    def close(self) -> None:
        with self._lock:
            while self._files:
                os.close(self._files.popitem()[1])
            while self._retired:
                os.close(self._retired.pop())


def _check_scales(part: Part, granule: Granule, slot: memoryview) -> None:
    scales = part.pieces[1:]
    wrong = part.format.wrong_scales(_view(piece, slot) for piece in scales)
    if wrong is not None:
        at = scales[0].offset
        (path,) = (r.path for r in granule.reads if r.slot_offset <= at < r.slot_offset + r.nbytes)
        raise scales_error(path, part.tensor, part.format, wrong)


def _view(piece: Piece, slot: memoryview) -> Tensor:
    nbytes = prod(piece.shape) * piece.dtype.itemsize
    lying = torch.frombuffer(slot, dtype=torch.uint8)[piece.offset : piece.offset + nbytes]
    return as_numbers(lying, piece.dtype, piece.shape)


def _open_buffered(path: Path) -> int:
    try:
        return os.open(path, os.O_RDONLY)
    except OSError as error:
        raise _cannot_open(path, error) from error


def _cannot_open(path: Path, error: OSError) -> CheckpointError:
    return CheckpointError(f"{path}: cannot open: {error.strerror}")


def _failure(read: Read, done: Range, names: tuple[str, ...]) -> CheckpointError:
    reached = read.file_offset + done.done_bytes
    if done.error:
        return CheckpointError(f"{read.path}: cannot read {shown(names)} at byte {reached}: {os.strerror(done.error)}")
    return CheckpointError(
        f"{read.path}: cut while in use: {shown(names)} needs bytes up to {read.file_offset + read.needed_bytes}, "
        f"the file ends at {reached}; download it again"
    )


def shown(names: tuple[str, ...]) -> str:
    """``model.norm.weight and 3 more``, for one-line errors."""
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"
