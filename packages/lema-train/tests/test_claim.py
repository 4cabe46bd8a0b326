"""One run at a time in a folder."""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from lema_core.atomic import clean_leftovers
from lema_core.errors import CheckpointError, ConfigError
from lema_train.claim import LOCK_FILE, claimed

HOLD = "import sys\nfrom pathlib import Path\nfrom lema_train.claim import claimed\n"
HOLD += "with claimed(Path(sys.argv[1])):\n    print('held', flush=True)\n    sys.stdin.read()\n"


def test_a_second_one_is_refused_by_the_firsts_name_until_it_ends(tmp_path: Path) -> None:
    folder = tmp_path / "out"
    other = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert other.stdout.readline() == "held\n"
    for _ in range(2):
        with pytest.raises(ConfigError) as error, claimed(folder):
            pytest.fail("both have it")
        assert str(error.value) == (
            f"output_dir: {folder} is in use by another run, process {other.pid} on {socket.gethostname()}: wait until "
            "it is over, stop it, or give another output_dir"
        )
    other.kill()
    other.wait()
    other.stdin.close()
    other.stdout.close()
    # the file is left, the lock is not
    assert (folder / LOCK_FILE).exists()
    with claimed(folder):
        assert (folder / LOCK_FILE).read_text() == f"process {os.getpid()} on {socket.gethostname()}\n"
    assert list(folder.iterdir()) == []


def test_a_folder_that_was_made_and_stays_empty_goes_again(tmp_path: Path) -> None:
    with claimed(tmp_path / "a" / "b"):
        assert (tmp_path / "a" / "b").is_dir()
    assert not (tmp_path / "a" / "b").exists()
    with pytest.raises(ZeroDivisionError), claimed(tmp_path / "c"):
        (tmp_path / "c" / "work").write_text("x")
        raise ZeroDivisionError
    assert [path.name for path in (tmp_path / "c").iterdir()] == ["work"]
    (tmp_path / "c" / "work").unlink()
    with claimed(tmp_path / "c"):
        pass
    # it was there before
    assert (tmp_path / "c").is_dir()


def test_a_run_that_ends_while_the_next_one_comes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next one has opened the file, and locks it when it is already gone: nobody else would see that lock."""
    flock = fcntl.flock

    def late(descriptor: int, operation: int) -> None:
        monkeypatch.setattr(fcntl, "flock", flock)
        (tmp_path / LOCK_FILE).unlink()
        flock(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", late)
    with claimed(tmp_path), pytest.raises(ConfigError, match="is in use by another run"), claimed(tmp_path):
        pytest.fail("both have it")


def test_where_nothing_can_be_locked_or_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(CheckpointError, match=r"output_dir: .*file: cannot be made: "), claimed(tmp_path / "file"):
        pass
    said: list[str] = []

    def without(descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", without)
    with claimed(tmp_path / "out", said.append):
        (tmp_path / "out" / "work").write_text("x")
    assert said == [f"{tmp_path / 'out'}: its file system keeps no locks: see to it that no other run writes there"]


def test_a_working_file_that_had_a_name_for_a_moment_is_found_and_removed(tmp_path: Path) -> None:
    dead = subprocess.run([sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, text=True)
    left = tmp_path / f"lema-0123456789abcdef.{dead.stdout.strip()}.partial"
    left.write_bytes(b"weights")
    assert clean_leftovers(tmp_path) == [f"{left}: removed, left by an interrupted run"]
    assert list(tmp_path.iterdir()) == []
