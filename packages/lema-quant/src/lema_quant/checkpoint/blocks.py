"""Writes one file of a quantized checkpoint, a block of rows at a time: as much memory for a model of any size.

Threads read and encode blocks, one writes them in order.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cached_property, partial
from itertools import islice
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lema_core.checkpoint import TensorToWrite, read_elements, write_safetensors
from lema_core.errors import CheckpointError
from lema_core.quantization.codec import NotFiniteWeight
from lema_core.quantization.formats import WirePart
from lema_core.quantization.report import ErrorMeter, TensorReport
from lema_quant.checkpoint.plan import PlannedFile, PlannedTensor

#: numbers of a block: the few that are on their way at once take about a granule's memory
_BLOCK = 1 << 20
_MOST_THREADS = 8

#: is told the bytes of the base that were done since it was told last
Advance = Callable[[int], object]


def write_file(path: Path, file: PlannedFile, advance: Advance) -> list[TensorReport]:
    """Write what ``file`` says to ``path``, which appears when it is complete, and tell ``advance`` the bytes of the
    base that are done. Raises CheckpointError naming the tensor that holds NaN or infinite numbers, or when the disk
    refuses."""
    reports: list[TensorReport] = []
    # processors that compute, and one block more that is read or written meanwhile
    threads = max(1, min(_MOST_THREADS, torch.get_num_threads())) + 1
    with ThreadPoolExecutor(threads, "quantize") as pool:
        ways = [
            (_Kept if tensor.codec is None else _Encoded)(tensor, advance, reports.append) for tensor in file.tensors
        ]
        done = _in_order(pool, threads, (piece for way in ways for piece in way.pieces()))
        write_safetensors(path, [entry for way in ways for entry in way.entries(done)], file.metadata)
    return reports


def _in_order(pool: ThreadPoolExecutor, ahead: int, pieces: Iterator[Callable[[], Any]]) -> Iterator[Any]:
    """What ``pieces`` return, in their order; ``ahead`` of them are on their way at once, whosever they are: a disk
    reads on while a tensor comes to its end."""
    coming: deque[Future[Any]] = deque(pool.submit(piece) for piece in islice(pieces, ahead))
    while coming:
        result = coming.popleft().result()
        coming.extend(pool.submit(piece) for piece in islice(pieces, 1))
        yield result
        del result  # before the next one is waited for


class _OnItsWay(ABC):
    """A tensor on its way: read and worked on in blocks of rows by several threads, written in order by one.

    ``advance`` is told the bytes of the base that are done, ``told`` the finished tensor."""

    def __init__(self, tensor: PlannedTensor, advance: Advance, told: Callable[[TensorReport], None]) -> None:
        self._tensor = tensor
        self._advance = advance
        self._told = told
        self._rows = tensor.source.shape[0] if tensor.source.shape else 1
        self._row = prod(tensor.source.shape[1:])
        self._step = max(1, _BLOCK // max(1, self._row))

    def pieces(self) -> Iterator[Callable[[], Any]]:
        """For each block of rows what reads it and works on it."""
        return (partial(self._piece, start) for start in range(0, self._rows, self._step))

    def _piece(self, start: int) -> Any:
        source, rows = self._tensor.source, min(self._step, self._rows - start)
        block = read_elements(source, start * self._row, rows * self._row).view(rows, *source.shape[1:])
        return self._work(start, block)

    def _done(self, done: Iterator[Any]) -> Iterator[Any]:
        """Of what came of the pieces of all tensors, in their order, this one's."""
        return islice(done, len(range(0, self._rows, self._step)))

    @abstractmethod
    def _work(self, start: int, block: Tensor) -> Any: ...

    @abstractmethod
    def entries(self, done: Iterator[Any]) -> list[TensorToWrite]:
        """What the file has of it. They take from ``done`` when they are written."""


class _Kept(_OnItsWay):
    """One that stays as it is."""

    def entries(self, done: Iterator[Any]) -> list[TensorToWrite]:
        return [(*stored, lambda: self._blocks(done)) for stored in self._tensor.stored]

    def _blocks(self, done: Iterator[Any]) -> Iterator[Tensor]:
        tensor, source = self._tensor, self._tensor.source
        for block in self._done(done):
            yield block
            self._advance(block.nbytes)
        self._told(TensorReport(tensor.name, source.shape, source.nbytes, tensor.nbytes, reason=tensor.kept))

    def _work(self, start: int, block: Tensor) -> Tensor:
        source = self._tensor.source
        if block.dtype.is_floating_point and block.dtype.itemsize > 1 and not bool(block.isfinite().all()):
            raise CheckpointError(
                f"{source.segment.path}: tensor {source.name!r} holds values that are infinite or NaN: download the "
                "model again"
            )
        return block


class _Encoded(_OnItsWay):
    """One that is encoded. The payload is written as it comes, and the scales, a small part of it, after it."""

    def pieces(self) -> Iterator[Callable[[], Any]]:
        self._beside = [torch.empty(part.shape, dtype=part.dtype) for part in self._parts[1:]]
        return super().pieces()

    def entries(self, done: Iterator[Any]) -> list[TensorToWrite]:
        values: list[Callable[[], Any]] = [
            lambda: self._payload(done),
            *(lambda i=i: self._scales(i) for i in range(len(self._parts) - 1)),
        ]
        return [(*stored, get) for stored, get in zip(self._tensor.stored, values, strict=True)]

    @cached_property
    def _parts(self) -> tuple[WirePart, ...]:
        return self._tensor.codec.format.parts(self._tensor.source.shape)

    def _payload(self, done: Iterator[Any]) -> Iterator[Tensor]:
        tensor, source, codec = self._tensor, self._tensor.source, self._tensor.codec
        meter = ErrorMeter(source.shape[1])
        for codes, meter_of_block, nbytes in self._done(done):
            meter.include(meter_of_block)
            yield codes
            self._advance(nbytes)
        self._told(TensorReport.quantized(tensor.name, source.shape, source.nbytes, codec.format, codec.backend, meter))

    def _work(self, start: int, block_rK: Tensor) -> tuple[Tensor, ErrorMeter, int]:
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
