"""How long a step's pieces take on this machine: some are computed, with the run's kernels on weights that are made up.

A step is layers that look alike, a head, and an update. One of each kind is timed, and set against what a machine's
rates say of the same pieces: the ratio, *pace*, holds for the step. It takes the memory of one part of the weights,
and of one gradient where weights train, beside what a step holds, and about a second for a large model.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from math import prod
from statistics import median

import torch
from torch import Tensor

from lema_core.adapter import ModelAdapter
from lema_core.device import Device
from lema_core.ops.adamw import AdamWRates
from lema_core.ops.context import Segment
from lema_core.ops.gradient import backward_from
from lema_core.ops.gradients import Gradients, with_tied
from lema_core.ops.kernels import Kernels
from lema_core.ops.low_rank import LowRankUpdate
from lema_core.ops.streamed import StreamedOps
from lema_core.planning.hardware import Hardware
from lema_core.planning.predict import compute_s
from lema_core.quantization.block import WeightBlock
from lema_core.runtime.piece_run import Level, PieceRun, segment
from lema_core.runtime.schedule import ENOUGH_TOKENS, Kind, MicroBatch, StepCosts, StepSchedule, StepShape, head_chunks
from lema_core.store.granules import Part, whole_sectors
from lema_core.store.model import StreamedModel
from lema_core.store.trace import Trace

#: a piece is computed on fewer tokens where it would be more than this
_MOST_FLOPS = 2e11
#: each is repeated for so long
_SECONDS, _LEAST_TIMES, _LONG_S = 0.5, 3, 0.4
#: weights are spread over so much where a run has it: caches hold less
_BEYOND_CACHES = 64 << 20
#: of layers at once
_MOST_GRAPHS = 4
#: an update takes as long with any
_RATES = AdamWRates(1e-4, 0.9, 0.999, 1e-8, 0.01, 1)


class Rehearsal:
    """Computes pieces of ``adapter`` on ``model`` with ``updates`` (left as they are) where ``device`` computes.

    ``trained``: names of the weights that train; how they are changed takes no part in it.
    """

    def __init__(
        self,
        adapter: ModelAdapter,
        model: StreamedModel,
        updates: Mapping[str, LowRankUpdate],
        dtype: torch.dtype,
        kernels: Kernels,
        device: Device,
        trained: Iterable[str] = (),
    ) -> None:
        self._adapter = adapter
        self._trained = with_tied(adapter, trained)
        self._model = model
        self._updates = updates
        self._dtype = dtype
        self._kernels = kernels
        self._device = device
        self._gradients: Gradients | None = None

    def pace(
        self, costs: StepCosts, shape: StepShape, schedule: StepSchedule, rates: Hardware, window_bytes: int
    ) -> float:
        """How many times longer than ``rates`` say a step of ``shape`` computes that is run by ``schedule``, with so
        many bytes for its weights."""
        measured_s = expected_s = 0.0
        nbytes = min(window_bytes, _BEYOND_CACHES)
        weights = _MadeUpWeights(self._model, self._device, nbytes)
        self._gradients = _MadeUpGradients(self._model, self._device, nbytes, self._trained) if self._trained else None
        graphs = max(1, min(_MOST_GRAPHS, sum(level is Level.GRAPH for level in schedule.levels)))
        for kind in costs.kinds(shape):
            micro_batches = _fewer(kind, costs, shape)
            expected_s += kind.count * compute_s(costs.layer_trace(kind.layer, micro_batches), rates)
            measured_s += kind.count * self._layer_s(weights, kind.layer, micro_batches, graphs)
        pieces, times = _of_head(costs, shape, self._adapter.vocab_size)
        expected_s += times * compute_s(costs.head_trace(pieces), rates)
        measured_s += times * self._head_s(weights, pieces)
        self._gradients = None
        self._device.trim()
        return measured_s / expected_s

    def _layer_s(self, weights: _MadeUpWeights, layer: int, micro_batches: Sequence[MicroBatch], graphs: int) -> float:
        """A block's pass that keeps its graph, its gradient, and the update of what is trained in it."""
        updates = self._copies(layer)
        run = PieceRun(self._adapter, self._ops(weights, updates), _segments(micro_batches, self._device))
        parameters = [parameter for update in updates.values() for parameter in update.parameters()]
        moments = [(torch.zeros_like(p), torch.zeros_like(p)) for p in parameters]

        def passes() -> None:
            there = [run.graph(layer) for _ in range(graphs)]
            while there:
                _x, y = there.pop()
                backward_from(y, torch.zeros_like(y))

        @torch.no_grad()
        def update() -> None:
            torch.stack([torch.linalg.vector_norm(p.grad) for p in parameters]).tolist()
            for parameter, (exp_avg, exp_avg_sq) in zip(parameters, moments, strict=True):
                self._kernels.adamw.update(parameter, parameter.grad, exp_avg, exp_avg_sq, _RATES)

        return self._seconds(passes) / graphs + (self._seconds(update) if parameters else 0.0)

    def _head_s(self, weights: _MadeUpWeights, pieces: Sequence[int]) -> float:
        """A chunk of the head and its gradient, tokens of one micro-batch beside those of another."""
        segments = _segments([MicroBatch(1, tokens, tokens) for tokens in pieces], self._device)
        run = PieceRun(self._adapter, self._ops(weights, {}), segments)
        return self._seconds(lambda: run.head(True, True))

    def _seconds(self, what: Callable[[], None]) -> float:
        """The median of several times after a first one, which is enough of what takes long; the device's part
        included."""
        taken: list[float] = []
        while not taken or (taken[0] < _LONG_S and (len(taken) <= _LEAST_TIMES or sum(taken[1:]) < _SECONDS)):
            start = time.perf_counter()
            what()
            self._device.host_wait(self._device.record())
            taken.append(time.perf_counter() - start)
        return median(taken[1:] or taken)

    def _ops(self, weights: _MadeUpWeights, updates: Mapping[str, LowRankUpdate]) -> StreamedOps:
        where, modules = self._device.torch_device, (self._model.biased_modules, self._model.transposed_modules)
        return StreamedOps(weights, self._kernels, where, self._dtype, updates, *modules, self._gradients)

    def _copies(self, layer: int) -> dict[str, LowRankUpdate]:
        """The updates of ``layer``, with parameters and gradients of their own."""
        names = {spec.module for spec in self._adapter.linear_modules() if spec.layer == layer}
        copies = {}
        for name, update in self._updates.items():
            if name in names:
                lora_A, lora_B = (p.detach().clone().requires_grad_() for p in update.parameters())
                lora_A.grad, lora_B.grad = torch.zeros_like(lora_A), torch.zeros_like(lora_B)
                copies[name] = replace(update, lora_A=lora_A, lora_B=lora_B)
        return copies


