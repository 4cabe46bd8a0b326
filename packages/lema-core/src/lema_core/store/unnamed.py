"""A file that memory overflows into: past the page cache, and without a name in its folder.

A killed program leaves nothing behind, and two programs in one folder never meet in one file.
"""

from __future__ import annotations

import errno
import os
import secrets
import shutil
from contextlib import suppress
from pathlib import Path

from lema_core.errors import TransferError
from lema_core.store.granules import whole_sectors

#: one write
_REQUEST_BYTES = 8 << 20
#: what a disk or a limit says that has no room
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
#: of file systems where every file has a name, and of kernels that know no others
_NO_UNNAMED = (errno.EOPNOTSUPP, errno.ENOTSUP, errno.EISDIR)


class UnnamedFile:
    """Reads and writes in whole sectors, from memory aligned to them. ``holds``: what, for errors (``gradients``).

    Any thread may use it, each its own ranges.
    """

    def __init__(self, folder: Path, holds: str) -> None:
        self.folder = folder
        self._holds = holds
        made = not folder.exists()
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self.descriptor, self.direct = _create(folder)
            if made:
                # A file without a name needs no folder; one that somebody has put a file into stays.
                with suppress(OSError):
                    folder.rmdir()
        except OSError as error:
            raise TransferError(f"{folder}: cannot keep {holds} there: {error.strerror}") from error

    def reserve(self, nbytes: int) -> None:
        """The file's size; zeros where nothing was written. Raises TransferError where the disk has less room."""
        check_room(self.folder, nbytes, self._holds)
        try:
            os.ftruncate(self.descriptor, nbytes)
        except OSError as error:
            raise self.refused("kept", error, nbytes) from error

    def refused(self, doing: str, error: OSError, nbytes: int) -> TransferError:
        """What to raise where the disk refuses to have ``nbytes`` read, written or kept (``doing``)."""
        text = f"{self.folder}: {self._holds} cannot be {doing} there: {error.strerror or error}"
        if error.errno in FULL:
            text += f": {nbytes:,} bytes needed, {free_bytes(self.folder):,} free: make room"
        return TransferError(text)

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


def check_room(folder: Path, nbytes: int, holds: str) -> None:
    """Raises TransferError where the disk of ``folder`` has less room."""
    free = free_bytes(folder)
    if free < nbytes:
        raise TransferError(
            f"{folder}: {nbytes:,} bytes of {holds} are needed, {free:,} are free on its disk: make room, or give them "
            "more memory"
        )


def _create(folder: Path) -> tuple[int, bool]:
    """A descriptor, and whether it bypasses the page cache; some file systems cannot."""
    if hasattr(os, "O_TMPFILE"):
        try:
            return _open(folder, os.O_TMPFILE)
        except OSError as error:
            if error.errno not in _NO_UNNAMED:
                raise
    # For a moment it has a name, which says whose it is.
    path = folder / f"lema-{secrets.token_hex(8)}.{os.getpid()}.partial"
    try:
        return _open(path, os.O_CREAT | os.O_EXCL)
    finally:
        path.unlink(missing_ok=True)


def _open(path: Path, flags: int) -> tuple[int, bool]:
    flags |= os.O_RDWR
    if hasattr(os, "O_DIRECT"):
        try:
            return os.open(path, flags | os.O_DIRECT, 0o600), True
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            if flags & os.O_CREAT:
                # Some systems make the file before they find that they cannot open it so.
                path.unlink(missing_ok=True)
    return os.open(path, flags, 0o600), False
