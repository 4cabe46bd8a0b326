"""Ranges of a file that memory overflows into, written once and read once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

from torch import Tensor

from lema_core.checkpoint.reading import tensor_bytes
from lema_core.store.granules import whole_sectors
from lema_core.store.unnamed import FULL, UnnamedFile, free_bytes

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
        self._memory = tensor_bytes(bounce)
        self._used: dict[int, int] = {}
        self._end = 0
        self.bytes_now = 0
        self.peak_bytes = 0
        self.bytes_read = 0
        self.bytes_written = 0
        self._file = UnnamedFile(folder, "activations")

    def write(self, data: Tensor, copy: Copy) -> int:
        """Write uint8 ``data``; returns where it is. Raises OSError."""
        offset, nbytes = self._reserve(data.numel()), data.numel()
        try:
            for start, count in _pieces(nbytes):
                copy(self._bounce[:count], data[start : start + count])
                self._file.write(offset + start, self._memory[: whole_sectors(count)])
                self.bytes_written += whole_sectors(count)
        except BaseException as error:
            self.free(offset)
            if isinstance(error, OSError) and error.errno in FULL:
                raise OSError(
                    error.errno,
                    f"{error.strerror}: {whole_sectors(nbytes):,} bytes are needed beside {self.bytes_now:,} of "
                    f"activations, {free_bytes(self.folder):,} are free; free some, or give activations more memory",
                ) from error
            raise
        return offset

    def read(self, offset: int, data: Tensor, copy: Copy) -> None:
        """Fill uint8 ``data`` with what was written at ``offset``, and free that. Raises OSError."""
        for start, count in _pieces(data.numel()):
            nbytes = whole_sectors(count)
            self._file.read(offset + start, self._memory[:nbytes])
            self.bytes_read += nbytes
            copy(data[start : start + count], self._bounce[:count])
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

    def close(self) -> None:
        self._memory.release()
        self._file.close()


def _pieces(nbytes: int) -> Iterator[tuple[int, int]]:
    for start in range(0, nbytes, BOUNCE_BYTES):
        yield start, min(BOUNCE_BYTES, nbytes - start)
