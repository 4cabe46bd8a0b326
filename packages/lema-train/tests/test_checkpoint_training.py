"""Checkpoints that are complete or not there: deaths at every point, full disks, rotation, damage, format versions."""

from __future__ import annotations

import errno
import json
import os
import random
import resource
import shutil
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from lema_core import atomic
from lema_core.atomic import atomic_folder, check_free_space, clean_leftovers
from lema_core.checkpoint import TensorToWrite, read_header, read_tensor, write_safetensors
from lema_core.errors import CheckpointError, ConfigError
from lema_train.checkpoint import (
    OPTIMIZER_FILE,
    STATE_FILE,
    IncompleteError,
    checkpoint_folder,
    find_checkpoints,
    latest_complete,
    read_checkpoint,
    rotate,
    verify,
    write_checkpoint,
)
from lema_train.state import FORMAT_VERSION, TrainerState

WEIGHTS_BYTES = 4 * 5000
OPTIMIZER_BYTES = 4 * 20000


def state_at(step: int, note: str = "") -> TrainerState:
    return TrainerState(
        step=step,
        total_steps=100,
        epoch=step // 10,
        step_in_epoch=step % 10,
        seed=1,
        base_learning_rate=1e-4,
        lr_schedule="cosine",
        warmup_steps=3,
        optimizer="AdamW",
        config={"note": note},
    )


@dataclass
class Files:
    """``fill`` writes the weights; the optimizer has ``moment``, if any."""

    fill: Callable[[Path], object] = lambda into: None
    weights_nbytes: int = 0
    moment: torch.Tensor | None = None

    @property
    def nbytes(self) -> int:
        return self.weights_nbytes + (0 if self.moment is None else self.moment.nbytes)

    def write_weights(self, folder: Path) -> None:
        self.fill(folder)

    def states(self, step: int) -> list[TensorToWrite]:
        if self.moment is None:
            return []
        return [("w.exp_avg", torch.float32, tuple(self.moment.shape), lambda: self.moment)]


def save(output_dir: Path, step: int, note: str = "") -> Path:
    """A checkpoint whose every number is its step: 20 kB of weights, 80 kB of optimizer state."""
    folder = checkpoint_folder(output_dir, step)
    weights = torch.full((5000,), float(step))

    def fill(into: Path) -> None:
        write_safetensors(into / "weights.safetensors", [("w", torch.float32, (5000,), lambda: weights)])

    files = Files(fill, WEIGHTS_BYTES, torch.full((20000,), float(step)))
    write_checkpoint(folder, state_at(step, note), files)
    return folder


def assert_whole(folder: Path, step: int) -> None:
    state, optimizer = read_checkpoint(folder)
    assert state.step == step
    assert (read_tensor(optimizer["w.exp_avg"]) == step).all()
    assert (read_tensor(read_header(folder / "weights.safetensors").tensors["w"]) == step).all()


