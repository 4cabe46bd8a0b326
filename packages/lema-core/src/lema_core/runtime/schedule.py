"""How a training step is run: which micro-batches pass a layer together, and what each layer leaves for its gradient.

Every group of micro-batches passes a layer before the next layer's weights come, forward and backward. A schedule
changes time and memory, never a bit of the result. Shapes: N tokens of a group.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from lema_core.errors import BudgetError, PlanError
from lema_core.memory import format_bytes
from lema_core.runtime.dry_run import DryRun, Packing, Piece
from lema_core.runtime.head_loss import HeadPiece, chunk_tokens, cut_head, cut_tokens
from lema_core.runtime.piece_run import Level
from lema_core.store.trace import Trace, Work

#: products are about as fast with so many columns as with more: a group need not be larger
ENOUGH_TOKENS = 512

#: bytes of a step that grow with nothing
_FIXED_BYTES = 32_768

#: per trained number: gradient, parameter and moments read, the last three written, and the gradient for the norm
_UPDATED_BYTES = 32
#: per trained tensor
_UPDATE_OPERATIONS = 10

#: the micro-batches that pass a layer together, by index
Groups = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class MicroBatch:
    """What a schedule depends on: ``rows`` of ``tokens``, how many of them have a target, and how many masks beyond the
    causal one attention needs: for padding, and for each sliding window."""

    rows: int
    tokens: int
    n_targets: int
    masks: int = 0

    @property
    def masked(self) -> bool:
        return self.masks > 0

    @property
    def size(self) -> int:
        return self.rows * self.tokens

    @property
    def pairs(self) -> int:
        """Of a token and one of its row."""
        return self.rows * self.tokens**2

    @property
    def mask_numel(self) -> int:
        """Of one mask."""
        return self.pairs if self.masked else 0


@dataclass(frozen=True)
class StepShape:
    """A training step before it is scheduled. ``first_layer``: the lowest one with something trainable (n_layers: only
    the head has). ``logits``: they are wanted of every token. ``embeds``: what is below the first block trains too."""

    micro_batches: tuple[MicroBatch, ...]
    first_layer: int
    logits: bool = False
    embeds: bool = False

    def __post_init__(self) -> None:
        if self.embeds and self.first_layer:
            raise PlanError(f"embeddings train, so that gradients pass all layers, but stop at {self.first_layer}")

    @property
    def lowest(self) -> int:
        """Gradients pass all layers above it."""
        return -1 if self.embeds else self.first_layer

    @property
    def tokens(self) -> int:
        return sum(one.size for one in self.micro_batches)


@dataclass(frozen=True)
class StepSchedule:
    """``levels``: by layer, those below the lowest trained one included. ``boundary_bytes``: of blocks' inputs, so much
    stays where it is computed with, the rest goes down a tier; None: all stay."""

    groups: Groups
    levels: tuple[Level, ...]
    boundary_bytes: int | None = None

    @property
    def kept_share(self) -> float:
        """Of the layers, those that keep their products."""
        return sum(level is Level.KEEP for level in self.levels) / max(1, len(self.levels))

    def describe(self) -> str:
        """``graph of 3 layers, products of 10, 9 recomputed; 8 micro-batches in 1 group``."""
        counts = [sum(level is wanted for level in self.levels) for wanted in reversed(Level)]
        lower = "" if self.boundary_bytes is None else f"; {format_bytes(self.boundary_bytes)} of their inputs stay"
        return (
            f"graph kept of {counts[0]} layers, products of {counts[1]}, {counts[2]} recomputed{lower}; "
            f"{sum(map(len, self.groups))} micro-batches in {len(self.groups)} groups"
        )


@dataclass(frozen=True)
class Kind:
    """``count`` layers that cost the same as ``layer``."""

    layer: int
    count: int


class StepCosts:
    """What a step of some shape costs under a schedule, from the pieces of a dry run."""

    def __init__(self, dry: DryRun) -> None:
        self._dry = dry
        self.n_layers = dry.adapter.n_layers
        self.evaluation = lru_cache(maxsize=64)(self._evaluation)
        self.coming_bytes = lru_cache(maxsize=64)(self._coming_bytes)

    # -- what is borrowed, and what is computed in between

    def trace(self, shape: StepShape, schedule: StepSchedule) -> Trace:
        """The accesses of a step, in the order in which ModelRunner makes them."""
        trace = _trace(("train", shape, schedule), self._pieces(shape, schedule))
        return _followed_by(trace, self._update())

    def _pieces(self, shape: StepShape, schedule: StepSchedule) -> list[tuple[Piece, int, int]]:
        dry, n_layers = self._dry, self.n_layers
        groups = [(*_group_size(shape, group), _packing(shape, group)) for group in schedule.groups]
        pieces = [(dry.embed(), tokens, row) for tokens, row, _ in groups]
        for layer in range(n_layers):
            level = schedule.levels[layer]
            pieces += [(dry.forward(layer, level, packing), tokens, row) for tokens, row, packing in groups]
        if shape.logits:
            for one in shape.micro_batches:
                for tokens in cut_tokens(one.size, dry.adapter.vocab_size):
                    pieces.append((dry.head(False, False), tokens, 1))
        wants_dx = shape.first_layer < n_layers
        for tokens, packing in _packed_chunks(shape, dry.adapter.vocab_size):
            pieces.append((dry.head(True, wants_dx, packing), tokens, 1))
        for layer in range(n_layers - 1, shape.first_layer - 1, -1):
            what = layer, schedule.levels[layer], layer > shape.lowest
            pieces += [(dry.backward(*what, packing), tokens, row) for tokens, row, packing in groups]
        if shape.embeds:
            pieces += [(dry.embed_gradient(packing), tokens, row) for tokens, row, packing in groups]
        return pieces

    def _evaluation(self, tokens: int, row_tokens: int, chunks: tuple[int, ...]) -> Trace:
        """The accesses of a forward pass over ``tokens`` in rows of ``row_tokens``, with the head over ``chunks`` of
        tokens."""
        dry = self._dry
        pieces = [(dry.embed(), tokens, row_tokens)]
        pieces += [(dry.evaluation(layer), tokens, row_tokens) for layer in range(self.n_layers)]
        pieces += [(dry.head(False, False), chunk, 1) for chunk in chunks]
        return _trace(("evaluate", tokens, row_tokens, chunks), pieces)

    def _update(self, layer: int | None = None) -> Work:
        """Clipping and AdamW of what is trained, in one layer or in all: reads the gradient for its norm, then reads
        and writes parameter and moments."""
        numbers, tensors = self._dry.trained_in(layer)
        return Work(0.0, 1, _UPDATED_BYTES * numbers, _UPDATE_OPERATIONS * tensors)

    # -- pieces that stand for a step

    def kinds(self, shape: StepShape) -> list[Kind]:
        """Trained layers, those that cost the same together."""
        first_of: dict[Hashable, int] = {}
        counts: Counter[Hashable] = Counter()
        for layer in range(shape.first_layer, self.n_layers):
            look = self._dry.look(layer)
            first_of.setdefault(look, layer)
            counts[look] += 1
        return [Kind(layer, counts[look]) for look, layer in first_of.items()]

    def looks(self, shape: StepShape) -> str:
        """All of a step of ``shape`` that its pace depends on."""
        kinds = [(self._dry.look(kind.layer), kind.count) for kind in self.kinds(shape)]
        return f"{kinds}, {self._dry.adapter.vocab_size} ids, {shape.micro_batches[0]} x {len(shape.micro_batches)}"

    def layer_trace(self, layer: int, micro_batches: Sequence[MicroBatch]) -> Trace:
        """A layer's pass that keeps its graph, its gradient, and the update of what is trained in it."""
        shape = StepShape(tuple(micro_batches), layer)
        group = range(len(micro_batches))
        (tokens, row), packing = _group_size(shape, group), _packing(shape, group)
        passes = self._dry.forward(layer, Level.GRAPH, packing), self._dry.backward(layer, Level.GRAPH, True, packing)
        trace = _trace(("layer", layer, shape), [(piece, tokens, row) for piece in passes])
        return _followed_by(trace, self._update(layer))

    def head_trace(self, pieces: Sequence[int]) -> Trace:
        """The head and its gradient over a chunk of so many tokens of one micro-batch, so many of the next ..."""
        head = self._dry.head(True, True, Packing(len(pieces) > 1))
        return _trace(("head", *pieces), [(head, sum(pieces), 1)])

    # -- memory

    def boundaries(self, shape: StepShape, schedule: StepSchedule) -> list[int]:
        """Bytes of the inputs that blocks leave for their gradient, in the order of the forward pass."""
        sizes = [int(self._dry.boundary.at(_group_size(shape, group)[0])) for group in schedule.groups]
        kept = sum(level is not Level.GRAPH for level in schedule.levels[shape.first_layer :])
        return sizes * kept

    def activation_bytes(self, shape: StepShape, schedule: StepSchedule) -> int:
        """The most bytes of activations, kept products and graphs included, that a step holds at once where it
        computes."""
        dry, n_layers = self._dry, self.n_layers
        groups = [(i, _group_size(shape, group)[0], _packing(shape, group)) for i, group in enumerate(schedule.groups)]
        pairs = [self._pair_bytes(shape, group) for group in schedule.groups]
        most = math.inf if schedule.boundary_bytes is None else schedule.boundary_bytes
        # What a group carries from block to block: its activations, later their gradient.
        carried = sum(dry.boundary.at(n) for _, n, _ in groups)
        fixed = _FIXED_BYTES + carried + sum(dry.context.at(n) for _, n, _ in groups)
        fixed += sum(one.masks * one.mask_numel for one in shape.micro_batches)
        inputs = 0.0
        peak = fixed
        kept: dict[tuple[int, int], float] = {}
        for layer in range(n_layers):
            level = schedule.levels[layer]
            for group, n, packing in groups:
                cost = dry.forward(layer, level, packing).cost
                added, largest, working = pairs[group]
                if level is Level.GRAPH:
                    largest = added + working
                peak = max(peak, fixed + min(inputs, most) + cost.peak.at(n) + largest)
                if layer < shape.first_layer:
                    continue
                if level is Level.GRAPH:
                    # A graph keeps its input and its output; that of another graph is counted there.
                    follows_graph = layer > shape.first_layer and schedule.levels[layer - 1] is Level.GRAPH
                    kept[layer, group] = cost.left.at(n) + added + (0 if follows_graph else dry.boundary.at(n))
                else:
                    kept[layer, group] = cost.left.at(n) - dry.boundary.at(n)
                    inputs += dry.boundary.at(n)
                fixed += kept[layer, group]
        if shape.logits:
            longest = min(chunk_tokens(dry.adapter.vocab_size), max(one.size for one in shape.micro_batches))
            fixed += 4 * shape.tokens * dry.adapter.vocab_size
            peak = max(peak, fixed + min(inputs, most) + dry.head(False, False).cost.peak.at(longest))
        wants_dx = shape.first_layer < n_layers
        gradients = carried if wants_dx else 0.0
        for tokens, packing in _packed_chunks(shape, dry.adapter.vocab_size):
            head = dry.head(True, wants_dx, packing).cost.peak.at(tokens) + dry.boundary.at(tokens)
            peak = max(peak, fixed + min(inputs, most) + gradients + head)
        for layer in range(n_layers - 1, shape.first_layer - 1, -1):
            level = schedule.levels[layer]
            for group, n, packing in groups:
                cost = dry.backward(layer, level, layer > shape.lowest, packing).cost
                added, _, working = pairs[group]
                again = working + (0 if level is Level.GRAPH else added)
                peak = max(peak, fixed + min(inputs, most) + cost.peak.at(n) + again)
                fixed -= kept[layer, group]
                inputs -= 0 if level is Level.GRAPH else dry.boundary.at(n)
        if shape.embeds:
            peak = max([peak, *(fixed + dry.embed_gradient(packing).cost.peak.at(n) for _, n, packing in groups)])
        return math.ceil(peak)

    def _coming_bytes(self, shape: StepShape, schedule: StepSchedule) -> tuple[int, int]:
        """The most bytes that the head holds beside what the forward pass left, and that blocks' gradients hold beside
        what the head left, more than it held itself."""
        dry, wants_dx = self._dry, shape.first_layer < self.n_layers
        in_head = in_backward = 0.0
        for tokens, packing in _packed_chunks(shape, dry.adapter.vocab_size):
            head = dry.head(True, wants_dx, packing).cost.peak.at(tokens) + dry.boundary.at(tokens)
            in_head = max(in_head, head)
        for group in schedule.groups:
            n, packing = _group_size(shape, group)[0], _packing(shape, group)
            in_head += dry.boundary.at(n) if wants_dx else 0.0
            added, _, working = self._pair_bytes(shape, group)
            for layer in range(shape.first_layer, self.n_layers):
                level = schedule.levels[layer]
                peak = dry.backward(layer, level, layer > shape.lowest, packing).cost.peak.at(n)
                in_backward = max(in_backward, peak + working + (0 if level is Level.GRAPH else added))
        return math.ceil(in_head), max(0, math.ceil(in_backward - in_head))

    def _pair_bytes(self, shape: StepShape, group: Sequence[int]) -> tuple[int, int, int]:
        """Bytes by pairs of tokens that attention makes: those that a graph keeps of a group, and of its largest
        micro-batch those without a graph and those beside one.

        Masks are added to the scores as numbers. Under dropout probabilities, what is dropped and what is left are
        kept, and scores come before them.
        """
        size, heads = self._dry.dtype.itemsize, self._dry.adapter.dropped_heads
        members = [shape.micro_batches[index] for index in group]
        masks = [one.mask_numel * size for one in members]
        kept = [mask + 3 * heads * one.pairs * size for mask, one in zip(masks, members, strict=True)]
        working = 3 * heads * max(one.pairs for one in members) * size
        return sum(kept), max(kept) + working, working

    def evaluation_bytes(self, tokens: int, row_tokens: int) -> int:
        """The most bytes that a forward pass without gradients holds at once."""
        dry = self._dry
        alive = _FIXED_BYTES + dry.context.at(tokens) + dry.boundary.at(tokens)
        # Of several rows, shorter ones may be padded.
        masks = (tokens > row_tokens) + dry.adapter.masks(row_tokens)
        if masks:
            # One of them again as numbers.
            alive += tokens * row_tokens * (masks + dry.dtype.itemsize)
        blocks = max((dry.evaluation(layer).cost.peak.at(tokens) for layer in range(self.n_layers)), default=0)
        head = dry.head(False, False).cost.peak.at(min(tokens, chunk_tokens(dry.adapter.vocab_size)))
        return int(alive + max(blocks, head))


