"""Where converted folders are kept: ``$LEMA_CACHE/gguf``, by default ``~/.cache/lema/gguf``.

A folder appears under its name only when it is complete. A lock per file makes a second process wait for the first
one's result, and proves that an unfinished folder found under the lock was left by a process that died.
"""

from __future__ import annotations

import fcntl
import hashlib
import shutil
from pathlib import Path

from lema_core.cache import cache_folder
from lema_core.errors import CheckpointError
from lema_gguf.convert import CONVERTER_VERSION, convert

_HEAD_BYTES = 1 << 20


def cache_root() -> Path:
    """The folder of all converted models."""
    return cache_folder("gguf")


def cache_key(gguf_path: Path) -> str:
    """The file's name and a digest of its size, time of change, first MiB and of the converter's version."""
    status = gguf_path.stat()
    with open(gguf_path, "rb") as file:
        head = file.read(_HEAD_BYTES)
    digest = hashlib.sha256(f"{CONVERTER_VERSION} {status.st_size} {status.st_mtime_ns} ".encode() + head).hexdigest()
    return f"{gguf_path.stem}-{digest[:12]}"


def cached_folder(gguf_path: Path) -> Path:
    """The converted folder of ``gguf_path``; converts it when it is not in the cache. Raises CheckpointError."""
    try:
        return _cached_folder(gguf_path)
    except OSError as error:
        raise CheckpointError(
            f"{error.filename or gguf_path}: {error.strerror or error}; LEMA_CACHE says where converted models go"
        ) from error


def _cached_folder(gguf_path: Path) -> Path:
    root = cache_root()
    folder = root / cache_key(gguf_path)
    if folder.is_dir():
        return folder
    root.mkdir(parents=True, exist_ok=True)
    partial = root / f".{folder.name}.partial"
    with open(root / f".{folder.name}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if folder.is_dir():
            return folder
        if partial.exists():
            shutil.rmtree(partial)
        partial.mkdir()
        try:
            convert(gguf_path, partial)
            partial.rename(folder)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    return folder