def in_child(work: Callable[[], object]) -> tuple[int, str]:
    """Run ``work`` in a fork; returns (signal that ended it or 0, the message of what it raised)."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            work()
        except CheckpointError as error:
            os.write(writing, str(error).encode())
        except BaseException as error:
            os.write(writing, repr(error).encode())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        message = pipe.read().decode()
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), message


# With RLIMIT_FSIZE, writing byte N+1 of any one file fails or, with SIGXFSZ at its default, ends the process there.
DEATHS = {"in the weights": 9_000, "in the optimizer state": 50_000, "in the final marker": 120_000}


@pytest.mark.skipif(sys.platform != "linux", reason="needs RLIMIT_FSIZE")
@pytest.mark.parametrize("limit", DEATHS.values(), ids=DEATHS.keys())
def test_a_process_that_dies_while_saving_leaves_the_older_checkpoint(tmp_path: Path, limit: int) -> None:
    save(tmp_path, 5)

    def die() -> None:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
        signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
        save(tmp_path, 10, note="x" * 200_000)

    assert in_child(die)[0] == -signal.SIGXFSZ
    assert [path.name for _, path in find_checkpoints(tmp_path)] == ["checkpoint-5"]
    messages = clean_leftovers(tmp_path)
    assert len(messages) == 1 and "removed, left by an interrupted run" in messages[0]
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-5"]
    assert latest_complete(tmp_path) == (tmp_path / "checkpoint-5", [])
    assert_whole(tmp_path / "checkpoint-5", 5)


@pytest.mark.skipif(sys.platform != "linux", reason="needs RLIMIT_FSIZE")
@pytest.mark.parametrize("limit", DEATHS.values(), ids=DEATHS.keys())
@pytest.mark.parametrize("step", [5, 10])
def test_a_limit_on_file_size_leaves_nothing_and_says_the_bytes(tmp_path: Path, limit: int, step: int) -> None:
    save(tmp_path, 5)

    def fail() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
        save(tmp_path, step, note="x" * 200_000)

    ended, message = in_child(fail)
    assert ended == 0
    assert f"{tmp_path}/checkpoint-{step}: cannot be written: File too large: 1100000 bytes needed, " in message
    assert " bytes free" in message and "\n" not in message
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-5"]
    assert_whole(tmp_path / "checkpoint-5", 5)


def test_twenty_kills_at_random_moments_never_lose_a_checkpoint(tmp_path: Path) -> None:
    chance = random.Random(0)
    reached = 0
    save(tmp_path, reached)
    for attempt in range(20):
        pid = os.fork()
        if pid == 0:
            step = reached
            while True:
                # the same step again every other time, so that replacing is hit too
                save(tmp_path, step)
                rotate(checkpoint_folder(tmp_path, step), 2)
                step += attempt % 2
        time.sleep(chance.uniform(0.0, 0.12))
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        for step, path in find_checkpoints(tmp_path):
            assert_whole(path, step)
        clean_leftovers(tmp_path)
        assert all(path.name.startswith("checkpoint-") for path in tmp_path.iterdir())
        newest, skipped = latest_complete(tmp_path)
        assert newest is not None and not skipped
        assert int(newest.name.rpartition("-")[2]) >= reached
        reached = int(newest.name.rpartition("-")[2])
    save(tmp_path, reached)
    assert_whole(checkpoint_folder(tmp_path, reached), reached)


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
def test_a_disk_that_fills_leaves_nothing_and_says_the_bytes(tmp_path: Path, code: int) -> None:
    save(tmp_path, 5)

    def fill(into: Path) -> None:
        (into / "weights.safetensors").write_bytes(b"x" * 1000)
        raise OSError(code, os.strerror(code))

    with pytest.raises(
        CheckpointError, match=r"checkpoint-5: cannot be written: .* 1020000 bytes needed, \d+ bytes free"
    ):
        write_checkpoint(tmp_path / "checkpoint-5", state_at(5), Files(fill, WEIGHTS_BYTES))
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-5"]
    assert_whole(tmp_path / "checkpoint-5", 5)


def test_too_little_space_is_refused_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path, 5)
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(atomic.shutil, "disk_usage", lambda path: usage._replace(free=70_000))
    message = r"checkpoint-6: 1100000 bytes needed, 70000 bytes free"
    with pytest.raises(CheckpointError, match=message):
        save(tmp_path, 6)
    with pytest.raises(CheckpointError, match=r"not/yet: 70001 bytes needed"):
        check_free_space(tmp_path / "not" / "yet", 70_001)
    check_free_space(tmp_path, 70_000)
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-5"]


@pytest.mark.parametrize("raised", [ValueError("defect"), KeyboardInterrupt()])
def test_whatever_is_raised_while_saving_leaves_the_old_one(tmp_path: Path, raised: BaseException) -> None:
    save(tmp_path, 5)

    def interrupt(into: Path) -> None:
        (into / "weights.safetensors").write_bytes(b"half")
        raise raised

    with pytest.raises(type(raised)):
        write_checkpoint(tmp_path / "checkpoint-5", state_at(5), Files(interrupt, 10))
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-5"]
    assert_whole(tmp_path / "checkpoint-5", 5)


def cut(path: Path, keep: int) -> None:
    path.write_bytes(path.read_bytes()[:keep])


def flip(path: Path) -> None:
    raw = bytearray(path.read_bytes())
    raw[-1] ^= 1
    path.write_bytes(raw)


BREAKAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "weights cut": (lambda folder: cut(folder / "weights.safetensors", 9), "weights.safetensors: .* 9 bytes found"),
    "optimizer cut": (lambda folder: cut(folder / OPTIMIZER_FILE, 0), f"{OPTIMIZER_FILE}: .* 0 bytes found"),
    "optimizer gone": (lambda folder: (folder / OPTIMIZER_FILE).unlink(), f"{OPTIMIZER_FILE} is missing"),
    "one bit": (lambda folder: flip(folder / OPTIMIZER_FILE), f"{OPTIMIZER_FILE}: its sha256"),
    "state cut": (lambda folder: cut(folder / STATE_FILE, 100), f"{STATE_FILE} is cut or not JSON"),
    "state gone": (lambda folder: (folder / STATE_FILE).unlink(), f"{STATE_FILE} is missing"),
    "another tool's": (lambda folder: (folder / STATE_FILE).write_text('{"step": 7}'), "not a checkpoint of lema"),
    "field gone": (lambda folder: edit(folder, seed=None), "seed: int expected, None found"),
    "path outside": (lambda folder: edit(folder, files={"../x": {}, OPTIMIZER_FILE: {}}), "lists '../x' wrongly"),
}  # fmt: skip


def edit(folder: Path, **changes: object) -> None:
    values = json.loads((folder / STATE_FILE).read_text())
    (folder / STATE_FILE).write_text(json.dumps({**values, **changes}))


@pytest.mark.parametrize(("damage", "reason"), BREAKAGES.values(), ids=BREAKAGES.keys())
def test_a_broken_newest_checkpoint_is_passed_over_and_named(
    tmp_path: Path, damage: Callable[[Path], object], reason: str
) -> None:
    save(tmp_path, 5)
    damage(save(tmp_path, 10))
    newest, skipped = latest_complete(tmp_path)
    assert newest == tmp_path / "checkpoint-5"
    assert len(skipped) == 1 and "checkpoint-10: incomplete: " in skipped[0] and "\n" not in skipped[0]
    with pytest.raises(IncompleteError, match=f"checkpoint-10: incomplete: .*{reason}"):
        read_checkpoint(tmp_path / "checkpoint-10")
    with pytest.raises(CheckpointError):
        rotate(tmp_path / "checkpoint-10", 1)
    save(tmp_path, 10)
    assert_whole(tmp_path / "checkpoint-10", 10)
    assert latest_complete(tmp_path) == (tmp_path / "checkpoint-10", [])


def test_a_checkpoint_of_another_format_is_refused_by_its_number(tmp_path: Path) -> None:
    save(tmp_path, 5)
    for version in (FORMAT_VERSION - 1, FORMAT_VERSION + 1):
        edit(save(tmp_path, 10), format_version=version)
        for call in (lambda: read_checkpoint(tmp_path / "checkpoint-10"), lambda: latest_complete(tmp_path)):
            with pytest.raises(CheckpointError, match=f"format {FORMAT_VERSION} expected, {version} found") as caught:
                call()
            assert not isinstance(caught.value, IncompleteError)


def test_a_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="checkpoint-7: no such checkpoint folder"):
        verify(tmp_path / "checkpoint-7")
    assert latest_complete(tmp_path / "nowhere") == (None, [])
    assert find_checkpoints(tmp_path / "nowhere") == []


def test_checkpoints_are_found_by_number_not_by_name(tmp_path: Path) -> None:
    for step in (100, 9, 20):
        save(tmp_path, step)
    (tmp_path / "checkpoint-007").mkdir()
    (tmp_path / "checkpoint-last").mkdir()
    (tmp_path / "checkpoint-300").write_text("a file")
    assert [step for step, _ in find_checkpoints(tmp_path)] == [9, 20, 100]


def test_rotation_keeps_the_newest_and_counts_only_complete_ones(tmp_path: Path) -> None:
    for step in (1, 2, 3, 4, 5):
        save(tmp_path, step)
    (tmp_path / "checkpoint-4" / STATE_FILE).unlink()
    later = save(tmp_path, 99)
    assert rotate(tmp_path / "checkpoint-5", None) == []
    assert rotate(tmp_path / "checkpoint-5", 2) == [tmp_path / "checkpoint-1", tmp_path / "checkpoint-2"]
    assert [step for step, _ in find_checkpoints(tmp_path)] == [3, 4, 5, 99]
    assert rotate(tmp_path / "checkpoint-5", 1) == [tmp_path / "checkpoint-3"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint-4", "checkpoint-5", later.name]
    with pytest.raises(ConfigError, match="save_total_limit"):
        rotate(tmp_path / "checkpoint-5", 0)


def test_leftovers_are_put_right_and_those_of_living_processes_stay(tmp_path: Path) -> None:
    dead = os.fork()
    if dead == 0:
        os._exit(0)
    os.waitpid(dead, 0)
    whole = save(tmp_path, 5)
    whole.rename(tmp_path / f".checkpoint-5.old-{dead}")
    for name in (f".checkpoint-6.tmp-{dead}", f".checkpoint-7.del-{dead}", f".checkpoint-8.tmp-{os.getppid()}"):
        (tmp_path / name).mkdir()
    (tmp_path / ".mine.tmp-1").mkdir()
    messages = clean_leftovers(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        f".checkpoint-8.tmp-{os.getppid()}",
        ".mine.tmp-1",
        "checkpoint-5",
    ]
    assert_whole(whole, 5)
    for part in ("put back", "checkpoint-6.tmp-", "checkpoint-7.del-", "is running"):
        assert sum(part in message for message in messages) == 1, messages
    assert clean_leftovers(tmp_path / "nowhere") == []


def test_a_folder_with_other_files_in_it_is_not_replaced(tmp_path: Path) -> None:
    folder = save(tmp_path, 5)
    (folder / "notes.txt").write_text("mine")
    with pytest.raises(CheckpointError, match=r"would be lost: notes\.txt"):
        save(tmp_path, 5)
    assert (folder / "notes.txt").read_text() == "mine"
    (tmp_path / "checkpoint-6").write_text("a file")
    with pytest.raises(CheckpointError, match="checkpoint-6: a folder expected"):
        save(tmp_path, 6)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint-5", "checkpoint-6"]


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match=r"file/checkpoint-1: cannot be written: (Not a directory|File exists)"):
        save(tmp_path / "file", 1)


def test_the_state_survives_json_and_nothing_in_the_folder_is_a_pickle(tmp_path: Path) -> None:
    state = state_at(7)
    state.rng = {"numpy": [1, 2, 3]}
    state.tokens, state.skipped_steps, state.non_finite_in_a_row = 10**12, 2, 1
    write_checkpoint(tmp_path / "checkpoint-7", state, Files())
    assert verify(tmp_path / "checkpoint-7") == state
    assert sorted(path.name for path in (tmp_path / "checkpoint-7").iterdir()) == [OPTIMIZER_FILE, STATE_FILE]
    for path in (tmp_path / "checkpoint-7").iterdir():
        assert not path.read_bytes().startswith((b"\x80", b"PK"))


@pytest.mark.parametrize("value", [float("nan"), torch.zeros(1), {1, 2}])
def test_a_state_that_is_not_plain_json_is_refused(tmp_path: Path, value: object) -> None:
    state = state_at(1)
    state.config = {"value": value}
    with pytest.raises(CheckpointError, match="config is not plain JSON"):
        write_checkpoint(tmp_path / "checkpoint-1", state, Files())
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("changes", [{"step": "7"}, {"step": True}, {"lr_schedule": 1}, {"extra": 1}])
def test_state_fields_of_another_type_are_refused(changes: dict[str, object]) -> None:
    with pytest.raises(CheckpointError, match=r"(expected, |unknown: extra)"):
        TrainerState.from_json({**state_at(1).to_json(), **changes})


def test_a_resume_in_a_new_process_needs_no_pickle(tmp_path: Path) -> None:
    save(tmp_path, 3)

    def resume() -> None:
        import pickle

        def forbidden(*args: object, **kwargs: object) -> None:
            raise AssertionError("unpickled")

        pickle.load = pickle.loads = pickle.Unpickler = torch.load = forbidden
        assert_whole(tmp_path / "checkpoint-3", 3)

    assert in_child(resume) == (0, "")


def test_a_folder_is_swapped_in_as_a_whole(tmp_path: Path) -> None:
    final = tmp_path / "saved"
    for content in ("one", "two"):
        with atomic_folder(final, 10) as folder:
            assert folder.parent == tmp_path and folder.name.startswith(".saved.tmp-")
            (folder / "a").write_text(content)
            assert not final.exists() or (final / "a").read_text() == "one"
        assert (final / "a").read_text() == content
    assert [path.name for path in tmp_path.iterdir()] == ["saved"]
