"""What moves bytes from files into memory: the contract of a ``read`` kernel, and its plain Python twin."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from lema_core.store.granules import SECTOR_BYTES

_REQUEST_BYTES = 8 << 20


@dataclass(slots=True)
class Range:
    """One contiguous piece of an open file, and how far its read came.

    ``direct``: the descriptor bypasses the page cache, so ``offset``, the length of ``target`` and its address are
    multiples of SECTOR_BYTES; otherwise they are what they are. Only the first ``needed_bytes`` have to be there.

    Afterwards the first ``done_bytes`` of ``target`` are the file's. ``error`` is an errno; where it is 0 and
    ``done_bytes`` fall short of ``needed_bytes``, the file ends there.
    """

    file: int
    offset: int
    target: memoryview
    needed_bytes: int
    direct: bool
    done_bytes: int = 0
    error: int = 0

    @property
    def complete(self) -> bool:
        return self.done_bytes >= self.needed_bytes


class Reads(Protocol):
    """Kernels of the operation ``read``. Any thread may call; a call returns when nothing writes to memory any more."""

    def read(self, ranges: Sequence[Range]) -> None:
        """Fill the targets, and ``done_bytes`` and ``error``. Behind the first incomplete range those mean nothing.

        What came through the page cache is dropped from it.
        """


class PythonReads:
    """One ``preadv`` after the other."""

    def read(self, ranges: Sequence[Range]) -> None:
        for each in ranges:
            try:
                _read(each)
            except OSError as error:
                each.error = error.errno
            if not each.complete:
                return


def _read(wanted: Range) -> None:
    target, at_end = wanted.target, False
    while not wanted.complete and not at_end:
        piece = target[wanted.done_bytes : wanted.done_bytes + _REQUEST_BYTES]
        count = os.preadv(wanted.file, [piece], wanted.offset + wanted.done_bytes)
        wanted.done_bytes += count
        # Direct reads come in whole sectors, except for the file's last.
        at_end = count == 0 or (wanted.direct and count % SECTOR_BYTES != 0)
    if not wanted.direct and hasattr(os, "posix_fadvise"):
        os.posix_fadvise(wanted.file, wanted.offset, len(target), os.POSIX_FADV_DONTNEED)
