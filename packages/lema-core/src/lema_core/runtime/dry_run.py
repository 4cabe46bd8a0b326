"""What the pieces of a step borrow, compute and allocate, found by running each once on a few tokens.

Weights are zeros without memory behind them and nothing is multiplied, so a piece takes about a millisecond whatever
the model's size; what it allocates is counted as torch makes it. (Torch's meta device would do the same with no data
at all, but the first step on it loads torch's compiler: 77 MB and seconds.) Shapes: B rows, T tokens, N = B * T, C
hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property

import torch

from lema_core.adapter import ModelAdapter
from lema_core.ops.gradients import with_tied
from lema_core.ops.kernels import Kernels
from lema_core.ops.linear import LinearKernel
from lema_core.ops.low_rank import LowRankUpdate
from lema_core.runtime.piece_run import Level, Observer, PieceRun, segment
from lema_core.runtime.stand_in import (
    ByteCounter,
    CountingOps,
    StandInGradients,
    StandInKernel,
    StandInWeights,
    nbytes_of,
    tensors_in,
    zeros_without_memory,
)
from lema_core.store.granules import Part
from lema_core.store.model import StreamedModel
from lema_core.store.trace import Work

#: tokens of the two runs that amounts are solved from. Those of the second pair fill whole vector registers, whatever
#: the model's sizes: what torch allocates for rests differs between the runs of the first, where there are any.
_FEW_AND_MORE = (8, 16), (64, 128)


@dataclass(frozen=True)
class Packing:
    """What the tokens of a piece are: of ``several`` micro-batches, with padding that attention needs a mask for."""

    several: bool = False
    masked: bool = False


ALONE = Packing()


@dataclass(frozen=True)
class Amount:
    """``fixed + per_token * tokens``."""

    fixed: float
    per_token: float

    def at(self, tokens: int) -> float:
        return self.fixed + self.per_token * tokens

    @classmethod
    def through(cls, few: tuple[int, float], more: tuple[int, float]) -> Amount:
        """From two runs: tokens and what they took."""
        per_token = (more[1] - few[1]) / (more[0] - few[0])
        return cls(few[1] - per_token * few[0], per_token)


@dataclass(frozen=True)
class Peak:
    """The largest of amounts: what holds most with few tokens need not do so with many."""

    amounts: tuple[Amount, ...]

    def at(self, tokens: int) -> float:
        return max(amount.at(tokens) for amount in self.amounts)

    @classmethod
    def of(cls, amounts: Iterable[Amount]) -> Peak:
        """Without those that are nowhere the largest."""
        kept: list[Amount] = []
        for amount in sorted(set(amounts), key=lambda amount: (amount.per_token, amount.fixed), reverse=True):
            if not kept or amount.fixed > max(other.fixed for other in kept):
                kept.append(amount)
        return cls(tuple(kept))


@dataclass(frozen=True)
class Doing:
    """What follows one access: FLOPs of products per token, of attention per token and per token of its row, bytes
    touched, operations."""

    flops: float
    pair_flops: float
    touched: Amount
    operations: int


@dataclass(frozen=True)
class PieceCost:
    """``doing``: after each access; of a piece that borrows nothing all there is. ``peak``: bytes alive at most beyond
    those before; ``left``: bytes alive at the end, results included."""

    doing: tuple[Doing, ...]
    peak: Peak
    left: Amount


@dataclass(frozen=True)
class Piece:
    """A part of a step: the granules it borrows, in order, and what it costs."""

    accesses: tuple[int, ...]
    cost: PieceCost

    def work(self, tokens: int, row_tokens: int) -> tuple[Work, ...]:
        """What follows each access, or all there is without one, for ``tokens`` in rows of ``row_tokens``."""
        return tuple(
            Work(tokens * (d.flops + d.pair_flops * row_tokens), tokens, d.touched.at(tokens), d.operations)
            for d in self.cost.doing
        )


class DryRun:
    """Pieces of steps of ``adapter`` on ``model`` with ``updates``; each found when first asked for, then kept.

    ``kernels``: the run's, all but the products of which allocate as in a step. ``trained``: names of the weights that
    train.
    """

    def __init__(
        self,
        adapter: ModelAdapter,
        model: StreamedModel,
        updates: Mapping[str, LowRankUpdate],
        dtype: torch.dtype,
        kernels: Kernels,
        trained: frozenset[str] = frozenset(),
    ) -> None:
        self.adapter = adapter
        self.dtype = dtype
        self._trained_weights = with_tied(adapter, trained)
        self._kernels = kernels
        self._model = model
        self._updates = {
            name: replace(
                update,
                lora_A=zeros_without_memory(update.lora_A.shape, torch.float32).requires_grad_(),
                lora_B=zeros_without_memory(update.lora_B.shape, torch.float32).requires_grad_(),
            )
            for name, update in updates.items()
        }
        self._names: dict[int | None, list[str]] = {}
        for spec in adapter.tensors():
            if spec.name in model.layout.parts:
                self._names.setdefault(spec.layer, []).append(spec.name)
        self._trains: dict[int | None, list[str]] = {layer: [] for layer in self._names}
        for spec in adapter.linear_modules():
            if spec.module in updates:
                self._trains[spec.layer].append(spec.module)
        self._weights_of: dict[int | None, list[str]] = {layer: [] for layer in self._names}
        for spec in adapter.tensors():
            if spec.name in self._trained_weights:
                self._weights_of.setdefault(spec.layer, []).append(spec.name)
        self._looks = {layer: self._look(layer) for layer in self._names}
        self._trained = {layer: self._count_trained(modules) for layer, modules in self._trains.items()}
        self._trained[None] = self._count_trained(self._updates)
        self._pieces: dict[Hashable, Piece] = {}
        self._found: dict[Hashable, tuple[tuple[_Borrowed, ...], PieceCost]] = {}

    @cached_property
    def context(self) -> Amount:
        """Bytes of what all blocks share: token ids, positions, rotary tables."""
        few, more = (
            (piece.tokens, sum(map(nbytes_of, (piece.run.ids, *tensors_in(vars(piece.run.ctx))))))
            for piece in (_DryPiece(self, tokens, ALONE) for tokens in _FEW_AND_MORE[0])
        )
        return Amount.through(few, more)

    def look(self, layer: int) -> Hashable:
        """Equal for layers that cost the same."""
        return self._looks[layer]

    def trained_in(self, layer: int | None = None) -> tuple[int, int]:
        """How many numbers are trained, in how many tensors: in one layer, or in all."""
        return self._trained[layer]

    def _count_trained(self, modules: Iterable[str]) -> tuple[int, int]:
        sizes = [parameter.numel() for module in modules for parameter in self._updates[module].parameters()]
        return sum(sizes), len(sizes)

    @property
    def boundary(self) -> Amount:
        """Bytes of a block's input."""
        return Amount(0, self.adapter.hidden_size * self.dtype.itemsize)

    def embed(self) -> Piece:
        return self._piece("embed", None, ALONE, lambda run: run.embed())

    def embed_gradient(self, packing: Packing = ALONE) -> Piece:
        """The embedding again, for the gradient of what trains in it."""
        return self._piece("embed gradient", None, packing, lambda run: run.embed_gradient())

    def forward(self, layer: int, level: Level, packing: Packing = ALONE) -> Piece:
        """A block in the forward pass; ``left`` is its output and what it keeps for its gradient."""
        return self._piece(("forward", level), layer, packing, lambda run: run.forward(layer, level))

    def backward(self, layer: int, level: Level, wants_dx: bool, packing: Packing = ALONE) -> Piece:
        """A block's gradient, with what ``level`` left; ``left`` is the gradient of its input."""
        kind = "backward", level, wants_dx
        return self._piece(kind, layer, packing, lambda run: run.backward(layer, level, wants_dx))

    def evaluation(self, layer: int) -> Piece:
        """A block outside training."""
        return self._piece("evaluation", layer, ALONE, lambda run: run.evaluation(layer))

    def head(self, trained: bool, wants_dx: bool, packing: Packing = ALONE) -> Piece:
        """Final norm and output projection of one chunk, with their gradient where ``trained``."""
        return self._piece(("head", trained, wants_dx), None, packing, lambda run: run.head(trained, wants_dx))

    def _piece(self, kind: Hashable, layer: int | None, packing: Packing, what: Callable[[PieceRun], None]) -> Piece:
        if (kind, layer, packing) not in self._pieces:
            key = kind, self._looks.get(layer), packing
            if key not in self._found:
                self._found[key] = self._find(layer, packing, what)
            borrowed, cost = self._found[key]
            accesses = tuple(self._granule(layer, one) for one in borrowed)
            self._pieces[kind, layer, packing] = Piece(accesses, cost)
        return self._pieces[kind, layer, packing]

    def _find(
        self, layer: int | None, packing: Packing, what: Callable[[PieceRun], None]
    ) -> tuple[tuple[_Borrowed, ...], PieceCost]:
        """Run a piece of one layer; others that look like it cost the same and borrow likewise."""
        with _one_thread():
            self._set_gradients(self._trains.get(layer, ()))
            for tokens in _FEW_AND_MORE:
                # Once uncounted: what torch and kernels make at a first call, and keep, is no part of a step.
                what(_DryPiece(self, tokens[1], packing).run)
                few, more = (_DryPiece(self, n, packing, counted=True) for n in tokens)
                what(few.run)
                what(more.run)
                if len(few.counter.alive_bytes) == len(more.counter.alive_bytes):
                    break
            self._set_gradients(())
        names = {name: place for place, name in enumerate(self._names.get(layer, ()))}
        borrowed = tuple(
            _Borrowed(names.get(part.tensor), part, self._model.layout.parts[part.tensor].index(part))
            for part in few.weights.borrowed
        )
        return borrowed, _cost(few, more)

    def _granule(self, layer: int | None, one: _Borrowed) -> int:
        """Where the tensor at the same place of ``layer`` lies; one outside the layer is the same for all."""
        if one.place is None:
            return one.part.granule
        return self._model.layout.parts[self._names[layer][one.place]][one.index].granule

    def _look(self, layer: int | None) -> Hashable:
        """Equal for layers that cost the same: what their tensors and updates look like, and what trains."""
        shapes = tuple(
            tuple((part.shape, part.storage) for part in self._model.layout.parts[name]) for name in self._names[layer]
        )
        updates = tuple(
            (*(parameter.shape for parameter in update.parameters()), update.dropout)
            for update in map(self._updates.__getitem__, self._trains[layer])
        )
        names = self._trains[layer], self._weights_of[layer]
        where = tuple(tuple(name.replace(f".{layer}.", ".", 1) for name in each) for each in names)
        return shapes, updates, where

    def _set_gradients(self, modules: Iterable[str]) -> None:
        """Gradients outlive a piece, so they are there before it, and gone after."""
        here = set(modules)
        for name, update in self._updates.items():
            for parameter in update.parameters():
                parameter.grad = torch.zeros_like(parameter) if name in here else None


