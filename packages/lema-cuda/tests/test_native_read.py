"""Native reads, held to what every read kernel promises, at several depths and request sizes."""

from __future__ import annotations

import ctypes
import errno
import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from lema_core.errors import PluginError
from lema_core.store.reads import PythonReads, Range
from lema_core.testing.read_suite import ReadSuite
from lema_cuda.library import open_library
from lema_cuda.read import NativeReads, _Range


@pytest.fixture(autouse=True)
def _native_library(native: object) -> None:
    """Skips where there is none."""


class TestNativeReads(ReadSuite):
    def make_reads(self) -> NativeReads:
        return NativeReads()


class TestManySmallRequests(ReadSuite):
    def make_reads(self) -> NativeReads:
        return NativeReads(request_bytes=256 << 10, depth=16)


class TestOneRequestAtATime(ReadSuite):
    def make_reads(self) -> NativeReads:
        return NativeReads(request_bytes=1 << 20, depth=1)


@pytest.mark.parametrize("seed", range(20))
def test_the_twins_tell_the_same_of_files_that_end_or_fail(tmp_path: Path, seed: int) -> None:
    """Complete ranges, and the first that is not: same bytes, same progress, same errno."""
    rng = random.Random(seed)
    path = tmp_path / "f"
    size = rng.choice((0, 1, 300_000, 3_000_000))
    path.write_bytes(rng.randbytes(size))
    files = [os.open(path, os.O_RDONLY), os.open(tmp_path, os.O_RDONLY)]
    wanted = []
    for _ in range(rng.randint(1, 6)):
        nbytes = rng.randint(0, 600_000)
        file = files[rng.random() < 0.05]
        wanted.append((file, rng.randint(0, max(1, size)), nbytes, rng.randint(0, nbytes)))
    told = []
    for reads in (
        PythonReads(),
        NativeReads(request_bytes=rng.choice((4096, 65536, 1 << 20)), depth=rng.randint(1, 5)),
    ):
        targets = [bytearray(nbytes) for _, _, nbytes, _ in wanted]
        ranges = [
            Range(file, offset, memoryview(target), needed, False)
            for (file, offset, _, needed), target in zip(wanted, targets, strict=True)
        ]
        reads.read(ranges)
        until = next((i for i, each in enumerate(ranges) if not each.complete), len(ranges) - 1) + 1
        told.append(
            [
                (
                    min(each.done_bytes, each.needed_bytes),
                    each.error,
                    bytes(target[: min(each.done_bytes, each.needed_bytes)]),
                )
                for each, target in zip(ranges[:until], targets, strict=False)
            ]
        )
    for file in files:
        os.close(file)
    assert told[0] == told[1]


def test_arguments_that_make_no_sense_are_refused() -> None:
    library, one = open_library(), (_Range * 1)()
    assert library.lema_read(one, 1, 4096, 1) == 0
    assert [library.lema_read(one, -1, 4096, 1), library.lema_read(one, 1, 4095, 1)] == [1, 1]
    assert [library.lema_read(one, 1, 4096, 0), library.lema_read(one, 1, 4096, 17)] == [1, 1]
    one[0].needed_bytes = 1
    assert library.lema_read(one, 1, 4096, 1) == 1
    with pytest.raises(PluginError, match="refused a call: a bad argument"):
        NativeReads(request_bytes=1000).read([])


def test_the_struct_is_the_headers() -> None:
    assert ctypes.sizeof(_Range) == 56 and _Range.error.offset == 48


def test_a_pipe_has_no_place_to_read_at() -> None:
    ends = os.pipe()
    wanted = Range(ends[0], 0, memoryview(bytearray(8)), 8, False)
    NativeReads().read([wanted])
    for end in ends:
        os.close(end)
    assert (wanted.done_bytes, wanted.error) == (0, errno.ESPIPE)


