"""How much memory this process may use and how much it uses. Linux: from /proc and the control groups, v1 and v2.

A container's limit is a number in a cgroup file, not in MemTotal: a process killed at 8 GB on a 64 GB machine never saw
anything but 64 GB. Elsewhere (macOS) there are no groups; the limit is the physical memory and the source says so.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

PROC = Path("/proc")
#: v1 writes "no limit" as the largest page-aligned int64; anything from 2^60 on is no limit either
_NO_LIMIT_BYTES = 1 << 60


@dataclass(frozen=True)
class MemoryLimit:
    """``bytes`` this process may use, and the ``source`` of that figure in words (a cgroup file, the free memory)."""

    bytes: int
    source: str


@dataclass(frozen=True)
class CgroupLimit:
    """The tightest limit on this process, the present usage of the group that has it, and the ``file`` that says so.
    ``in_use_bytes``: what of the usage processes hold, page cache that nobody maps apart; None where the kernel does
    not say."""

    limit_bytes: int
    usage_bytes: int
    file: Path
    in_use_bytes: int | None = None


def _read_int(path: Path) -> int | None:
    """The integer in a cgroup file; None for "max" and for a file that is missing (as in the root) or unreadable."""
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None


def _memory_mounts(proc: Path) -> Iterator[tuple[str, str, Path]]:
    """(version, root, mount point) of every mounted memory hierarchy. ``root`` is the group that the mount point shows:
    inside a container it is the container's own group, so that paths in /proc/self/cgroup start with it."""
    try:
        lines = (proc / "self/mountinfo").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        fields, _, tail = line.partition(" - ")
        if not tail:
            continue
        kind, _, options = tail.split(" ", 2)
        root, point = (re.sub(r"\\([0-7]{3})", lambda m: chr(int(m[1], 8)), f) for f in fields.split(" ")[3:5])
        if kind == "cgroup2":
            yield "v2", root, Path(point)
        elif kind == "cgroup" and "memory" in options.split(","):
            yield "v1", root, Path(point)


def _group_paths(proc: Path) -> dict[str, str]:
    """This process's group in the v1 memory hierarchy and in the v2 one."""
    paths: dict[str, str] = {}
    try:
        lines = (proc / "self/cgroup").read_text().splitlines()
    except OSError:
        return paths
    for line in lines:
        number, controllers, path = line.split(":", 2)
        if number == "0" and not controllers:
            paths["v2"] = path
        elif "memory" in controllers.split(","):
            paths["v1"] = path
    return paths


def cgroup_limit(proc: Path = PROC) -> CgroupLimit | None:
    """The smallest memory limit on this process's group and every group above it, v1 and v2; None without one."""
    files = {"v1": ("memory.limit_in_bytes", "memory.usage_in_bytes"), "v2": ("memory.max", "memory.current")}
    paths = _group_paths(proc)
    found: list[CgroupLimit] = []
    for version, root, point in _memory_mounts(proc):
        if version not in paths:
            continue
        path = paths[version]
        if root != "/" and (path == root or path.startswith(root + "/")):
            path = path[len(root) :]
        # "/../x": a group outside this namespace's root; what is visible of it starts at the mount point
        group = point.joinpath(*(part for part in path.split("/") if part not in ("", "..")))
        limit_name, usage_name = files[version]
        for folder in (group, *group.parents):
            limit = _read_int(folder / limit_name)
            if limit is not None and limit < _NO_LIMIT_BYTES:
                usage = _read_int(folder / usage_name) or 0
                found.append(CgroupLimit(limit, usage, folder / limit_name, _in_use_bytes(folder, version)))
            if folder == point:
                break
    return min(found, key=lambda group: group.limit_bytes, default=None)


def _in_use_bytes(group: Path, version: str) -> int | None:
    """Anonymous and mapped file pages that are charged to a group and those below it."""
    try:
        lines = (group / "memory.stat").read_text().splitlines()
    except OSError:
        return None
    stat = {name: int(value) for name, _, value in (line.partition(" ") for line in lines) if value.isdigit()}
    names = ("anon", "file_mapped") if version == "v2" else ("total_rss", "total_mapped_file")
    return sum(stat[name] for name in names) if all(name in stat for name in names) else None


def cgroup_limit_bytes(proc: Path = PROC) -> int | None:
    """The smallest cgroup limit on this process in bytes, None without one."""
    group = cgroup_limit(proc)
    return None if group is None else group.limit_bytes


def _kb_fields(path: Path) -> dict[str, int]:
    """``Name:  123 kB`` lines of /proc/meminfo or /proc/self/status, in bytes; {} where there is no such file."""
    try:
        text = path.read_text()
    except OSError:
        return {}
    return {name: int(kb) * 1024 for name, kb in re.findall(r"^(\w+):\s+(\d+) kB$", text, re.MULTILINE)}


def available_bytes(proc: Path = PROC) -> int | None:
    """What the machine could give out without swapping (MemAvailable); None where the kernel does not say."""
    return _kb_fields(proc / "meminfo").get("MemAvailable")


def physical_bytes() -> int:
    """The machine's RAM."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def anonymous_bytes(proc: Path = PROC) -> int:
    """Memory of this process that no file backs (heap, slabs), shared memory included; without /proc, the peak RSS."""
    status = _kb_fields(proc / "self/status")
    return status["RssAnon"] + status["RssShmem"] if "RssAnon" in status else _rusage_peak_bytes()


def rss_bytes(proc: Path = PROC) -> int:
    """Resident memory of this process, file pages included; without /proc, the peak RSS."""
    return _kb_fields(proc / "self/status").get("VmRSS", 0) or _rusage_peak_bytes()


def peak_rss_bytes(proc: Path = PROC) -> int:
    """Largest resident memory since the start, or since :func:`reset_peak_rss`."""
    return _kb_fields(proc / "self/status").get("VmHWM", 0) or _rusage_peak_bytes()


def _rusage_peak_bytes() -> int:
    import resource  # absent on Windows, which has no cgroups to ask either

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def reset_peak_rss(proc: Path = PROC) -> bool:
    """Start :func:`peak_rss_bytes` again from what is resident now. False where the kernel does not allow it."""
    try:
        (proc / "self/clear_refs").write_text("5")
    except OSError:
        return False
    return True


def process_memory_limit(proc: Path = PROC) -> MemoryLimit:
    """How large the resident memory of this process may become: the smaller of what its cgroup and the free memory
    leave, plus what it holds.

    Pages of libraries are often charged to the group that first read them; other processes of its own group take from
    the same limit. Of the free memory only anonymous memory is added: file pages that it has mapped are in
    MemAvailable already.
    """
    limits: list[MemoryLimit] = []
    group = cgroup_limit(proc)
    if group is not None:
        rss = rss_bytes(proc)
        charged = rss if group.in_use_bytes is None else group.in_use_bytes
        limits.append(MemoryLimit(group.limit_bytes - charged + rss, f"cgroup limit {group.file}"))
    available = available_bytes(proc)
    if available is not None:
        limits.append(MemoryLimit(available + anonymous_bytes(proc), "free memory (MemAvailable)"))
    if not limits:
        limits.append(MemoryLimit(physical_bytes(), "physical memory"))
    return min(limits, key=lambda limit: limit.bytes)


def format_bytes(count: float) -> str:
    """``1234567`` -> ``"1.23 MB"``: three significant digits, powers of ten."""
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("KB", 1e3)):
        if abs(count) >= 0.9995 * size:
            value = count / size
            digits = 2 if abs(value) < 9.995 else 1 if abs(value) < 99.95 else 0
            return f"{value:.{digits}f} {unit}"
    return f"{count:.0f} B"
