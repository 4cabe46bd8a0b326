"""Reading ranges: direct, through the page cache, past the end, from files that change."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from lema_core.device import map_ram
from lema_core.errors import CheckpointError
from lema_core.store.disk import DiskReader, shown
from lema_core.store.granules import Granule, Read
from lema_core.store.window import Window

SIZE = 50_000
NAMES = ("model.a.weight", "model.b.weight")


@pytest.fixture
def reader() -> Iterator[DiskReader]:
    reader = DiskReader()
    yield reader
    reader.close()


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "f.safetensors"
    path.write_bytes(bytes(i * 7 % 251 for i in range(SIZE)))
    return path


def memory(nbytes: int) -> memoryview:
    window = Window(map_ram(nbytes), 1, nbytes)
    memory.alive = window  # the view does not keep its memory
    return window.memory(0)


def test_reads_are_the_files_bytes_also_where_the_last_sector_is_not_whole(reader: DiskReader, file: Path) -> None:
    data = file.read_bytes()
    slot = memory(16 * 4096)
    granule = Granule(
        0,
        5 * 4096,
        None,
        NAMES,
        (Read(file, 4096, 8192, 8000, 0), Read(file, 12 * 4096, 4096, SIZE - 12 * 4096, 8192)),
    )
    reader.read_granule(granule, slot)
    assert bytes(slot[:8000]) == data[4096 : 4096 + 8000]
    assert bytes(slot[8192 : 8192 + SIZE - 12 * 4096]) == data[12 * 4096 :]
    assert reader.bytes_read >= 8000 + SIZE - 12 * 4096


def test_a_file_system_without_direct_reads_is_read_through_the_cache(
    reader: DiskReader, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real_open, real_read, refusals = os.open, os.preadv, []

    def open_without(path, flags, *rest):
        if flags & getattr(os, "O_DIRECT", 0):
            refusals.append("open")
            raise OSError(errno.EINVAL, "Invalid argument")
        return real_open(path, flags, *rest)

    monkeypatch.setattr(os, "open", open_without)
    slot = memory(4096)
    reader.read(file, 0, slot, 4096, NAMES)
    assert bytes(slot) == file.read_bytes()[:4096]
    assert reader.buffered_files == {file} and refusals == ["open"]
    monkeypatch.undo()
    late = DiskReader()
    calls = []

    def read_without(fd, buffers, offset):
        calls.append(offset)
        if len(calls) == 1:
            raise OSError(errno.EINVAL, "Invalid argument")
        return real_read(fd, buffers, offset)

    monkeypatch.setattr(os, "preadv", read_without)
    late.read(file, 8192, slot, 4096, NAMES)
    assert bytes(slot) == file.read_bytes()[8192 : 8192 + 4096] and late.buffered_files == {file}
    late.close()


def test_a_disk_error_names_tensor_file_and_place(
    reader: DiskReader, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(fd, buffers, offset):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "preadv", broken)
    with pytest.raises(CheckpointError) as failed:
        reader.read(file, 8192, memory(4096), 4096, NAMES)
    assert str(failed.value) == f"{file}: cannot read model.a.weight and 1 more at byte 8192: Input/output error"


@pytest.mark.parametrize("length", [8192, 9000, 12288 - 1])
@pytest.mark.parametrize("direct", [True, False])
def test_a_cut_file_is_told_from_a_short_read(
    reader: DiskReader, file: Path, length: int, direct: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not direct:
        monkeypatch.setattr(os, "O_DIRECT", 0)
    slot = memory(8192)
    reader.read(file, 4096, slot, 8192, NAMES)
    os.truncate(file, length)
    with pytest.raises(CheckpointError, match=rf"cut while in use: .* up to 12288, .* ends at {length}; download"):
        reader.read(file, 4096, slot, 8192, NAMES)
    reader.read(file, 4096, slot, length - 4096, NAMES)


def test_a_file_is_opened_once_and_closed(reader: DiskReader, file: Path) -> None:
    def descriptors() -> int:
        return len(os.listdir("/proc/self/fd"))

    before = descriptors()
    slots = [map_ram(4096) for _ in range(8)]
    windows = [Window(slab, 1, 4096) for slab in slots]
    threads = [
        threading.Thread(target=reader.read, args=(file, 4096 * i, windows[i].memory(0), 4096, NAMES)) for i in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    data = file.read_bytes()
    assert all(bytes(windows[i].memory(0)) == data[4096 * i : 4096 * (i + 1)] for i in range(8))
    assert descriptors() == before + 1 and reader.bytes_read == 8 * 4096
    reader.close()
    assert descriptors() == before


def test_a_missing_file_is_named(reader: DiskReader, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=rf"{tmp_path}/gone: cannot open: No such file"):
        reader.read(tmp_path / "gone", 0, memory(4096), 1, NAMES)


def test_names_are_shown_in_one_line() -> None:
    assert shown(("a",)) == "a" and shown(("a", "b", "c")) == "a and 2 more"
