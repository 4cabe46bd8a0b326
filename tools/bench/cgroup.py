"""A memory-capped control group (v1 or v2) for a child process, counted with its page cache."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_ROOT = Path("/sys/fs/cgroup")


class Cgroup:
    """One group; :meth:`create` yields None, and says so, where this machine does not let us make one."""

    def __init__(self, folder: Path, limit_file: str, peak_file: str) -> None:
        self.folder = folder
        self._limit_file = limit_file
        self._peak_file = peak_file

    @classmethod
    @contextmanager
    def create(cls, limit_bytes: int) -> Iterator[Cgroup | None]:
        v1 = (_ROOT / "memory").is_dir()
        parent = _ROOT / "memory" if v1 else _ROOT
        files = ("memory.limit_in_bytes", "memory.max_usage_in_bytes") if v1 else ("memory.max", "memory.peak")
        group = cls(parent / f"lema-bench-{os.getpid()}", *files)
        try:
            group.folder.mkdir()
            (group.folder / files[0]).write_text(str(limit_bytes))
        except OSError as error:
            print(f"no memory cap here ({error}); the run is uncapped", flush=True)
            yield None
            return
        try:
            yield group
        finally:
            group.folder.rmdir()

    def enter(self) -> None:
        """Put the calling process into the group; for ``preexec_fn``."""
        (self.folder / "cgroup.procs").write_text(str(os.getpid()))

    def peak_bytes(self) -> int:
        """The most that the group ever held, page cache included."""
        path = self.folder / self._peak_file
        return int(path.read_text()) if path.exists() else 0
