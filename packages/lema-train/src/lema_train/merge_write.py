"""Writes a merged model block by block: as much memory for a model of any size, each number rounded once."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from lema_core.atomic import atomic_folder, check_target, room_for
from lema_core.checkpoint import read_elements, write_safetensors
from lema_core.checkpoint.header import DTYPE_NAMES
from lema_core.checkpoint.manifest import INDEX_NAME
from lema_core.errors import CheckpointError
from lema_core.store.granules import MAX_GRANULE_BYTES
from lema_train.merge import Update, matrix_shape
from lema_train.merge_plan import MergePlan, PlannedFile, PlannedTensor, check_target_file

#: numbers of a block; with the update and the rounded values beside it, less than one granule is in memory
_BLOCK = MAX_GRANULE_BYTES // 32
#: tensors that are named of those whose updates rounding loses
_WORST = 3

#: is told the bytes that were written since it was told last
Advance = Callable[[int], object]


class Rounded(NamedTuple):
    """Of ``updated`` numbers that changes would move in fp32, ``lost`` were put back by rounding to fewer bits."""

    updated: int
    lost: int


@dataclass
class MergeReport:
    """What was written: ``path``, a folder or a file, with so many ``tensors``, ``changed`` ones among them.
    ``rounded``: by name, for those that changed and were rounded."""

    path: Path
    tensors: int = 0
    changed: int = 0
    written_bytes: int = 0
    rounded: dict[str, Rounded] = field(default_factory=dict)

    @property
    def updated(self) -> int:
        return sum(each.updated for each in self.rounded.values())

    @property
    def lost(self) -> int:
        return sum(each.lost for each in self.rounded.values())

    def describe_lost(self, way_out: str) -> str | None:
        """A line for whoever reads what the merge says, None when no update was lost: how many, where most, and
        ``way_out``."""
        if not self.lost:
            return None
        worst = sorted(self.rounded.items(), key=lambda item: item[1].lost, reverse=True)[:_WORST]
        where = ", ".join(f"{name} {each.lost:,} of {each.updated:,}" for name, each in worst if each.lost)
        return (
            f"{self.lost:,} of {self.updated:,} numbers ({100 * self.lost / self.updated:.3g} %) changed by less than "
            f"their type can tell apart and are the base's again, most in {where}; {way_out} keeps such changes"
        )


def write_merged(
    plan: MergePlan, output_dir: Path, sources: Sequence[Path], advance: Advance = lambda nbytes: None
) -> MergeReport:
    """Write what ``plan`` says to ``output_dir``, which appears when it is complete, in place of an earlier one.

    ``sources`` are the folders that are read, of base and adapter. Raises CheckpointError before anything is written
    when ``output_dir`` may not be replaced or its disk has too little room, and naming the tensor when a number is not
    finite, or too large for the type it is stored as.
    """
    final = check_target(output_dir, plan.names, [plan.folder, *sources])
    report = MergeReport(final)
    with atomic_folder(final, plan.needed_bytes) as folder:
        for path in plan.copied:
            (folder / path).parent.mkdir(exist_ok=True)
            shutil.copyfile(plan.folder / path, folder / path)
        if plan.config is not None:
            _write_json(folder / "config.json", plan.config)
        if plan.index is not None:
            _write_json(folder / INDEX_NAME, plan.index)
        for file in plan.files:
            _write_file(folder / file.name, file, report, advance, fsync=False)
    return report


def write_merged_file(file: PlannedFile, path: Path, sources: Sequence[Path]) -> MergeReport:
    """Write one file of a plan to ``path``, which appears when it is complete, in place of an earlier one.

    ``sources`` are the files that are read. Raises CheckpointError as :func:`write_merged` does.
    """
    final = check_target_file(path, sources)
    report = MergeReport(final)
    with room_for(final, file.needed_bytes):
        _write_file(final, file, report, lambda nbytes: None, fsync=True)
    return report


def _write_file(path: Path, file: PlannedFile, report: MergeReport, advance: Advance, *, fsync: bool) -> None:
    def written(nbytes: int) -> None:
        report.written_bytes += nbytes
        advance(nbytes)

    tensors = [
        (tensor.name, tensor.dtype, tensor.source.shape, lambda tensor=tensor: _blocks(tensor, report, written))
        for tensor in file.tensors
    ]
    write_safetensors(path, tensors, file.metadata, fsync=fsync)
    report.tensors += len(tensors)
    report.changed += sum(bool(tensor.changes) for tensor in file.tensors)


def _write_json(path: Path, value: object) -> None:
    # into a folder that is synced as a whole
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _blocks(tensor: PlannedTensor, report: MergeReport, written: Callable[[int], None]) -> Iterator[Tensor]:
    """What is written of a tensor, in blocks; each is told to ``written`` once it is."""
    made = _changed_blocks(tensor, report) if tensor.changes else _same_blocks(tensor)
    for block in made:
        nbytes = block.nbytes
        yield block
        del block  # before the next one is made
        written(nbytes)


def _same_blocks(tensor: PlannedTensor) -> Iterator[Tensor]:
    count = prod(tensor.source.shape)
    for start in range(0, count, _BLOCK):
        block = read_elements(tensor.source, start, min(_BLOCK, count - start))
        yield block if block.dtype == tensor.dtype else _rounded(tensor, block)
        del block


def _changed_blocks(tensor: PlannedTensor, report: MergeReport) -> Iterator[Tensor]:
    rows, columns = matrix_shape(tensor.source)
    step = max(1, _BLOCK // max(1, columns))
    opened: dict[int, Update] = {}
    rounds, updated, lost = tensor.dtype.itemsize < torch.float32.itemsize, 0, 0
    for start in range(0, rows, step):
        stop = min(rows, start + step)
        stored = read_elements(tensor.source, start * columns, (stop - start) * columns).view(stop - start, columns)
        values = stored.to(torch.float32, copy=True)
        for i, change in enumerate(tensor.changes):
            low, high = max(start, change.first_row), min(stop, change.first_row + change.rows)
            if low < high:
                update = opened.pop(i, None) or change.open()
                update(values[low - start : high - start], low - change.first_row)
                if high < change.first_row + change.rows:
                    opened[i] = update
        block = _rounded(tensor, values)
        if rounds:
            moved = values != stored
            updated += int(torch.count_nonzero(moved))
            lost += int(torch.count_nonzero(moved.logical_and_(block == stored.to(tensor.dtype))))
            del moved
        del stored, values
        yield block
        del block
    if rounds:
        report.rounded[tensor.name] = Rounded(updated, lost)


def _rounded(tensor: PlannedTensor, values: Tensor) -> Tensor:
    """``values`` as they are stored. Raises CheckpointError naming the tensor when one is not finite then."""
    block = values.to(tensor.dtype)
    if _is_finite(block):
        return block
    where = f"{tensor.source.segment.path}: tensor {tensor.name!r}"
    if not _is_finite(values):
        cause = "the base or what is merged into it" if tensor.changes else "the base"
        raise CheckpointError(f"{where}: infinite or NaN when merged: {cause} holds values that are not finite")
    name, limit = DTYPE_NAMES[tensor.dtype], torch.finfo(tensor.dtype).max
    raise CheckpointError(
        f"{where}: {values.abs().max():g} when merged, and {name} holds at most {limit:g}: store it as another type, "
        "merge_dtype=bfloat16 or float32"
    )


def _is_finite(values: Tensor) -> bool:
    # in one pass: the least and the greatest of numbers with a NaN among them are NaN
    return all(bool(each.isfinite()) for each in torch.aminmax(values))
