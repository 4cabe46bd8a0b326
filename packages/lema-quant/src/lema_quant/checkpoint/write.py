"""Writes a quantized checkpoint, a block of rows at a time: as much memory for a model of any size.

Files come into being in ``.NAME.quantizing`` beside the place of the whole, each under its name only when it is
complete, and what is known of the finished ones in ``progress.json``. Whoever begins the same again goes on after the
last of them; another base, or other options, begin anew.
"""

from __future__ import annotations

import json
import os
import shutil
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from lema_core.atomic import check_target, put_in_place, room_for, write_json
from lema_core.checkpoint import TensorInfo, TensorToWrite, read_elements, write_safetensors
from lema_core.checkpoint.manifest import INDEX_NAME
from lema_core.errors import CheckpointError
from lema_core.files import sha256_of_file
from lema_core.locks import is_open_at, lock_file
from lema_core.quantization.codec import NotFiniteWeight
from lema_core.quantization.report import ErrorMeter, QuantizationReport, TensorReport
from lema_quant.checkpoint.plan import PlannedFile, PlannedTensor, QuantizationPlan, Recipe, plan_quantization
from lema_quant.checkpoint.result import (
    REPORT_FILE,
    QuantizedCheckpoint,
    read_quantized,
    tensor_from_json,
    tensor_to_json,
)

_PROGRESS_FILE, _LOCK_FILE = "progress.json", ".lock"
#: numbers of a block: the few that are on their way at once take about a granule's memory
_BLOCK = 1 << 20
_MOST_THREADS = 8

_Done = TypeVar("_Done")

#: is told the bytes of the base that are done, and how many there are
Progress = Callable[[int, int], None]


def quantize_checkpoint(
    folder: str | Path,
    output_dir: str | Path,
    bits: int,
    backend: str = "auto",
    format: str | None = None,
    exclude: tuple[str, ...] = (),
    progress: Progress = lambda done, total: None,
    say: Callable[[str], object] = print,
) -> QuantizedCheckpoint:
    """Write the model in ``folder`` to ``output_dir`` with the weights of its linears, experts and head in ``bits`` (8
    or 4) bits; an output_dir that a finished run left is replaced, an interrupted one is gone on with.

    ``backend``: custom, torchao, quanto, bitsandbytes, what a plugin brings, or auto. ``format``: a wire format; None:
    what bits and backend mean. ``exclude``: shell patterns of names, or parts of names, of tensors that stay as they
    are. ``say`` hears of backends that cannot serve, and of what is gone on with.

    Raises CheckpointError for a model that is quantized already or broken, naming the tensor that holds NaN or infinite
    numbers, for an output_dir that may not be written over, or too little room; ConfigError for a backend, a format or
    a pattern that means nothing.
    """
    plan = plan_quantization(Path(folder).expanduser(), Recipe(bits, backend, format, tuple(exclude)), say)
    return write_quantized(plan, Path(output_dir).expanduser(), progress, say)


