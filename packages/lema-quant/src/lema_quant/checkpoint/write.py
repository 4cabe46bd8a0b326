"""Writes a quantized checkpoint, file by file.

Files come into being in ``.NAME.quantizing`` beside the place of the whole, each under its name only when it is
complete, and what is known of the finished ones in ``progress.json``. Whoever begins the same again goes on after the
last of them; another base, or other options, begin anew.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from lema_core.atomic import check_target, put_in_place, room_for, write_json
from lema_core.checkpoint.manifest import INDEX_NAME
from lema_core.errors import CheckpointError
from lema_core.locks import is_open_at, lock_file
from lema_core.quantization.report import QuantizationReport, TensorReport
from lema_quant.checkpoint.blocks import Advance, write_file
from lema_quant.checkpoint.plan import QuantizationPlan, Recipe, plan_quantization, stamp_of
from lema_quant.checkpoint.result import (
    REPORT_FILE,
    QuantizedCheckpoint,
    read_quantized,
    tensor_from_json,
    tensor_to_json,
)

_PROGRESS_FILE, _LOCK_FILE = "progress.json", ".lock"


def quantize_checkpoint(
    folder: str | Path,
    output_dir: str | Path,
    bits: int,
    backend: str = "auto",
    format: str | None = None,
    exclude: tuple[str, ...] = (),
    advance: Advance = lambda nbytes: None,
    say: Callable[[str], object] = print,
) -> QuantizedCheckpoint:
    """Write the model in ``folder`` to ``output_dir`` with the weights of its linears, experts and head in ``bits`` (8
    or 4) bits; an output_dir that a finished run left is replaced, an interrupted one is gone on with.

    ``backend``: custom, torchao, quanto, bitsandbytes, what a plugin brings, or auto. ``format``: a wire format; None:
    what bits and backend mean. ``exclude``: shell patterns of names, or parts of names, of tensors that stay as they
    are. ``advance`` is told the bytes of the base that were done since it was told last; ``say`` hears of backends that
    cannot serve, and of what is gone on with.

    Raises CheckpointError for a model that is quantized already or broken, naming the tensor that holds NaN or infinite
    numbers, for an output_dir that may not be written over, or too little room; ConfigError for a backend, a format or
    a pattern that means nothing.
    """
    plan = plan_quantization(Path(folder).expanduser(), Recipe(bits, backend, format, tuple(exclude)), say)
    return write_quantized(plan, Path(output_dir).expanduser(), advance, say)


def write_quantized(
    plan: QuantizationPlan,
    output_dir: Path,
    advance: Advance = lambda nbytes: None,
    say: Callable[[str], object] = print,
) -> QuantizedCheckpoint:
    """Write what ``plan`` says to ``output_dir``, which appears when it is complete. One that is there already and was
    made of the same base in the same way is left as it is. Raises CheckpointError as :func:`quantize_checkpoint`."""
    final = check_target(output_dir, plan.names, [plan.folder])
    working = final.with_name(f".{final.name}.quantizing")
    if (found := finished(plan, final)) is not None:
        return found
    with _alone_in(working, say):
        # another process may have made it while this one waited
        if (found := finished(plan, final)) is not None:
            _leave(working)
            return found
        done = _Finished(plan, working, say)
        left = sum(file.needed_bytes for file in plan.files if file.name not in done.files)
        try:
            with room_for(final, left + plan.beside_bytes):
                made = _write_files(plan, working, done, advance)
                _write_beside(plan, working, made)
                (working / _PROGRESS_FILE).unlink()
                (working / _LOCK_FILE).unlink()
                put_in_place(working, final)
        except BaseException:
            if not done.files:
                shutil.rmtree(working, ignore_errors=True)
            raise
    return replace(made, path=final)


def finished(plan: QuantizationPlan, final: Path) -> QuantizedCheckpoint | None:
    """The checkpoint in ``final`` when ``plan`` would only make it again; None when there is none."""
    found = read_quantized(final)
    return found if found is not None and found.identity == plan.identity else None


class _Finished:
    """The files in ``working`` that an interrupted run had finished: their reports, by name."""

    def __init__(self, plan: QuantizationPlan, working: Path, say: Callable[[str], object]) -> None:
        self._plan = plan
        self._path = working / _PROGRESS_FILE
        self.files: dict[str, dict[str, Any]] = {}
        found = self._read()
        for file in plan.files if found.get("identity") == plan.identity else ():
            kept = found.get("files", {}).get(file.name)
            path = working / file.name
            if kept is None or not path.is_file():
                continue
            if list(stamp_of(path)) == kept["stamp"]:
                self.files[file.name] = kept
            else:
                say(f"{path}: changed since it was written, and is made anew")
        #: how many there were at the start
        self.count = len(self.files)
        if self.files:
            say(f"{working}: {len(self.files)} of {len(plan.files)} files are finished, and are kept")
        for path in working.iterdir():
            if path.name not in {*self.files, _PROGRESS_FILE, _LOCK_FILE}:
                shutil.rmtree(path) if path.is_dir() else path.unlink()

    def _read(self) -> dict[str, Any]:
        try:
            found = json.loads(self._path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}  # nothing was finished
        return found if isinstance(found, dict) else {}

    def add(self, path: Path, tensors: list[TensorReport]) -> None:
        """``path`` is complete and on the disk."""
        described = [tensor_to_json(each) for each in tensors]
        self.files[path.name] = {"stamp": stamp_of(path), "tensors": described}
        write_json(self._path, {"identity": self._plan.identity, "files": self.files})

    def reports(self, name: str) -> list[TensorReport]:
        return [tensor_from_json(each) for each in self.files[name]["tensors"]]


def _write_files(plan: QuantizationPlan, working: Path, done: _Finished, advance: Advance) -> QuantizedCheckpoint:
    tensors: list[TensorReport] = []
    for file in plan.files:
        if file.name in done.files:
            advance(file.source_nbytes)
        else:
            done.add(working / file.name, write_file(working / file.name, file, advance))
        tensors += done.reports(file.name)
    recipe, report = plan.recipe, QuantizationReport.of(tensors)
    return QuantizedCheckpoint(
        working, recipe.bits, recipe.format, recipe.backend, plan.identity, report, reused_files=done.count
    )


def _write_beside(plan: QuantizationPlan, working: Path, made: QuantizedCheckpoint) -> None:
    for path in plan.copied:
        (working / path).parent.mkdir(exist_ok=True)
        shutil.copyfile(plan.folder / path, working / path)
    write_json(working / "config.json", dict(plan.config))
    if plan.index is not None:
        write_json(working / INDEX_NAME, plan.index)
    sizes = {file.name: (working / file.name).stat().st_size for file in plan.files}
    write_json(working / REPORT_FILE, {"files": sizes, **made.to_json()})


@contextmanager
def _alone_in(working: Path, say: Callable[[str], object]) -> Iterator[None]:
    """Inside, ``working`` is there and no other process writes it; one that does is waited for."""
    while True:
        try:
            working.mkdir(parents=True, exist_ok=True)
            lock = os.open(working / _LOCK_FILE, os.O_CREAT | os.O_RDWR, 0o644)
        except FileNotFoundError:
            continue  # it was finished, and moved to its place, in between
        except OSError as error:
            raise CheckpointError(f"{working}: cannot be written: {error.strerror or error}") from error
        try:
            _lock(working, lock, say)
            if not is_open_at(working / _LOCK_FILE, lock):
                continue  # whoever had it is through
            yield
            return
        finally:
            os.close(lock)


def _leave(working: Path) -> None:
    """Remove it, unless another process has come in since the lock is gone: that one removes it."""
    try:
        shutil.rmtree(working)
    except OSError as error:
        if error.errno != errno.ENOTEMPTY:
            raise


def _lock(working: Path, lock: int, say: Callable[[str], object]) -> None:
    path = working / _LOCK_FILE
    try:
        locked = lock_file(path, lock)
    except BlockingIOError:
        say(f"{working}: another process quantizes this model there; waiting for it")
        locked = lock_file(path, lock, wait=True)
    if not locked:
        say(f"{working}: its file system keeps no locks: see to it that no other process quantizes there")
