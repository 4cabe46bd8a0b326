"""Training checkpoints: ``<output_dir>/checkpoint-<step>/``, complete or not there.

=============================== ============================================================
``adapter_config.json``,        LoRA weights in PEFT's format (:mod:`lema_train.peft_format`)
``adapter_model.safetensors``
``delta.safetensors``           or what the model's own weights changed by
                                (:mod:`lema_train.delta`)
``optimizer.safetensors``       optimizer states by parameter name
                                (:mod:`lema_train.optimizer`, :mod:`lema_train.weight_files`)
``trainer_state.json``          :class:`lema_train.state.TrainerState`, ``format_version``,
                                and size and sha256 of the others
=============================== ============================================================

``trainer_state.json`` is written last and vouches for the rest. There is no pickle in it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from lema_core.atomic import atomic_folder, remove_folder, write_json
from lema_core.checkpoint import TensorInfo, read_header, write_safetensors
from lema_core.errors import CheckpointError, ConfigError
from lema_core.files import sha256_of_file
from lema_train.state import FORMAT_VERSION, TrainerState

if TYPE_CHECKING:
    # Who merges needs checkpoints and nothing that trains.
    from lema_core.training import TrainedFiles

STATE_FILE = "trainer_state.json"
OPTIMIZER_FILE = "optimizer.safetensors"
#: room for headers, configs and the state beside tensor data
_OVERHEAD_BYTES = 1_000_000


class IncompleteError(CheckpointError):
    """The folder is not a whole checkpoint: cut, damaged, or not a training checkpoint at all."""


class LatestCheckpoint(NamedTuple):
    """``path`` of the newest complete checkpoint, if any; ``skipped``: a line per newer, incomplete one."""

    path: Path | None
    skipped: list[str]


def checkpoint_folder(output_dir: Path, step: int) -> Path:
    return output_dir / f"checkpoint-{step}"


def checkpoint_bytes(files: TrainedFiles) -> int:
    """Disk space one checkpoint takes at most; for :func:`lema_core.atomic.check_free_space` before a run."""
    return files.nbytes + _OVERHEAD_BYTES


def write_checkpoint(folder: Path, state: TrainerState, trained: TrainedFiles) -> None:
    """Write a whole checkpoint to ``folder``; an existing one is replaced when, and only when, the new one is complete.

    Raises CheckpointError with path, needed and free bytes when the disk is full; then ``folder`` is as it was.
    """
    with atomic_folder(folder, checkpoint_bytes(trained)) as temporary:
        trained.write_weights(temporary)
        write_safetensors(temporary / OPTIMIZER_FILE, trained.states(state.step))
        files = {
            path.name: {"bytes": path.stat().st_size, "sha256": sha256_of_file(path)}
            for path in sorted(temporary.iterdir())
        }
        write_json(temporary / STATE_FILE, {"format_version": FORMAT_VERSION, **state.to_json(), "files": files})


def read_checkpoint(folder: Path) -> tuple[TrainerState, Mapping[str, TensorInfo]]:
    """State of a checkpoint, and where its optimizer's states are, after :func:`verify`."""
    state = verify(folder)
    return state, read_header(folder / OPTIMIZER_FILE).tensors


def verify(folder: Path, *, hashes: bool = True) -> TrainerState:
    """Check that ``folder`` is a complete checkpoint of this format and return its state.

    ``hashes=False`` compares sizes only. Raises IncompleteError (``incomplete: ...``) naming the file and what is
    wrong, CheckpointError for a format version other than this one's, or when there is no such folder.
    """
    if not folder.is_dir():
        raise CheckpointError(f"{folder}: no such checkpoint folder")
    values = _read_state_file(folder)
    version = values.pop("format_version", None)
    if version is None:
        raise IncompleteError(f"{folder}: incomplete: {STATE_FILE} has no format_version: not a checkpoint of lema")
    if version != FORMAT_VERSION:
        raise CheckpointError(
            f"{folder}: checkpoint format {FORMAT_VERSION} expected, {version} found: resume with the version of lema "
            "that wrote it, or start a new run from its LoRA weights"
        )
    files = values.pop("files", None)
    if not isinstance(files, dict) or OPTIMIZER_FILE not in files:
        raise IncompleteError(f"{folder}: incomplete: {STATE_FILE} does not list the checkpoint's files")
    for name, expected in files.items():
        _check_file(folder, name, expected, hashes)
    try:
        return TrainerState.from_json(values)
    except CheckpointError as error:
        raise IncompleteError(f"{folder}: incomplete: {STATE_FILE}: {error}") from error


