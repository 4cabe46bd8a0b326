"""Files without a name: nothing is ever seen in their folder, and what the disk refuses is said with its figures."""

from __future__ import annotations

import errno
import os
import re
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from lema_core.device import map_ram
from lema_core.errors import TransferError
from lema_core.store import unnamed
from lema_core.store.unnamed import UnnamedFile


@pytest.fixture
def sector() -> memoryview:
    memory = map_ram(4096)
    memory[:] = 7
    return memoryview(memory.numpy())


@pytest.mark.parametrize("kind", ["without names", "kernel without", "file system without", "none past the cache"])
def test_it_holds_what_was_written_and_nobody_sees_it(
    kind: str, tmp_path: Path, sector: memoryview, monkeypatch: pytest.MonkeyPatch
) -> None:
    names: list[str] = []
    opened = os.open

    def watched(path: object, flags: int, *more: int) -> int:
        if kind == "file system without" and flags & os.O_TMPFILE == os.O_TMPFILE:
            raise OSError(errno.EOPNOTSUPP, "Operation not supported")
        if kind == "none past the cache" and flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        descriptor = opened(path, flags, *more)
        names.extend(os.listdir(tmp_path))
        return descriptor

    monkeypatch.setattr(os, "open", watched)
    if kind == "kernel without":
        monkeypatch.delattr(os, "O_TMPFILE")
    file = UnnamedFile(tmp_path / "new" if kind == "without names" else tmp_path, "gradients")
    # nor the folder that was made for it
    assert os.listdir(tmp_path) == []
    # where it has a name for a moment, that says whose it is: leftovers of the dead are found by it
    expected = (
        r"new" if kind in ("without names", "none past the cache") else rf"lema-[0-9a-f]+\.{os.getpid()}\.partial"
    )
    assert all(re.fullmatch(expected, name) for name in names)
    assert not (file.direct and kind == "none past the cache")
    file.reserve(8192)
    assert os.fstat(file.descriptor).st_size == 8192
    file.write(4096, sector)
    sector[:] = bytes(4096)
    file.read(4096, sector)
    assert bytes(sector) == b"\x07" * 4096
    file.read(0, sector)
    assert not any(sector)
    file.close()


def test_room_is_looked_at_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = UnnamedFile(tmp_path, "optimizer states")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=5000))
    with pytest.raises(TransferError) as error:
        file.reserve(8192)
    assert str(error.value) == (
        f"{tmp_path}: 8,192 bytes of optimizer states are needed, 5,000 are free on its disk: make room, or give them "
        "more memory"
    )
    refused = file.refused("written", OSError(errno.ENOSPC, "No space left on device"), 4096)
    assert str(refused) == (
        f"{tmp_path}: optimizer states cannot be written there: No space left on device: 4,096 bytes needed, 5,000 "
        "free: make room"
    )
    assert "needed" not in str(file.refused("read", OSError(errno.EIO, "Input/output error"), 4096))
    file.close()


def test_a_folder_that_cannot_be_one(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(TransferError, match=r"file/below: cannot keep weights there: Not a directory"):
        UnnamedFile(tmp_path / "file" / "below", "weights")
    assert unnamed.free_bytes(tmp_path / "not" / "there") > 0
