"""What every ``read`` kernel must do; inherit it to test one.

    class TestMyReads(ReadSuite):
        def make_reads(self):
            return MyReads()

pytest collects the subclass.
"""

from __future__ import annotations

import ctypes
import errno
import os
import random
import tempfile
import threading
from pathlib import Path

import torch

from lema_core.device import map_ram
from lema_core.errors import CheckpointError
from lema_core.store.disk import DiskReader
from lema_core.store.granules import SECTOR_BYTES, Granule, Read
from lema_core.store.reads import Range, Reads

_FILE_BYTES = 6_000_123
_NAMES = ("model.a.weight", "model.b.weight")
_UNTOUCHED = 0xA5


class ReadSuite:
    """Tests of the promises in :class:`lema_core.store.reads.Reads`, and of DiskReader on top of it."""

    def make_reads(self) -> Reads:
        """A kernel. Override it."""
        raise NotImplementedError

    def setup_method(self) -> None:
        self.reads = self.make_reads()
        self._folder = tempfile.TemporaryDirectory()
        self.folder = Path(self._folder.name)
        self.path = self.folder / "f.safetensors"
        self.data = random.Random(1).randbytes(_FILE_BYTES)
        self.path.write_bytes(self.data)
        self._slab = map_ram(8 << 20).fill_(_UNTOUCHED)
        self.memory = memoryview((ctypes.c_char * len(self._slab)).from_address(self._slab.data_ptr())).cast("B")
        self.buffered = os.open(self.path, os.O_RDONLY)
        self.direct = os.open(self.path, os.O_RDONLY | getattr(os, "O_DIRECT", 0))
        self.reader = DiskReader(self.reads)

    def teardown_method(self) -> None:
        self.reader.close()
        os.close(self.buffered)
        os.close(self.direct)
        self._folder.cleanup()

    def _refused(self, path: Path, offset: int, nbytes: int) -> str:
        """What reading says that must fail."""
        try:
            self.reader.read(path, offset, self.memory[:nbytes], nbytes, _NAMES)
        except CheckpointError as error:
            return str(error)
        raise AssertionError(f"{nbytes} bytes at {offset} of {path} were read")

    def _read_one(self, file: int, offset: int, nbytes: int, needed_bytes: int, direct: bool) -> Range:
        wanted = Range(file, offset, self.memory[:nbytes], needed_bytes, direct)
        self.reads.read([wanted])
        return wanted

    def test_nothing_is_asked_for(self) -> None:
        self.reads.read([])
        assert self._read_one(self.buffered, 5, 0, 0, False).complete
        assert self.memory[0] == _UNTOUCHED

    def test_random_ranges_are_the_files_bytes_and_nothing_else_is_written(self) -> None:
        """Through the cache at any address, offset and size; direct in whole sectors."""
        for seed in range(8):
            self._read_random_ranges(random.Random(seed))

    def _read_random_ranges(self, rng: random.Random) -> None:
        self._slab.fill_(_UNTOUCHED)
        ranges, expected, at = [], bytearray(b"\xa5" * len(self.memory)), 0
        for _ in range(rng.randint(1, 12)):
            direct = rng.random() < 0.5
            unit = SECTOR_BYTES if direct else 1
            at = -(-at // unit) * unit
            size = min(rng.choice((1, 4096, 70_000, 1_500_000)) * rng.randint(1, 3), len(self.memory) - at)
            size -= size % unit
            offset = rng.randrange(0, _FILE_BYTES, unit)
            there = max(0, min(size, _FILE_BYTES - offset))
            target = self.memory[at : at + size]
            ranges.append(Range(self.direct if direct else self.buffered, offset, target, there, direct))
            expected[at : at + there] = self.data[offset : offset + there]
            at += size
        self.reads.read(ranges)
        assert all(each.complete and each.error == 0 for each in ranges)
        assert [each.done_bytes for each in ranges] == [each.needed_bytes for each in ranges]
        for each in ranges:  # the last sector of a direct read goes on behind the file's end
            each.target[each.needed_bytes :] = bytes([_UNTOUCHED]) * (len(each.target) - each.needed_bytes)
        assert bytes(self.memory) == bytes(expected)

    def test_the_end_of_a_file_is_no_error_and_is_found_to_the_byte(self) -> None:
        nbytes = 1500 * SECTOR_BYTES
        for end in (5_900_000, 2_500_000, SECTOR_BYTES, 1, 0):
            os.truncate(self.path, end)
            for direct in (False, True):
                wanted = self._read_one(self.direct if direct else self.buffered, 0, nbytes, nbytes, direct)
                assert (wanted.done_bytes, wanted.error, wanted.complete) == (end, 0, False)
                assert bytes(self.memory[:end]) == self.data[:end]

    def test_the_first_range_that_fails_is_told_with_its_errno(self) -> None:
        folder, size = os.open(self.folder, os.O_RDONLY), 2_000_000
        for broken in range(3):
            files = [folder if i >= broken else self.buffered for i in range(3)]
            ranges = [
                Range(file, 7, self.memory[size * i : size * (i + 1)], size, False) for i, file in enumerate(files)
            ]
            self.reads.read(ranges)
            assert all(each.complete and each.error == 0 for each in ranges[:broken])
            assert (ranges[broken].done_bytes, ranges[broken].error) == (0, errno.EISDIR)
        os.close(folder)

    def test_calls_from_many_threads(self) -> None:
        size = 500_000
        wanted = [Range(self.buffered, size * i + 1, self.memory[size * i :][:size], size, False) for i in range(9)]
        threads = [threading.Thread(target=self.reads.read, args=([each],)) for each in wanted]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert bytes(self.memory[: 9 * size]) == self.data[1 : 1 + 9 * size]

    def test_a_granule_is_read_from_two_files(self) -> None:
        other = self.folder / "g.safetensors"
        other.write_bytes(self.data[::-1])
        first, last = 4_500_000 // SECTOR_BYTES * SECTOR_BYTES, _FILE_BYTES // SECTOR_BYTES * SECTOR_BYTES
        reads = (
            Read(self.path, SECTOR_BYTES, first, first - 5, 0),
            Read(other, last, SECTOR_BYTES, _FILE_BYTES - last, first),
        )
        self.reader.read_granule(Granule(0, first + SECTOR_BYTES, 0, _NAMES, reads), self.memory)
        assert bytes(self.memory[: first - 5]) == self.data[SECTOR_BYTES : SECTOR_BYTES + first - 5]
        assert bytes(self.memory[first:][: _FILE_BYTES - last]) == self.data[::-1][last:]
        assert self.reader.bytes_read == first + _FILE_BYTES - last

    def test_a_cut_file_is_named_with_its_end(self) -> None:
        os.truncate(self.path, 3_000_001)
        assert self._refused(self.path, 4096, 4_096_000) == (
            f"{self.path}: cut while in use: model.a.weight and 1 more needs bytes up to 4100096, "
            "the file ends at 3000001; download it again"
        )

    def test_a_vanished_file_and_a_folder_are_named(self) -> None:
        gone, what = self.folder / "gone", "model.a.weight and 1 more"
        assert self._refused(gone, 0, 4096) == f"{gone}: cannot open: No such file or directory"
        expected = f"{self.folder}: cannot read {what} at byte 8192: Is a directory"
        assert self._refused(self.folder, 8192, 4096) == expected

    def test_an_address_that_direct_reads_refuse_is_read_through_the_cache(self) -> None:
        self.reader.read(self.path, 4096, self.memory[1:4097], 4096, _NAMES)
        assert bytes(self.memory[1:4097]) == self.data[4096:8192]

    def test_what_came_through_the_page_cache_is_dropped_from_it(self) -> None:
        os.fsync(self.buffered)
        assert _cached_bytes(self.path) > 4_000_000
        assert self._read_one(self.buffered, 0, _FILE_BYTES, _FILE_BYTES, False).complete
        assert _cached_bytes(self.path) < 2_100_000

    def test_steady_descriptors_and_threads(self) -> None:
        def open_now() -> tuple[int, int]:
            return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))

        self._read_one(self.buffered, 0, 5_000_000, 5_000_000, False)
        before = open_now()
        for _ in range(5):
            self._read_one(self.buffered, 3, 5_000_000, 5_000_000, False)
        assert open_now() == before


def _cached_bytes(path: Path) -> int:
    """Bytes of a file in the page cache, by mincore."""
    size = path.stat().st_size
    whole = torch.from_file(str(path), shared=False, size=size, dtype=torch.uint8)
    pages = (ctypes.c_ubyte * -(-size // 4096))()
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mincore(ctypes.c_void_p(whole.data_ptr()), ctypes.c_size_t(size), pages):
        raise OSError(ctypes.get_errno(), "mincore")
    return 4096 * sum(page & 1 for page in pages)