def find_checkpoints(output_dir: Path) -> list[tuple[int, Path]]:
    """(step, folder) of all that is named like a checkpoint in ``output_dir``, by rising step, complete or not."""
    if not output_dir.is_dir():
        return []
    found = [
        (int(match[1]), path)
        for path in output_dir.iterdir()
        if (match := re.fullmatch(r"checkpoint-(0|[1-9]\d*)", path.name)) and path.is_dir()
    ]
    return sorted(found)


def latest_complete(output_dir: Path) -> LatestCheckpoint:
    """The newest complete checkpoint of ``output_dir``, and why newer ones were passed over.

    Raises CheckpointError for a newer one of another format version: going back further without a word would lose work.
    """
    skipped: list[str] = []
    for _, path in reversed(find_checkpoints(output_dir)):
        try:
            verify(path)
        except IncompleteError as error:
            skipped.append(str(error))
        else:
            return LatestCheckpoint(path, skipped)
    return LatestCheckpoint(None, skipped)


def rotate(newest: Path, keep: int | None) -> list[Path]:
    """Delete the oldest complete checkpoints beside ``newest``, and return them; ``keep`` remain, with ``newest``.

    Nothing is deleted unless ``newest`` is complete. Checkpoints of later steps (of another run), incomplete ones, and
    those of another format do not count and stay. ``keep`` None: all stay. Raises ConfigError for ``keep`` below 1.
    """
    if keep is None:
        return []
    if keep < 1:
        raise ConfigError(f"save_total_limit: a whole number from 1 on, or none, expected, {keep!r} found")
    verify(newest)
    own_step = int(newest.name.rpartition("-")[2])
    older = [path for step, path in find_checkpoints(newest.parent) if step < own_step and _looks_complete(path)]
    doomed = older[: max(0, len(older) - (keep - 1))]
    for path in doomed:
        remove_folder(path)
    return doomed


def _looks_complete(folder: Path) -> bool:
    try:
        verify(folder, hashes=False)
    except CheckpointError:
        return False
    return True


def _read_state_file(folder: Path) -> dict[str, Any]:
    path = folder / STATE_FILE
    if not path.is_file():
        raise IncompleteError(f"{folder}: incomplete: {STATE_FILE} is missing")
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror or error}") from error
    except ValueError as error:
        raise IncompleteError(f"{folder}: incomplete: {STATE_FILE} is cut or not JSON: {error}") from error
    if not isinstance(values, dict):
        raise IncompleteError(f"{folder}: incomplete: {STATE_FILE}: a JSON object expected")
    return values


def _check_file(folder: Path, name: str, expected: Any, hashes: bool) -> None:
    if not isinstance(expected, dict) or Path(name).name != name:
        raise IncompleteError(f"{folder}: incomplete: {STATE_FILE} lists {name!r} wrongly")
    path = folder / name
    if not path.is_file():
        raise IncompleteError(f"{folder}: incomplete: {name} is missing")
    found_bytes = path.stat().st_size
    if found_bytes != expected.get("bytes"):
        raise IncompleteError(
            f"{folder}: incomplete: {name}: {expected.get('bytes')} bytes expected, {found_bytes} bytes found"
        )
    if hashes and sha256_of_file(path) != expected.get("sha256"):
        raise IncompleteError(f"{folder}: incomplete: {name}: its sha256 is not the one {STATE_FILE} gives: damaged")