def test_a_signal_during_a_read_reaches_python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A read that was interrupted is made again once the handler ran."""
    path = tmp_path / "f"
    path.write_bytes(b"0123456789")
    file = os.open(path, os.O_RDONLY)
    reads, target, calls = NativeReads(), bytearray(4), []
    real = reads._library.lema_read

    class Interrupted:
        def lema_read(self, native, *rest) -> int:
            calls.append(len(calls))
            if len(calls) == 1:
                native[0].error = errno.EINTR
                signal.raise_signal(signal.SIGUSR1)
                return 0
            return real(native, *rest)

    handled = []
    before = signal.signal(signal.SIGUSR1, lambda *_: handled.append(len(calls)))
    monkeypatch.setattr(reads, "_library", Interrupted())
    wanted = Range(file, 2, memoryview(target), 4, False)
    reads.read([wanted])
    signal.signal(signal.SIGUSR1, before)
    os.close(file)
    assert (bytes(target), wanted.error, handled, calls) == (b"2345", 0, [1], [0, 1])


def test_other_threads_run_while_a_read_is_under_way(tmp_path: Path) -> None:
    """Nobody is made to give the interpreter's lock away, so a thread gets on only where the read lets go of it."""
    path = tmp_path / "f"
    path.write_bytes(bytes(16 << 20))
    file, target = os.open(path, os.O_RDONLY), bytearray(16 << 20)
    count, stop = [0], threading.Event()

    def counting() -> None:
        while not stop.is_set():
            count[0] += 1
            time.sleep(0)

    reads, wanted = NativeReads(), [Range(file, 0, memoryview(target), len(target), False)]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(60.0)
    thread = threading.Thread(target=counting)
    thread.start()
    before = count[0]
    reads.read(wanted)
    after = count[0]
    stop.set()
    sys.setswitchinterval(interval)
    thread.join()
    os.close(file)
    assert after > before


PRELUDE = """
import os, resource, sys
from lema_core.store.reads import Range
from lema_cuda.read import NativeReads

expected = open(sys.argv[1], "rb").read()
file, target, reads = os.open(sys.argv[1], os.O_RDONLY), bytearray(len(expected)), NativeReads(65536, depth=4)
ranges = [Range(file, 0, memoryview(target), len(target), False)]

def right():
    target[:] = bytes(len(target))
    reads.read(ranges)
    return target == expected
"""


def run_script(script: str, tmp_path: Path) -> None:
    path = tmp_path / "f"
    path.write_bytes(random.Random(3).randbytes(1_000_001))
    subprocess.run([sys.executable, "-c", PRELUDE + script, str(path)], check=True, timeout=120)


def test_a_forked_child_reads_with_threads_of_its_own(tmp_path: Path) -> None:
    script = """
assert right()
child = os.fork()
if child == 0:
    os._exit(0 if right() else 1)
assert os.waitpid(child, 0)[1] == 0 and right()
"""
    run_script(script, tmp_path)


def test_where_no_thread_can_be_started_the_caller_reads_alone(tmp_path: Path) -> None:
    script = """
before = len(os.listdir("/proc/self/task"))
resource.setrlimit(resource.RLIMIT_AS, (1, resource.RLIM_INFINITY))  # no room for a stack
reads.read(ranges)
resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
assert target == expected and len(os.listdir("/proc/self/task")) == before
"""
    run_script(script, tmp_path)


HANGING = """
#include <unistd.h>
extern "C" ssize_t pread(int, void *, size_t, off_t) { for (;;) pause(); }
"""


def test_a_read_that_hangs_holds_no_program_back(tmp_path: Path) -> None:
    """Its threads are the library's and a daemon's: a program that ends does not wait for them."""
    (tmp_path / "hanging.cpp").write_text(HANGING)
    library = str(tmp_path / "hanging.so")
    try:
        subprocess.run(["g++", "-shared", "-fPIC", str(tmp_path / "hanging.cpp"), "-o", library], check=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("needs g++ to make reads hang")
    script = """
import threading, time
thread = threading.Thread(target=reads.read, args=(ranges,), daemon=True)
thread.start()
deadline = time.monotonic() + 60
while len(os.listdir("/proc/self/task")) < 5 and time.monotonic() < deadline:
    time.sleep(0.01)
thread.join(0.2)
assert thread.is_alive()
print("ends", flush=True)
"""
    path = tmp_path / "f"
    path.write_bytes(bytes(1_000_001))
    command = [sys.executable, "-c", PRELUDE + script, str(path)]
    environment = {**os.environ, "LD_PRELOAD": library}
    child = subprocess.run(command, env=environment, check=True, timeout=120, capture_output=True, text=True)
    assert child.stdout == "ends\n"
