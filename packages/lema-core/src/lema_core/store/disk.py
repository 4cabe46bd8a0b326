"""Read file ranges into slots, past the page cache where the file system can."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from threading import Lock

from lema_core.errors import CheckpointError
from lema_core.store.granules import SECTOR_BYTES, Granule

_REQUEST_BYTES = 8 << 20


class DiskReader:
    """Reads with O_DIRECT; a file system without it is read through the page cache, which is dropped behind the read.

    ``buffered_files`` names the files read the second way. Safe to use from several threads.
    """

    def __init__(self) -> None:
        self._files: dict[Path, int] = {}
        self._retired: list[int] = []
        self._lock = Lock()
        self.buffered_files: set[Path] = set()
        self.bytes_read = 0

    def read_granule(self, granule: Granule, slot: memoryview) -> None:
        """Fill ``slot`` (at least granule.nbytes, aligned to SECTOR_BYTES). Raises CheckpointError naming tensors and
        file."""
        for read in granule.reads:
            target = slot[read.slot_offset : read.slot_offset + read.nbytes]
            self.read(read.path, read.file_offset, target, read.needed_bytes, granule.names)

    def read(self, path: Path, offset: int, target: memoryview, needed_bytes: int, names: tuple[str, ...]) -> None:
        """Fill ``target`` from ``offset`` on; at least ``needed_bytes`` must be there, the rest may lie past the file's
        end."""
        file = self._open(path)
        done = 0
        while done < needed_bytes:
            try:
                count = os.preadv(file, [target[done : done + _REQUEST_BYTES]], offset + done)
            except OSError as error:
                if error.errno == errno.EINVAL and path not in self.buffered_files:
                    file = self._reopen_buffered(path)
                    continue
                raise CheckpointError(
                    f"{path}: cannot read {shown(names)} at byte {offset + done}: {error.strerror}"
                ) from error
            done += count
            at_end = count == 0 or (count % SECTOR_BYTES and path not in self.buffered_files)
            if at_end and done < needed_bytes:
                raise CheckpointError(
                    f"{path}: cut while in use: {shown(names)} needs bytes up to {offset + needed_bytes}, "
                    f"the file ends at {offset + done}; download it again"
                )
        if path in self.buffered_files and hasattr(os, "posix_fadvise"):
            os.posix_fadvise(file, offset, len(target), os.POSIX_FADV_DONTNEED)
        with self._lock:
            self.bytes_read += done

    def _open(self, path: Path) -> int:
        with self._lock:
            if path not in self._files:
                try:
                    self._files[path] = os.open(path, os.O_RDONLY | getattr(os, "O_DIRECT", 0))
                except OSError as error:
                    if error.errno != errno.EINVAL:
                        raise CheckpointError(f"{path}: cannot open: {error.strerror}") from error
                    self._files[path] = os.open(path, os.O_RDONLY)
                    self.buffered_files.add(path)
                if not hasattr(os, "O_DIRECT"):
                    self.buffered_files.add(path)
            return self._files[path]

    def _reopen_buffered(self, path: Path) -> int:
        with self._lock:
            if path not in self.buffered_files:
                # Another thread may be reading from the first descriptor.
                self._retired.append(self._files[path])
                self._files[path] = os.open(path, os.O_RDONLY)
                self.buffered_files.add(path)
            return self._files[path]

    def close(self) -> None:
        with self._lock:
            while self._files:
                os.close(self._files.popitem()[1])
            while self._retired:
                os.close(self._retired.pop())


def shown(names: tuple[str, ...]) -> str:
    """``model.norm.weight and 3 more``, for one-line errors."""
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"
