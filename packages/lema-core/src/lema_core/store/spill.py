"""A file that memory overflows into: past the page cache, gone from its folder as soon as it is open."""

from __future__ import annotations

import ctypes
import errno
import os
import secrets
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

from torch import Tensor

from lema_core.errors import TransferError
from lema_core.store.granules import whole_sectors

#: one read or write
BOUNCE_BYTES = 4 << 20

#: called with target and source, bytes in any memory; returns when they are copied
Copy = Callable[[Tensor, Tensor], None]


class SpillFile:
    """Byte ranges written once and read once, through ``bounce``: uint8 [BOUNCE_BYTES] of RAM, aligned to a sector.

    A killed program leaves nothing behind: the file has no name. Used by one thread at a time.
    """

    def __init__(self, folder: Path, bounce: Tensor) -> None:
        self.folder = folder
        self._bounce = bounce
        self._memory = memoryview((ctypes.c_char * len(bounce)).from_address(bounce.data_ptr())).cast("B")
        self._used: dict[int, int] = {}
        self._end = 0
        self.bytes_now = 0
        self.peak_bytes = 0
        self.bytes_read = 0
        self.bytes_written = 0
        path = folder / f"lema-{secrets.token_hex(8)}.spill"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._file, self._direct = _create(path)
            path.unlink()
        except OSError as error:
            raise TransferError(f"{folder}: cannot keep activations there: {error.strerror}") from error

    def write(self, data: Tensor, copy: Copy) -> int:
        """Write uint8 ``data``; returns where it is. Raises OSError."""
        offset, nbytes = self._reserve(data.numel()), data.numel()
        try:
            for start, count in _pieces(nbytes):
                copy(self._bounce[:count], data[start : start + count])
                self._write(offset + start, whole_sectors(count))
        except BaseException as error:
            self.free(offset)
            if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                raise OSError(
                    error.errno,
                    f"{error.strerror}: {whole_sectors(nbytes):,} bytes are needed beside {self.bytes_now:,} of "
                    f"activations, {free_bytes(self.folder):,} are free; free some, or give activations more memory",
                ) from error
            raise
        self._drop_cached(offset, nbytes)
        return offset

    def read(self, offset: int, data: Tensor, copy: Copy) -> None:
        """Fill uint8 ``data`` with what was written at ``offset``, and free that. Raises OSError."""
        for start, count in _pieces(data.numel()):
            done, nbytes = 0, whole_sectors(count)
            while done < nbytes:
                got = os.preadv(self._file, [self._memory[done:nbytes]], offset + start + done)
                if not got:
                    raise OSError(errno.EIO, f"the file ends at byte {offset + start + done:,}")
                done += got
            self.bytes_read += nbytes
            copy(data[start : start + count], self._bounce[:count])
        self._drop_cached(offset, data.numel())
        self.free(offset)

    def free(self, offset: int) -> None:
        """What was written at ``offset`` is no longer needed."""
        self.bytes_now -= self._used.pop(offset)
        self._end = max((start + nbytes for start, nbytes in self._used.items()), default=0)

    def free_all(self) -> None:
        self._used.clear()
        self._end = self.bytes_now = 0

    def _reserve(self, nbytes: int) -> int:
        # What is kept is taken in about the reverse order: a gap soon is at the end.
        offset = self._end
        self._used[offset] = whole_sectors(nbytes)
        self._end += whole_sectors(nbytes)
        self.bytes_now += whole_sectors(nbytes)
        self.peak_bytes = max(self.peak_bytes, self.bytes_now)
        return offset

    def _write(self, offset: int, nbytes: int) -> None:
        done = 0
        while done < nbytes:
            done += os.pwrite(self._file, self._memory[done:nbytes], offset + done)
        self.bytes_written += nbytes

    def _drop_cached(self, offset: int, nbytes: int) -> None:
        if not self._direct and hasattr(os, "posix_fadvise"):
            os.fdatasync(self._file)
            os.posix_fadvise(self._file, offset, whole_sectors(nbytes), os.POSIX_FADV_DONTNEED)

    def close(self) -> None:
        self._memory.release()
        os.close(self._file)


def free_bytes(folder: Path) -> int:
    """Of the disk that ``folder`` is, or will be made, on."""
    while not folder.exists():
        folder = folder.parent
    return shutil.disk_usage(folder).free


def _create(path: Path) -> tuple[int, bool]:
    """A descriptor, and whether it bypasses the page cache; some file systems cannot."""
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL
    if hasattr(os, "O_DIRECT"):
        try:
            return os.open(path, flags | os.O_DIRECT, 0o600), True
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            # Some systems make the file before they find that they cannot open it so.
            path.unlink(missing_ok=True)
    return os.open(path, flags, 0o600), False


def _pieces(nbytes: int) -> Iterator[tuple[int, int]]:
    for start in range(0, nbytes, BOUNCE_BYTES):
        yield start, min(BOUNCE_BYTES, nbytes - start)
