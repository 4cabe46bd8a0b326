"""A file that memory overflows into: past the page cache, gone from its folder as soon as it is open.

A killed program leaves nothing behind, and two programs in one folder never meet in one file.
"""

from __future__ import annotations

import errno
import os
import secrets
import shutil
from pathlib import Path

from lema_core.errors import TransferError
from lema_core.store.granules import whole_sectors

#: one write
_REQUEST_BYTES = 8 << 20
#: what a disk or a limit says that has no room
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class UnnamedFile:
    """Reads and writes in whole sectors, from memory aligned to them. ``holds``: what, for errors (``gradients``).

    ``path`` is where it was made, for errors and as a key. Any thread may use it, each its own ranges.
    """

    def __init__(self, folder: Path, holds: str) -> None:
        self.folder = folder
        self.path = folder / f"lema-{secrets.token_hex(8)}.spill"
        self._holds = holds
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self.descriptor, self.direct = _create(self.path)
            self.path.unlink()
        except OSError as error:
            raise TransferError(f"{folder}: cannot keep {holds} there: {error.strerror}") from error

    def reserve(self, nbytes: int) -> None:
        """The file's size; zeros where nothing was written. Raises TransferError where the disk has less room."""
        free = free_bytes(self.folder)
        if free < nbytes:
            raise TransferError(
                f"{self.folder}: {nbytes:,} bytes of {self._holds} are needed, {free:,} are free on its disk: make "
                "room, or give them more memory"
            )
        try:
            os.ftruncate(self.descriptor, nbytes)
        except OSError as error:
            raise TransferError(f"{self.folder}: cannot keep {self._holds} there: {error.strerror}") from error

    def read(self, offset: int, memory: memoryview) -> None:
        """Fill ``memory``. Raises OSError."""
        done = 0
        while done < len(memory):
            got = os.preadv(self.descriptor, [memory[done : done + _REQUEST_BYTES]], offset + done)
            if not got:
                raise OSError(errno.EIO, f"the file ends at byte {offset + done:,}")
            done += got
        self._drop_cached(offset, len(memory), written=False)

    def write(self, offset: int, memory: memoryview) -> None:
        """Raises OSError."""
        done = 0
        while done < len(memory):
            done += os.pwrite(self.descriptor, memory[done : done + _REQUEST_BYTES], offset + done)
        self._drop_cached(offset, len(memory), written=True)

    def _drop_cached(self, offset: int, nbytes: int, written: bool) -> None:
        if not self.direct and hasattr(os, "posix_fadvise"):
            if written:
                os.fdatasync(self.descriptor)
            os.posix_fadvise(self.descriptor, offset, whole_sectors(nbytes), os.POSIX_FADV_DONTNEED)

    def close(self) -> None:
        os.close(self.descriptor)


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
