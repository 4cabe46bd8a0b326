"""Reading granules of 32 MiB from this folder's disk: ``cpp`` at several depths and request sizes against plain Python.

Each is measured in turn with plain Python, which makes one request of 8 MiB after the other; the ratio is the median of
those pairs. ``beside Python``: another thread of the process runs Python all the time, as a training step does between
two products.

    python tools/bench/bench_read.py [--folder .] [--pairs 11] [--quick]
"""

from __future__ import annotations

import argparse
import ctypes
import os
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median

from lema_core.device import map_ram
from lema_core.store.disk import DiskReader
from lema_core.store.granules import Granule, Read
from lema_core.store.reads import PythonReads
from lema_cuda.read import DEPTH, REQUEST_BYTES, NativeReads

MIB = 1 << 20
GRANULE_BYTES = 32 * MIB
FILE_BYTES = 1024 * MIB
#: granules of one measurement
COUNT = 4
CANDIDATES = [(depth, size * MIB) for depth in (2, 4, 8) for size in (1, 2, 4)]


class Granules:
    """Reads the file's granules round and round, so that none is read twice within a gigabyte."""

    def __init__(self, path: Path) -> None:
        self._path, self._position = path, 0
        self._slab = map_ram(GRANULE_BYTES).fill_(1)
        self._slot = memoryview((ctypes.c_char * GRANULE_BYTES).from_address(self._slab.data_ptr())).cast("B")

    def gigabytes_per_s(self, reader: DiskReader) -> float:
        started = time.perf_counter()
        for _ in range(COUNT):
            read = Read(self._path, self._position, GRANULE_BYTES, GRANULE_BYTES, 0)
            reader.read_granule(Granule(0, GRANULE_BYTES, None, ("weight",), (read,)), self._slot)
            self._position = (self._position + GRANULE_BYTES) % FILE_BYTES
        return COUNT * GRANULE_BYTES / 1e9 / (time.perf_counter() - started)


@contextmanager
def python_running() -> Iterator[None]:
    stop = threading.Event()

    def count() -> None:
        while not stop.is_set():
            pass

    thread = threading.Thread(target=count)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def compare(granules: Granules, depth: int, request_bytes: int, pairs: int) -> str:
    plain, native = DiskReader(PythonReads()), DiskReader(NativeReads(request_bytes, depth))
    rates: list[tuple[float, float]] = []
    for turn in range(pairs):
        first, second = (plain, native) if turn % 2 else (native, plain)
        one, other = granules.gigabytes_per_s(first), granules.gigabytes_per_s(second)
        rates.append((one, other) if turn % 2 else (other, one))
    plain.close()
    native.close()
    ratio = median(native / plain for plain, native in rates)
    return f"{median(r[0] for r in rates):6.2f} {median(r[1] for r in rates):6.2f} GB/s, cpp : python {ratio:.2f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path("."), help="on the disk to measure")
    parser.add_argument("--pairs", type=int, default=11)
    parser.add_argument("--quick", action="store_true", help="one pair of each: does it run?")
    options = parser.parse_args()
    if options.quick:
        options.pairs = 1
    with tempfile.NamedTemporaryFile(dir=options.folder) as file:
        block = os.urandom(16 * MIB)
        for _ in range(FILE_BYTES // len(block)):
            file.write(block)
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        granules = Granules(Path(file.name))
        for depth, request_bytes in CANDIDATES:
            found = compare(granules, depth, request_bytes, options.pairs)
            print(f"depth {depth} x {request_bytes // MIB} MiB: {found}", flush=True)
        with python_running():
            print(f"beside Python:   {compare(granules, DEPTH, REQUEST_BYTES, options.pairs)}")


if __name__ == "__main__":
    main()