class _Memory:
    """Hands out blocks as large as a model's parts, each behind the one before, from the start again at the end."""

    def __init__(self, model: StreamedModel, device: Device, nbytes: int, dtype: torch.dtype | None = None) -> None:
        layouts = [layout for layout in (model.layout, model.experts) if layout is not None]
        blocks = (part for layout in layouts for parts in layout.parts.values() for part in parts)
        largest = max(prod(part.shape) * dtype.itemsize if dtype else _room(part) for part in blocks)
        self.bytes = device.allocate(whole_sectors(max(largest, nbytes)))
        self._next = 0

    def block(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        nbytes = prod(shape) * dtype.itemsize
        start = self._next if self._next + nbytes <= len(self.bytes) else 0
        self._next = start + whole_sectors(nbytes)
        return self.bytes[start : start + nbytes].view(dtype).view(shape)


def _room(part: Part) -> int:
    """Bytes of all that lies in the slot of a part, each behind the one before."""
    return sum(whole_sectors(prod(piece.shape) * piece.dtype.itemsize) for piece in part.stored)


class _MadeUpWeights:
    """A weight source in which all parts lie in the same memory, scales of quantized ones too."""

    def __init__(self, model: StreamedModel, device: Device, nbytes: int) -> None:
        self._model = model
        self._memory = _Memory(model, device, nbytes)
        # Read as fp32 or fp16, such numbers are finite too, and scales; any byte is a code.
        self._memory.bytes.view(torch.bfloat16).normal_(std=0.02)

    def parts(self, name: str) -> tuple[Part, ...]:
        return self._model.parts(name)

    def routed(self, parts: Sequence[Part]) -> AbstractContextManager[None]:
        return nullcontext()

    @contextmanager
    def borrow(self, part: Part) -> Iterator[WeightBlock]:
        yield part.block(lambda offset, dtype, shape: self._memory.block(shape, dtype))

    def rows(self, name: str, ids: Tensor, dtype: torch.dtype) -> Tensor:
        return torch.zeros(ids.numel(), self._model.embeddings[name].shape[1], dtype=dtype)


class _MadeUpGradients(Gradients):
    """Accumulators that all lie in the same memory."""

    def __init__(self, model: StreamedModel, device: Device, nbytes: int, trained: frozenset[str]) -> None:
        self._model = model
        self._trained = trained
        self._memory = _Memory(model, device, nbytes, torch.float32)
        self._memory.bytes.zero_()

    def trains(self, tensor: str) -> bool:
        return tensor in self._trained

    def borrow(self, part: Part) -> AbstractContextManager[Tensor]:
        return nullcontext(self._memory.block(part.shape, torch.float32))

    def row_parts(self, tensor: str) -> tuple[Part, ...]:
        return self._model.parts(tensor)

    def complete(self, layer: int | None) -> None:
        """Nothing waits for it."""


def _fewer(kind: Kind, costs: StepCosts, shape: StepShape) -> list[MicroBatch]:
    """Micro-batches that pass a layer together, as many as are worth the time."""
    most = min(ENOUGH_TOKENS, _worth_it(costs.layer_trace(kind.layer, [MicroBatch(1, 1, 1)])))
    first, *others = shape.micro_batches
    if first.size > most:
        return [replace(first, rows=1, tokens=max(1, min(first.tokens, most)))]
    chosen, left = [first], most - first.size
    for one in others:
        if one.size > left:
            break
        chosen.append(one)
        left -= one.size
    return chosen


def _of_head(costs: StepCosts, shape: StepShape, vocab_size: int) -> tuple[list[int], float]:
    """The pieces of a chunk of the head, as many as are worth the time, and how many times as long the whole head
    takes."""
    chunks = [[piece.tokens for piece in pieces] for pieces in head_chunks(shape, vocab_size)]
    most = _worth_it(costs.head_trace([1]))
    chosen: list[int] = []
    for tokens in chunks[0]:
        if sum(chosen) + tokens > most:
            break
        chosen.append(tokens)
    chosen = chosen or [min(most, chunks[0][0])]
    return chosen, sum(map(sum, chunks)) / sum(chosen)


def _worth_it(one_token: Trace) -> int:
    """Tokens that take no longer than a rehearsal may."""
    return max(1, int(_MOST_FLOPS / sum(work.flops for work in one_token.work)))


def _segments(micro_batches: Sequence[MicroBatch], device: Device) -> list[Segment]:
    segments: list[Segment] = []
    start = 0
    for number, one in enumerate(micro_batches):
        segments.append(segment(number, start, start + one.size, one.rows, one.masked, device.torch_device))
        start += one.size
    return segments
