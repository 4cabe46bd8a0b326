"""A control group (v1 or v2) for child processes: memory capped and counted with its page cache, reads slowed down.

What a machine does not offer is named in ``Cgroup.missing`` and said once; nothing stands in for it.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path

_ROOT = Path("/sys/fs/cgroup")
_numbers = count()


class Cgroup:
    """One group; made by :meth:`create`. ``missing``: what was asked for and is not there, "memory" or "reads"."""

    def __init__(self, name: str) -> None:
        self.v1 = (_ROOT / "memory").is_dir()
        self.memory = (_ROOT / "memory" if self.v1 else _ROOT) / name
        self.reads = (_ROOT / "blkio" if self.v1 else _ROOT) / name
        self.missing: set[str] = set()
        self._disk = ""

    @classmethod
    @contextmanager
    def create(cls, limit_bytes: int | None = None, read_from: Path | None = None) -> Iterator[Cgroup]:
        """A group without swap, whose memory is at most ``limit_bytes``; None: counted, not capped. Reads of the disk
        that holds ``read_from`` are counted, see :meth:`limit_reads`."""
        group = cls(f"lema-bench-{os.getpid()}-{next(_numbers)}")
        try:
            group._make_memory(limit_bytes)
            if read_from is not None:
                group._make_reads(read_from)
            yield group
        finally:
            group._remove()

    def _make_memory(self, limit_bytes: int | None) -> None:
        limit_file = "memory.limit_in_bytes" if self.v1 else "memory.max"
        try:
            self.memory.mkdir()
            if self.v1:
                (self.memory / "memory.swappiness").write_text("0")
            else:
                (_ROOT / "cgroup.subtree_control").write_text("+memory")
                (self.memory / "memory.swap.max").write_text("0")
            if limit_bytes is not None:
                (self.memory / limit_file).write_text(str(limit_bytes))
        except OSError as error:
            self._lacks("memory", f"no memory cap here ({error}); the run is uncapped")

    def _make_reads(self, read_from: Path) -> None:
        try:
            self._disk = disk_number(read_from)
            self.reads.mkdir(exist_ok=True)
            if not self.v1:
                (_ROOT / "cgroup.subtree_control").write_text("+io")
            self.limit_reads(None)
        except OSError as error:
            self._lacks("reads", f"no limit on reads here ({error})")

    def limit_reads(self, bytes_per_s: int | None) -> None:
        """From now on the group reads at most so fast, O_DIRECT or not; None: as fast as it can."""
        if "reads" not in self.missing:
            file, rate = ("blkio.throttle.read_bps_device", "") if self.v1 else ("io.max", "rbps=")
            most = bytes_per_s if bytes_per_s is not None else 0 if self.v1 else "max"
            (self.reads / file).write_text(f"{self._disk} {rate}{most}")

    def _lacks(self, what: str, text: str) -> None:
        self.missing.add(what)
        print(text, flush=True)

    def enter(self) -> None:
        """Put the calling process into the group; for ``preexec_fn``."""
        for folder in {self.memory, self.reads}:
            if folder.is_dir():
                (folder / "cgroup.procs").write_text(str(os.getpid()))

    def peak_bytes(self) -> int:
        """The most that the group ever held, page cache included; 0 where the kernel does not say."""
        return _read_int(self.memory / ("memory.max_usage_in_bytes" if self.v1 else "memory.peak"))

    def disk_read_bytes(self) -> int:
        """What the kernel read from disks for the group, 0 where it was not asked to count."""
        if self.v1:
            file, field = self.reads / "blkio.throttle.io_service_bytes", " Read "
        else:
            file, field = self.reads / "io.stat", "rbytes="
        if not file.exists():
            return 0
        lines = file.read_text().splitlines()
        if self.v1:
            return sum(int(line.split()[-1]) for line in lines if field in line)
        words = (word for line in lines for word in line.split() if word.startswith(field))
        return sum(int(word[len(field) :]) for word in words)

    def _remove(self) -> None:
        """Let go of the page cache charged to the group, so that the next one is charged for what it uses."""
        with suppress(OSError):  # v2 has no such file, older kernels neither; the group goes all the same
            (self.memory / "memory.force_empty").write_text("0")
        for folder in {self.memory, self.reads}:
            # a child that was killed takes a moment to leave
            for _ in range(100):
                try:
                    if folder.is_dir():
                        folder.rmdir()
                    break
                except OSError:
                    time.sleep(0.05)


def disk_number(path: Path) -> str:
    """``major:minor`` of the whole disk that holds ``path``. Raises OSError where no one disk does."""
    device = os.stat(path).st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    entry = Path("/sys/dev/block") / number
    if not entry.exists():
        raise OSError(f"{path} lies on no block device of its own ({number})")
    if (entry / "partition").exists():
        return (entry.resolve().parent / "dev").read_text().strip()
    return number


def _read_int(path: Path) -> int:
    return int(path.read_text()) if path.exists() else 0
