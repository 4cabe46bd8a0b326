"""Writes a safetensors file tensor by tensor, holding one tensor, or one block of it, at a time.

The layout follows from dtypes and shapes alone, so the header is written first and the data streams behind it. The
header is padded with spaces, as the format allows, so that data starts at a multiple of 4096 bytes, for direct reads.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from math import prod
from pathlib import Path
from typing import TypeAlias

import torch
from torch import Tensor

from lema_core.checkpoint.header import DTYPE_NAMES, LENGTH_BYTES, MAX_HEADER_BYTES
from lema_core.checkpoint.reading import tensor_bytes
from lema_core.errors import CheckpointError
from lema_core.files import replacing

#: data starts at a multiple of this: the largest block size that direct reads ask for
ALIGNMENT_BYTES = 4096
#: that are on their way to the disk together
_FLUSHED_BYTES = 32 << 20

#: name, dtype, shape, and what returns the tensor when its turn comes: whole, or as blocks that follow each other
TensorToWrite: TypeAlias = tuple[str, torch.dtype, tuple[int, ...], Callable[[], Tensor | Iterable[Tensor]]]


def write_safetensors(
    path: Path, tensors: Iterable[TensorToWrite], metadata: Mapping[str, str] | None = None, *, fsync: bool = True
) -> None:
    """Write ``tensors`` to ``path`` in the order given; each is asked for once, when it is written, and let go.

    A tensor larger than memory comes in blocks: tensors of its dtype, of any shapes, whose elements one after another
    are its own.

    ``metadata`` is added to ``{"format": "pt"}``, which other readers look for. The file appears under its name only
    when it is complete (``fsync``: and on the disk). Raises CheckpointError when a tensor differs from its declared
    dtype or shape, when a name comes twice, or when the disk refuses.
    """
    listed = list(tensors)
    header = _header_bytes(path, listed, {"format": "pt", **(metadata or {})})
    try:
        with replacing(path) as partial, open(partial, "wb", buffering=0) as file:
            with _to_disk(file.fileno()) if fsync else nullcontext(lambda nbytes: None) as written:
                _write_all(file.write, memoryview(header))
                for name, dtype, shape, get in listed:
                    for block in _blocks(path, name, dtype, shape, get()):
                        _write_all(file.write, tensor_bytes(block))
                        written(block.nbytes)
                        del block  # before the next one is asked for
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be written: {error.strerror or error}") from error


@contextmanager
def _to_disk(file: int) -> Iterator[Callable[[int], None]]:
    """Inside, what is written to ``file`` goes on to the disk now and then, beside what comes next; afterwards all of
    it has. Left to the system, a gigabyte begins its way at the end. Yields what is told the bytes."""
    waiting = 0
    with ThreadPoolExecutor(1, "to-disk") as pool:
        flushing: Future[None] | None = None

        def written(nbytes: int) -> None:
            nonlocal waiting, flushing
            waiting += nbytes
            if waiting >= _FLUSHED_BYTES and (flushing is None or flushing.done()):
                if flushing is not None:
                    flushing.result()
                waiting, flushing = 0, pool.submit(os.fdatasync, file)

        yield written
        if flushing is not None:
            flushing.result()
    os.fsync(file)


def _blocks(
    path: Path, name: str, dtype: torch.dtype, shape: tuple[int, ...], given: Tensor | Iterable[Tensor]
) -> Iterator[Tensor]:
    """What is written of a tensor, contiguous on the CPU. Raises CheckpointError when it is not what was declared."""
    expected = f"{path}: tensor {name!r}: {dtype} {list(shape)} expected"
    if isinstance(given, Tensor):
        if given.dtype != dtype or tuple(given.shape) != tuple(shape):
            raise CheckpointError(f"{expected}, {given.dtype} {list(given.shape)} found")
        yield given.detach().cpu().contiguous()
        return
    missing = prod(shape)
    for block in given:
        missing -= block.numel()
        if block.dtype != dtype or missing < 0:
            raise CheckpointError(f"{expected}, a block of {block.dtype} {list(block.shape)} found")
        yield block.detach().cpu().contiguous()
        del block  # before the next one is asked for
    if missing:
        raise CheckpointError(f"{expected}, {missing} elements are missing")


def _header_bytes(path: Path, tensors: list[TensorToWrite], metadata: Mapping[str, str]) -> bytes:
    entries: dict[str, object] = {"__metadata__": dict(metadata)}
    position = 0
    for name, dtype, shape, _ in tensors:
        if name in entries:
            raise CheckpointError(f"{path}: tensor {name!r} given twice, or a reserved name")
        end = position + prod(shape) * dtype.itemsize
        entries[name] = {"dtype": DTYPE_NAMES[dtype], "shape": list(shape), "data_offsets": [position, end]}
        position = end
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode("utf-8")
    text += b" " * (-(LENGTH_BYTES + len(text)) % ALIGNMENT_BYTES)
    if len(text) > MAX_HEADER_BYTES:
        raise CheckpointError(f"{path}: header of {len(text)} bytes is over the format's limit of {MAX_HEADER_BYTES}")
    return len(text).to_bytes(LENGTH_BYTES, "little") + text


def _write_all(write: Callable[[memoryview], int | None], view: memoryview) -> None:
    # one write() takes at most 2 GiB on Linux
    while view:
        view = view[write(view) or 0 :]
