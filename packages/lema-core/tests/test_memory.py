"""Limits of control groups, v1 and v2, nested and inside containers, from fake trees and from a real group."""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
from pathlib import Path

import pytest

from lema_core import memory

UNLIMITED_V1 = "9223372036854771712"


def _proc(tmp_path: Path, cgroup: str, mounts: list[tuple[str, str, Path]], available_kb: int = 1_000_000) -> Path:
    """A /proc with the process's groups, (kind, root, mount point) of each hierarchy, and a little memory."""
    proc = tmp_path / "proc"
    (proc / "self").mkdir(parents=True)
    (proc / "self/cgroup").write_text(cgroup)
    lines = []
    for kind, root, point in mounts:
        escaped = str(point).replace(" ", "\\040")
        options = "rw" if kind == "cgroup2" else "rw,memory"
        lines.append(f"35 31 0:32 {root} {escaped} rw,relatime shared:1 - {kind} cgroup {options}\n")
    (proc / "self/mountinfo").write_text("".join(lines))
    (proc / "self/status").write_text(
        "Name:\tx\nVmHWM:\t  900 kB\nVmRSS:\t  700 kB\nRssAnon:\t  500 kB\nRssFile:\t  150 kB\nRssShmem:\t   50 kB\n"
    )
    (proc / "meminfo").write_text(f"MemTotal:  9000000 kB\nMemAvailable:  {available_kb} kB\nHugePages_Total:  0\n")
    return proc


