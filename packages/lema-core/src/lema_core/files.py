"""Files that appear under their name only when they are complete, and what is in them."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from lema_core.errors import CheckpointError

_PIECE_BYTES = 1 << 20


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yields the name ``<path>.<pid>.partial`` to write under; on leaving, that file becomes ``path``.

    Whatever is raised inside, ``path`` stays as it was and nothing else is left. Raises OSError.
    """
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    try:
        yield partial
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def sha256_of_file(path: Path) -> str:
    """The hash of what is in it, as hexadecimal digits. Raises CheckpointError where it cannot be read."""
    digest = hashlib.sha256()
    try:
        with open(path, "rb", buffering=0) as file:
            while piece := file.read(_PIECE_BYTES):
                digest.update(piece)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror or error}") from error
    return digest.hexdigest()
