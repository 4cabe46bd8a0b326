"""Locks on files (flock): they end with their process, however that ends."""

from __future__ import annotations

import errno
import fcntl
import os
from pathlib import Path

from lema_core.errors import CheckpointError

#: of file systems without locks
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP)


def lock_file(path: Path, descriptor: int, wait: bool = False) -> bool:
    """Lock ``path``, open as ``descriptor``, for this process alone; False where its file system keeps no locks.

    Raises BlockingIOError while another process has it, unless that is to be waited for; CheckpointError where it
    cannot be locked.
    """
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
        raise
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise CheckpointError(f"{path}: cannot be locked: {error.strerror or error}") from error
        return False
    return True


def is_open_at(path: Path, descriptor: int) -> bool:
    """Whether ``path`` is still the file that was opened: whoever had it locked may have taken it away."""
    try:
        return os.path.samestat(os.stat(path), os.fstat(descriptor))
    except FileNotFoundError:
        return False