def write_quantized(
    plan: QuantizationPlan,
    output_dir: Path,
    progress: Progress = lambda done, total: None,
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
            shutil.rmtree(working)
            return found
        done = _Finished(plan, working, say)
        left = sum(file.needed_bytes for file in plan.files if file.name not in done.files)
        try:
            with room_for(final, left + plan.beside_bytes):
                made = _write_files(plan, working, done, progress)
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
            if kept is None or not path.is_file() or path.stat().st_size != kept["bytes"]:
                continue
            if sha256_of_file(path) == kept["sha256"]:
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
        self.files[path.name] = {"bytes": path.stat().st_size, "sha256": sha256_of_file(path), "tensors": described}
        write_json(self._path, {"identity": self._plan.identity, "files": self.files})

    def reports(self, name: str) -> list[TensorReport]:
        return [tensor_from_json(each) for each in self.files[name]["tensors"]]


def _write_files(plan: QuantizationPlan, working: Path, done: _Finished, progress: Progress) -> QuantizedCheckpoint:
    tensors: list[TensorReport] = []
    read_bytes = 0

    def advance(nbytes: int) -> None:
        nonlocal read_bytes
        read_bytes += nbytes
        progress(read_bytes, plan.source_nbytes)

    for file in plan.files:
        if file.name in done.files:
            advance(file.source_nbytes)
        else:
            done.add(working / file.name, _write_file(working / file.name, file, advance))
        tensors += done.reports(file.name)
    recipe, report = plan.recipe, QuantizationReport.of(tensors)
    return QuantizedCheckpoint(
        working, recipe.bits, recipe.format, recipe.backend, plan.identity, report, reused_files=done.count
    )


def _write_file(path: Path, file: PlannedFile, advance: Callable[[int], None]) -> list[TensorReport]:
    reports: list[TensorReport] = []
    # processors that compute, and one block more that is read or written meanwhile
    threads = max(1, min(_MOST_THREADS, torch.get_num_threads())) + 1
    with ThreadPoolExecutor(threads, "quantize") as pool:
        run = _Run(pool, threads, advance, reports.append)
        ways = [(_Kept if tensor.codec is None else _Encoded)(tensor, run) for tensor in file.tensors]
        write_safetensors(path, [entry for way in ways for entry in way.entries()], file.metadata)
    return reports


@dataclass(frozen=True)
class _Run:
    """What tensors on their way share: threads, who is told the bytes that are done, and who the finished tensors."""

    pool: ThreadPoolExecutor
    ahead: int
    advance: Callable[[int], None]
    told: Callable[[TensorReport], None]

    def in_order(self, work: Callable[[int, Tensor], _Done], source: TensorInfo) -> Iterator[_Done]:
        """What ``work`` makes of each block of rows, [r, ...], and its first row's number; several at once, in the
        order of the rows."""
        row = prod(source.shape[1:])
        rows = source.shape[0] if source.shape else 1
        step = max(1, _BLOCK // max(1, row))

        def done(start: int) -> _Done:
            stop = min(start + step, rows)
            block = read_elements(source, start * row, (stop - start) * row).view(stop - start, *source.shape[1:])
            return work(start, block)

        coming: deque[Future[_Done]] = deque()
        for start in range(0, rows, step):
            coming.append(self.pool.submit(done, start))
            if len(coming) == self.ahead:
                yield coming.popleft().result()
        while coming:
            yield coming.popleft().result()


class _Kept:
    """A tensor that stays as it is, on its way."""

    def __init__(self, tensor: PlannedTensor, run: _Run) -> None:
        self._tensor = tensor
        self._run = run

    def entries(self) -> list[TensorToWrite]:
        return [(*stored, self._blocks) for stored in self._tensor.stored]

    def _blocks(self) -> Iterator[Tensor]:
        tensor, source = self._tensor, self._tensor.source
        for block in self._run.in_order(self._checked, source):
            yield block
            self._run.advance(block.nbytes)
        self._run.told(TensorReport(tensor.name, source.shape, source.nbytes, tensor.nbytes, reason=tensor.kept))

    def _checked(self, start: int, block: Tensor) -> Tensor:
        source = self._tensor.source
        if block.dtype.is_floating_point and block.dtype.itemsize > 1 and not bool(block.isfinite().all()):
            raise CheckpointError(
                f"{source.segment.path}: tensor {source.name!r} holds values that are infinite or NaN: download the "
                "model again"
            )
        return block


class _Encoded:
    """One tensor on its way. The payload is written as it comes, and the scales, a small part of it, after it."""

    def __init__(self, tensor: PlannedTensor, run: _Run) -> None:
        self._tensor = tensor
        self._run = run
        self._parts = tensor.codec.format.parts(tensor.source.shape)
        self._beside: list[Tensor] = []

    def entries(self) -> list[TensorToWrite]:
        values: list[Callable[[], Any]] = [
            self._payload,
            *(lambda i=i: self._scales(i) for i in range(len(self._parts) - 1)),
        ]
        return [(*stored, get) for stored, get in zip(self._tensor.stored, values, strict=True)]

    def _payload(self) -> Iterator[Tensor]:
        tensor, source, codec = self._tensor, self._tensor.source, self._tensor.codec
        self._beside = [torch.empty(part.shape, dtype=part.dtype) for part in self._parts[1:]]
        meter = ErrorMeter(source.shape[1])
        for codes, meter_of_block, nbytes in self._run.in_order(self._encode, source):
            meter.include(meter_of_block)
            yield codes
            self._run.advance(nbytes)
        self._run.told(
            TensorReport.quantized(tensor.name, source.shape, source.nbytes, codec.format, codec.backend, meter)
        )

    def _encode(self, start: int, block_rK: Tensor) -> tuple[Tensor, ErrorMeter, int]:
        source, codec = self._tensor.source, self._tensor.codec
        codes = torch.empty((len(block_rK), *self._parts[0].shape[1:]), dtype=self._parts[0].dtype)
        parts = (codes, *(part[start : start + len(block_rK)] for part in self._beside))
        try:
            codec.encode(block_rK, parts)
        except NotFiniteWeight as error:
            raise CheckpointError(
                f"{source.segment.path}: tensor {source.name!r}: row {start + error.row}, column {error.column} is "
                f"{error.value}, which no code stands for: download the model again, or keep the tensor as it is with "
                f"quant_exclude=[{self._tensor.name}]"
            ) from error
        meter = ErrorMeter(source.shape[1])
        meter.add(codec.format, block_rK, parts)
        return codes, meter, block_rK.nbytes

    def _scales(self, index: int) -> Tensor:
        scales, self._beside[index] = self._beside[index], torch.empty(0)
        return scales


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


def _lock(working: Path, lock: int, say: Callable[[str], object]) -> None:
    path = working / _LOCK_FILE
    try:
        locked = lock_file(path, lock)
    except BlockingIOError:
        say(f"{working}: another process quantizes this model there; waiting for it")
        locked = lock_file(path, lock, wait=True)
    if not locked:
        say(f"{working}: its file system keeps no locks: see to it that no other process quantizes there")