class Scheduler:
    """Chooses schedules that hold at most ``activation_bytes`` (None: no limit).

    ``recompute``: True and False force what blocks leave; None leaves it to the memory there is.
    ``window_holds_layer``: when it does not, each group of micro-batches has a layer read again, so that one large
    group is better. ``lower_tier``: blocks' inputs may go down where they are too much.
    """

    def __init__(
        self,
        costs: StepCosts,
        activation_bytes: int | None = None,
        recompute: bool | None = None,
        window_holds_layer: bool = True,
        lower_tier: bool = False,
    ) -> None:
        self.costs = costs
        self._lower_tier = lower_tier
        self._limit = math.inf if activation_bytes is None else activation_bytes
        self._recompute = recompute
        self._enough_tokens = ENOUGH_TOKENS if window_holds_layer else 1 << 62
        self.choose = lru_cache(maxsize=64)(self._choose)
        self.trace = lru_cache(maxsize=64)(costs.trace)

    def _choose(self, shape: StepShape) -> StepSchedule:
        """The schedule of a step: the largest useful groups that fit, then as little recomputation as fits. Raises
        BudgetError where none fits."""
        for groups in self._groupings(shape):
            choices = self.choices(shape, groups)
            if self._fits(shape, choices[0]):
                break
        else:
            least = self.least(shape, choices[0]) if self._lower_tier else choices[0]
            beyond = self.costs.activation_bytes(shape, least) - self._limit
            if beyond > 0:
                longest = max(one.tokens for one in shape.micro_batches)
                raise BudgetError(
                    f"a step with rows of {longest} tokens needs {math.ceil(beyond):,} bytes of activations more than "
                    f"the {self._limit:,} that were set aside for it; shorten its rows or lower batch_size, or raise "
                    "max_seq_length, which memory is shared out for"
                )
            return replace(least, boundary_bytes=least.boundary_bytes + math.floor(-beyond))
        fitting = bisect_left(choices, True, key=lambda schedule: not self._fits(shape, schedule))
        return choices[max(0, fitting - 1)]

    def ways(self, shape: StepShape) -> list[StepSchedule]:
        """What :meth:`choose` may choose of the largest groups, and the least of all smaller ones, with the most of
        blocks' inputs in the tier below or all of them here."""
        groupings = list(self._groupings(shape))
        found = self.choices(shape, groupings[0]) + [self.choices(shape, groups)[0] for groups in groupings[1:]]
        return [self.least(shape, found[-1]), *found] if self._lower_tier else found

    def least(self, shape: StepShape, schedule: StepSchedule) -> StepSchedule:
        """The same with all blocks' inputs in the tier below, but for two on their way."""
        return replace(schedule, boundary_bytes=2 * max(self.costs.boundaries(shape, schedule), default=0))

    def _fits(self, shape: StepShape, schedule: StepSchedule) -> bool:
        return self.costs.activation_bytes(shape, schedule) <= self._limit

    def choices(self, shape: StepShape, groups: Groups) -> list[StepSchedule]:
        """From recomputing everything to keeping all graphs, each holding more than the one before: products first,
        which cost least memory for the time they save, from the last layer on."""
        n_layers = self.costs.n_layers
        levels = [Level.RECOMPUTE] * n_layers
        trained = list(range(n_layers - 1, shape.first_layer - 1, -1))
        if trained and len(groups) == 1:
            # The last block's gradient comes next: its graph is made anyway.
            levels[trained.pop(0)] = Level.GRAPH
        found = [StepSchedule(groups, tuple(levels))]
        for level in (Level.KEEP, Level.GRAPH):
            for layer in trained:
                levels[layer] = level
                found.append(StepSchedule(groups, tuple(levels)))
        if self._recompute is not None:
            found = found[:1] if self._recompute else found[-1:]
        return found

    def _groupings(self, shape: StepShape) -> Iterator[Groups]:
        """From few large groups to one for each micro-batch."""
        sizes = [one.size for one in shape.micro_batches]
        most = min(self._enough_tokens, sum(sizes))
        while True:
            groups = _pack(sizes, most)
            yield groups
            if len(groups) == len(sizes):
                return
            most //= 2


