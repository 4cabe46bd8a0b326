"""How fast this disk reads and writes at once, in the pieces and from the threads that a training of weights uses."""

from __future__ import annotations

import mmap
import os
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

PIECE_BYTES = 8 << 20
_FILE_BYTES = 1 << 30


def seconds_for(folder: Path, read_bytes: float, written_bytes: float, threads: int = 3) -> float:
    """Of so many bytes, measured on a part of them: reads and writes take turns, past the page cache."""
    path = folder / "disk-floor"
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_DIRECT, 0o600)
    path.unlink()
    buffers = [mmap.mmap(-1, PIECE_BYTES) for _ in range(threads)]
    n_pieces = _FILE_BYTES // PIECE_BYTES
    try:
        for piece in range(n_pieces):
            os.pwrite(file, buffers[0], piece * PIECE_BYTES)
        share = read_bytes / (read_bytes + written_bytes)

        def work(number: int) -> int:
            reads = 0.0
            done = 0
            for piece in range(number, n_pieces, threads):
                reads += share
                if reads >= 1:
                    reads -= 1
                    os.preadv(file, [buffers[number]], piece * PIECE_BYTES)
                else:
                    os.pwrite(file, buffers[number], piece * PIECE_BYTES)
                done += PIECE_BYTES
            return done

        started = time.perf_counter()
        with ThreadPoolExecutor(threads) as pool:
            moved = sum(pool.map(work, range(threads)))
        return (time.perf_counter() - started) / moved * (read_bytes + written_bytes)
    finally:
        os.close(file)


if __name__ == "__main__":
    print(seconds_for(Path(sys.argv[1]), float(sys.argv[2]), float(sys.argv[3])))
