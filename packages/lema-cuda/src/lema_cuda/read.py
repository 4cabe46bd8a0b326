"""File reads with several requests in flight, in liblema, without the interpreter's lock."""

from __future__ import annotations

import ctypes
import errno
from collections.abc import Sequence

from lema_core.store.reads import Range
from lema_cuda.library import open_library, raise_for

#: what the README's measurement found best
REQUEST_BYTES = 4 << 20
DEPTH = 4


class _Range(ctypes.Structure):
    """struct lema_range"""

    _fields_ = (
        ("target", ctypes.c_void_p),
        ("offset", ctypes.c_int64),
        ("bytes", ctypes.c_int64),
        ("needed_bytes", ctypes.c_int64),
        ("done_bytes", ctypes.c_int64),
        ("file", ctypes.c_int32),
        ("direct", ctypes.c_int32),
        ("error", ctypes.c_int32),
    )


class NativeReads:
    """As :class:`lema_core.store.reads.Reads`: up to ``depth`` blocking reads of ``request_bytes`` at once, made by the
    calling thread and by threads of the library that stay. Raises PluginError for an argument that makes no sense."""

    def __init__(self, request_bytes: int = REQUEST_BYTES, depth: int = DEPTH) -> None:
        self._library = open_library()
        self._how = (request_bytes, depth)

    def read(self, ranges: Sequence[Range]) -> None:
        native = (_Range * len(ranges))(*map(_native, ranges))
        interrupted = True
        # Returning to the interpreter lets it handle the signal that interrupted a read; it may raise.
        while interrupted:
            raise_for(self._library.lema_read(native, len(ranges), *self._how))
            interrupted = any(each.error == errno.EINTR for each in native)
        for each, found in zip(ranges, native, strict=True):
            each.done_bytes, each.error = found.done_bytes, found.error


def _native(wanted: Range) -> _Range:
    nbytes = len(wanted.target)
    address = ctypes.addressof(ctypes.c_char.from_buffer(wanted.target)) if nbytes else None
    return _Range(address, wanted.offset, nbytes, wanted.needed_bytes, 0, wanted.file, wanted.direct, 0)