def _pack(sizes: Sequence[int], most: int) -> Groups:
    """Neighbours together, up to ``most`` tokens."""
    groups: list[list[int]] = []
    room = 0
    for index, size in enumerate(sizes):
        if not groups or size > room:
            groups.append([])
            room = most
        groups[-1].append(index)
        room -= size
    return tuple(map(tuple, groups))


def _trace(key: Hashable, pieces: Iterable[tuple[Piece, int, int]]) -> Trace:
    accesses: list[int] = []
    work: list[Work] = []
    for piece, tokens, row_tokens in pieces:
        accesses += piece.accesses
        done = piece.work(tokens, row_tokens)
        if piece.accesses:
            work += done
        elif work:
            work[-1] = _together(work[-1], done[0])
    return Trace(key, tuple(accesses), tuple(work))


def _followed_by(trace: Trace, work: Work) -> Trace:
    """With ``work`` after all else."""
    *before, last = trace.work
    return replace(trace, work=(*before, _together(last, work)))


def _together(work: Work, more: Work) -> Work:
    touched, operations = work.touched_bytes + more.touched_bytes, work.operations + more.operations
    return Work(work.flops + more.flops, work.tokens, touched, operations)


def _group_size(shape: StepShape, group: Sequence[int]) -> tuple[int, int]:
    """Tokens of a group, and of the row that the average one of them stands in."""
    members = [shape.micro_batches[index] for index in group]
    tokens = sum(one.size for one in members)
    return tokens, round(sum(one.size * one.tokens for one in members) / max(1, tokens))


def _packing(shape: StepShape, group: Sequence[int]) -> Packing:
    return Packing(len(group) > 1, any(shape.micro_batches[index].masked for index in group))


def head_chunks(shape: StepShape, vocab_size: int) -> list[list[HeadPiece]]:
    """What is projected together, chunk by chunk."""
    return cut_head([one.n_targets for one in shape.micro_batches], vocab_size)


def _packed_chunks(shape: StepShape, vocab_size: int) -> list[tuple[int, Packing]]:
    """Tokens of each chunk."""
    chunks = head_chunks(shape, vocab_size)
    return [(sum(piece.tokens for piece in pieces), Packing(len(pieces) > 1)) for pieces in chunks]