@contextmanager
def _one_thread() -> Iterator[None]:
    """So few numbers take longer to share out than to compute."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@dataclass(frozen=True)
class _Borrowed:
    """A part that a piece borrows: of the ``place``-th tensor of its layer (None: outside it), its ``index``-th."""

    place: int | None
    part: Part
    index: int


class _DryPiece(Observer):
    """One piece on ``tokens`` tokens of one micro-batch, or of two unequal ones, and what was seen of it."""

    def __init__(self, dry: DryRun, tokens: int, packing: Packing, counted: bool = False) -> None:
        self.tokens = tokens
        self.weights = StandInWeights(dry._model)
        self.counter = ByteCounter(self.weights) if counted else None
        linear = dry._kernels.linear
        kernels = replace(dry._kernels, linear=StandInKernel(self.weights, isinstance(linear, LinearKernel)))
        modules = dry._model.biased_modules, dry._model.transposed_modules
        gradients = StandInGradients(self.weights, dry._model, dry._trained_weights) if dry._trained_weights else None
        ops = CountingOps(self.weights, kernels, torch.device("cpu"), dry.dtype, dry._updates, *modules, gradients)
        # Where one needs a mask, the other does not: a kernel may have two ways then, and hold what both take.
        first = tokens - tokens // 4 if packing.several else tokens
        segments = (segment(0, 0, first, 2, packing.masked),)
        if packing.several:
            segments += (segment(1, first, tokens, 1, False),)
        self.run = PieceRun(dry.adapter, ops, segments, self)

    @contextmanager
    def watching(self) -> Iterator[None]:
        if self.counter is None:
            yield
            return
        with self.counter:
            yield

    def started(self) -> None:
        self.weights.start()
        if self.counter is not None:
            self.counter.start()

    def over(self) -> None:
        if self.counter is not None:
            self.counter.finish()


def _cost(few: _DryPiece, more: _DryPiece) -> PieceCost:
    def amount(few_bytes: float, more_bytes: float) -> Amount:
        return Amount.through((few.tokens, few_bytes), (more.tokens, more_bytes))

    doing = tuple(
        Doing(a.flops / few.tokens, a.pair_flops, amount(a.touched_bytes, b.touched_bytes), a.operations)
        for a, b in zip(few.weights.steps, more.weights.steps, strict=True)
    )
    peak = Peak.of(map(amount, *(run.counter.alive_bytes for run in (few, more))))
    return PieceCost(doing, peak, amount(few.counter.left_bytes, more.counter.left_bytes))