def _group(folder: Path, **files: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(text + "\n")
    return folder


def test_v1_takes_the_smallest_limit_on_the_way_up(tmp_path: Path) -> None:
    point = _group(tmp_path / "memory", memory__limit_in_bytes=UNLIMITED_V1)
    _group(point / "a", memory__limit_in_bytes="300000000", memory__usage_in_bytes="7")
    _group(point / "a/b", memory__limit_in_bytes="500000000")
    proc = _proc(tmp_path, "4:memory:/a/b\n0::/\n", [("cgroup", "/", point)])
    assert memory.cgroup_limit(proc) == memory.CgroupLimit(300_000_000, 7, point / "a/memory.limit_in_bytes")


def test_v2_takes_the_smallest_limit_on_the_way_up(tmp_path: Path) -> None:
    point = _group(tmp_path / "unified with space")  # the root group of v2 has no memory.max
    _group(point / "a", memory__max="max")
    _group(point / "a/b", memory__max="200000000", memory__current="11")
    proc = _proc(tmp_path, "0::/a/b\n", [("cgroup2", "/", point)])
    assert memory.cgroup_limit(proc) == memory.CgroupLimit(200_000_000, 11, point / "a/b/memory.max")


def test_hybrid_machines_have_both(tmp_path: Path) -> None:
    v1 = _group(tmp_path / "v1", memory__limit_in_bytes="400000000")
    v2 = _group(tmp_path / "v2/x", memory__max="350000000").parent
    proc = _proc(tmp_path, "4:cpu,memory:/\n0::/x\n", [("cgroup", "/", v1), ("cgroup2", "/", v2)])
    assert memory.cgroup_limit_bytes(proc) == 350_000_000


@pytest.mark.parametrize(
    ("path", "root"), [("/docker/abc", "/docker/abc"), ("/", "/"), ("/../outside", "/"), ("/", "/docker/abc")]
)
def test_a_container_sees_its_own_group_at_the_mount_point(tmp_path: Path, path: str, root: str) -> None:
    point = _group(tmp_path / "memory", memory__limit_in_bytes="100000000")
    proc = _proc(tmp_path, f"4:memory:{path}\n", [("cgroup", root, point)])
    assert memory.cgroup_limit_bytes(proc) == 100_000_000


def test_no_limit_anywhere(tmp_path: Path) -> None:
    point = _group(tmp_path / "memory", memory__limit_in_bytes=UNLIMITED_V1)
    proc = _proc(tmp_path, "4:memory:/\n", [("cgroup", "/", point)])
    assert memory.cgroup_limit_bytes(proc) is None
    limit = memory.process_memory_limit(proc)
    assert limit == memory.MemoryLimit((1_000_000 + 500 + 50) * 1024, "free memory (MemAvailable)")


def test_the_smaller_of_group_and_free_memory_with_its_source(tmp_path: Path) -> None:
    point = _group(tmp_path / "memory", memory__limit_in_bytes="100000000")
    proc = _proc(tmp_path, "4:memory:/\n", [("cgroup", "/", point)])
    limit = memory.process_memory_limit(proc)
    assert limit.bytes == 100_000_000 and str(point / "memory.limit_in_bytes") in limit.source


@pytest.mark.parametrize("version", ["v1", "v2"])
@pytest.mark.parametrize(("anonymous", "mapped"), [(500, 150), (450, 20), (5_000, 100)])
def test_what_others_pay_for_is_free_and_what_others_use_is_not(
    tmp_path: Path, version: str, anonymous: int, mapped: int
) -> None:
    """The process has 700 kB: all charged to its group; less, as libraries are charged elsewhere; or the group has
    another process as well."""
    kb = {"anon": anonymous, "file_mapped": mapped, "file": 9000}
    if version == "v1":
        kb = {"rss": 1, "mapped_file": 1, "total_rss": anonymous, "total_mapped_file": mapped, "total_cache": 9000}
    stat = "\n".join(f"{name} {1024 * value}" for name, value in kb.items())
    limit = "memory__limit_in_bytes" if version == "v1" else "memory__max"
    point = _group(tmp_path / "memory", **{limit: "100000000", "memory__stat": stat})
    kind, groups = ("cgroup", "4:memory:/\n") if version == "v1" else ("cgroup2", "0::/\n")
    proc = _proc(tmp_path, groups, [(kind, "/", point)])
    assert memory.process_memory_limit(proc).bytes == 100_000_000 + 1024 * (700 - anonymous - mapped)


def test_without_proc_the_physical_memory_is_the_limit(tmp_path: Path) -> None:
    limit = memory.process_memory_limit(tmp_path)
    assert limit == memory.MemoryLimit(memory.physical_bytes(), "physical memory") and limit.bytes > 0
    assert memory.rss_bytes(tmp_path) > 0 and memory.peak_rss_bytes(tmp_path) > 0
    assert memory.reset_peak_rss(tmp_path) is False


def test_own_memory_from_status(tmp_path: Path) -> None:
    proc = _proc(tmp_path, "", [])
    assert (memory.rss_bytes(proc), memory.anonymous_bytes(proc), memory.peak_rss_bytes(proc)) == (
        716_800,
        563_200,
        921_600,
    )


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="no /proc on this system")
def test_anonymous_memory_follows_an_allocation() -> None:
    before = memory.anonymous_bytes()
    # Mapped, not allocated: the C library may serve an allocation from memory that the process holds already.
    held = mmap.mmap(-1, 30_000_000, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    held.write(b"x" * len(held))
    grown = memory.anonymous_bytes() - before
    assert 25_000_000 < grown < 90_000_000 and memory.peak_rss_bytes() >= memory.rss_bytes() > len(held)
    peak = memory.peak_rss_bytes()
    held.close()
    if memory.reset_peak_rss():
        assert memory.peak_rss_bytes() < peak


def test_a_real_v1_group() -> None:
    """A child put into a limited group must find that limit."""
    mounts = [point for version, _, point in memory._memory_mounts(memory.PROC) if version == "v1"]
    own = memory._group_paths(memory.PROC).get("v1", "")
    if not mounts:
        pytest.skip("no v1 memory hierarchy is mounted")
    group = mounts[0].joinpath(*own.strip("/").split("/")) / f"lema-test-{os.getpid()}"
    try:
        group.mkdir()
    except OSError as error:
        pytest.skip(f"no control group may be made here: {error}")
    try:
        (group / "memory.limit_in_bytes").write_text("200000000")
        code = (
            f"import os; open({str(group / 'cgroup.procs')!r}, 'w').write(str(os.getpid()))\n"
            "from lema_core.memory import process_memory_limit as limit; print(limit().bytes, limit().source)"
        )
        result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        found, source = result.stdout.split(maxsplit=1)
        # What the child held before it joined is charged where it came from.
        assert 199_990_000 <= int(found) <= 260_000_000 and str(group) in source
    finally:
        group.rmdir()


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1.00 KB"),
        (1_234_567, "1.23 MB"),
        (12_345_678, "12.3 MB"),
        (999_999_999, "1.00 GB"),
        (540e6, "540 MB"),
        (3.2e12, "3.20 TB"),
    ],
)
def test_format_bytes(count: float, text: str) -> None:
    assert memory.format_bytes(count) == text
