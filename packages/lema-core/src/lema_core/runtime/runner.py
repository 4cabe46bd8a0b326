"""Run an adapter's math layer by layer over streamed weights: train, evaluate, and compute logits.

What a step will borrow is known from a dry run of its pieces, by the code that then computes. Shapes: B rows,
T tokens, C hidden size, N tokens of a group of micro-batches, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from lema_core.adapter import ModelAdapter
from lema_core.device import Device
from lema_core.errors import DataError
from lema_core.kv import KVCache
from lema_core.memory import rss_bytes
from lema_core.ops.context import (
    Dropout,
    ForwardContext,
    Segment,
    attention_mask_BTS,
    needs_mask,
    sliding,
    token_positions,
)
from lema_core.ops.gradient import backward_from
from lema_core.ops.gradients import Gradients
from lema_core.ops.kernels import Kernels
from lema_core.ops.low_rank import LowRankUpdate
from lema_core.ops.streamed import Pass, StreamedOps
from lema_core.ops.tape import Tape
from lema_core.runtime.batch import TokenBatch, total_targets
from lema_core.runtime.dry_run import DryRun
from lema_core.runtime.head_loss import chunk_tokens, cut_tokens, head_loss
from lema_core.runtime.piece_run import Level
from lema_core.runtime.schedule import MicroBatch, Scheduler, StepCosts, StepSchedule, StepShape
from lema_core.store.activations import ActivationStream
from lema_core.store.model import StreamedModel
from lema_core.store.store import StoreStats, TensorStore
from lema_core.store.trace import Trace

#: of the memory that a process may have: what comes nearer to all of it begins with giving freed memory back
_NEAR_ALL = 0.995


@dataclass(frozen=True)
class TrainPass:
    """How a training step is computed. ``first_layer``: the lowest one with something trainable (n_layers: only the
    head has). ``seed``: of dropout. ``embeds``: what is below the first block trains too; ``first_layer`` is 0 then.
    ``loss_scale``: gradients come out so many times larger, for fp16, in which small ones vanish (Micikevicius et al.
    2018, arXiv:1710.03740)."""

    first_layer: int
    seed: int
    embeds: bool = False
    loss_scale: float = 1.0


@dataclass
class _Group:
    """Micro-batches that pass a layer together: ids [1, N], what their blocks share, and the state between blocks:
    ``x_1NC``, then the gradient ``dx_1NC``."""

    number: int
    ids_1N: Tensor
    ctx: ForwardContext
    first_pass: Pass
    x_1NC: Tensor | None = None
    dx_1NC: Tensor | None = None


@dataclass
class _Left:
    """What a block left for its gradient; see Level. Where it is no graph, its input is among the activations."""

    x_in: Tensor | None = None
    x_out: Tensor | None = None
    tape: Tape | None = None


class ModelRunner:
    """Computes with ``adapter`` on ``store``. ``updates``: low-rank updates by module name, trained through their
    ``.grad``. ``gradients``: where those of trained weights are added up; None: all weights are frozen.

    ``scheduler`` decides what a training step keeps and what passes a layer together; by default a step keeps all.
    ``activations`` holds what blocks are given until their gradient comes; by default without a limit. Where the
    process would have more than ``most_bytes``, gaps between what the allocator keeps included, those are given back;
    None: wherever a step needs memory of other sizes. They have to be asked for again, a tenth of a small model's step.
    """

    def __init__(
        self,
        adapter: ModelAdapter,
        model: StreamedModel,
        store: TensorStore,
        updates: Mapping[str, LowRankUpdate],
        kernels: Kernels,
        scheduler: Scheduler | None = None,
        activations: ActivationStream | None = None,
        most_bytes: int | None = None,
        gradients: Gradients | None = None,
    ) -> None:
        self.adapter = adapter
        self.store = store
        self._device: Device = store.device
        for update in updates.values():
            update.keep_gradients()
        experts = {spec.module for spec in adapter.linear_modules() if spec.expert is not None}
        self._of_experts = [update for module, update in updates.items() if module in experts]
        self._most_bytes = most_bytes
        self.dtype = self._device.compute_dtype(model.matrix_dtype)
        self._gradients = gradients
        if scheduler is None:
            named = (spec.name for spec in adapter.tensors())
            trained = frozenset(name for name in named if gradients is not None and gradients.trains(name))
            scheduler = Scheduler(StepCosts(DryRun(adapter, model, updates, self.dtype, kernels, trained)))
        self.scheduler = scheduler
        self.activations = activations or ActivationStream(self._device, None, None, None)
        where, modules = self._device.torch_device, (model.biased_modules, model.transposed_modules)
        self._ops = StreamedOps(store, kernels, where, self.dtype, updates, *modules, gradients)

    # -- training

    def train_step(
        self, batches: Sequence[TokenBatch], how: TrainPass, step: int, logits: dict[int, Tensor] | None = None
    ) -> float:
        """Add the gradient of the token-weighted mean loss over all micro-batches to the parameters, and to the
        accumulators of trained weights; returns that loss.

        Micro-batches without a target are left out. ``step`` keys dropout. ``logits``, where given, takes those of this
        forward by micro-batch, fp32 [B, T, V] on the CPU; none of one that was left out.
        """
        n_targets = total_targets(batches)
        if n_targets == 0:
            raise DataError("every label of this step is masked: there is nothing to learn from")
        learning = {index: batch for index, batch in enumerate(batches) if batch.n_targets}
        micro_batches = tuple(map(self._shape_of, learning.values()))
        shape = StepShape(micro_batches, how.first_layer, logits is not None, how.embeds)
        schedule = self.scheduler.choose(shape)
        if logits is not None:
            logits.clear()
        with self._step(self.scheduler.trace(shape, schedule)):
            sizes = self.scheduler.costs.boundaries(shape, schedule)
            with self.activations.step(sizes, schedule.boundary_bytes):
                loss = self._train(learning, shape, schedule, how, step, how.loss_scale / n_targets, logits)
        # An expert that no token came to has a gradient all the same, of zeros: it is a slice of one for all.
        for update in self._of_experts:
            for parameter in update.parameters():
                update.gradient(parameter)
        # Gaps grow from step to step otherwise, until memory of all sizes is there.
        self._make_room(0)
        return loss.item() / n_targets

    def _make_room(self, coming_bytes: int) -> None:
        """What is computed next holds so many bytes beside what is held now."""
        if self._most_bytes is None or rss_bytes() + coming_bytes > _NEAR_ALL * self._most_bytes:
            self._device.trim()

    def _train(
        self,
        batches: Mapping[int, TokenBatch],
        shape: StepShape,
        schedule: StepSchedule,
        how: TrainPass,
        step: int,
        scale: float,
        logits: dict[int, Tensor] | None,
    ) -> Tensor:
        numbers = list(batches)
        groups = [
            self._group(number, {numbers[i]: batches[numbers[i]] for i in members}, how.seed, step, scale)
            for number, members in enumerate(schedule.groups)
        ]
        # gradients pass all layers above it
        lowest = -1 if how.embeds else how.first_layer
        left: dict[tuple[int, int], _Left] = {}
        with torch.no_grad():
            for group in groups:
                with self._ops.during(group.first_pass):
                    group.x_1NC = self.adapter.embed(self._ops, group.ids_1N, group.ctx)
            for layer in range(self.adapter.n_layers):
                for group in groups:
                    if layer < how.first_layer:
                        group.x_1NC = self._block(group, layer, group.x_1NC, group.first_pass)
                    else:
                        level = schedule.levels[layer]
                        left[layer, group.number] = self._forward(group, layer, level, layer > lowest)
            if logits is not None:
                logits.update(self._logits(batches, groups))
        # Blocks' temporaries are gone: what they lay in may stay resident beside the logits, and these beside the
        # gradients' temporaries.
        in_head, in_backward = self.scheduler.costs.coming_bytes(shape, schedule)
        self._make_room(in_head)
        extra = sum(self.adapter.extra_loss(group.ctx) for group in groups) / scale
        wants_dx = how.first_layer < self.adapter.n_layers
        loss = extra + self._head(batches, groups, scale, wants_dx)
        self._make_room(in_backward)
        for layer in range(self.adapter.n_layers - 1, how.first_layer - 1, -1):
            for group in groups:
                self._backward(group, layer, left.pop((layer, group.number)), layer > lowest)
            if self._gradients is not None:
                self._gradients.complete(layer)
        if how.embeds:
            for group in groups:
                self._embed_gradient(group)
        if self._gradients is not None:
            self._gradients.complete(None)
        return loss

    def _group(self, number: int, batches: Mapping[int, TokenBatch], seed: int, step: int, scale: float) -> _Group:
        """Pack micro-batches one after another, row after row. ``scale``: of a target in the step's loss."""
        segments: list[Segment] = []
        start = 0
        for index, batch in batches.items():
            rows, tokens = batch.input_ids.shape
            mask = attention_mask_BTS(batch.attention_mask, tokens)
            mask = None if mask is None else mask.to(self._ops.device)
            segments.append(Segment(start, start + rows * tokens, rows, tokens, index, mask))
            start += rows * tokens
        ids = torch.cat([batch.input_ids.reshape(-1) for batch in batches.values()])
        positions = torch.cat([token_positions(batch.attention_mask).reshape(-1) for batch in batches.values()])
        valid_BT = None
        if any(segment.mask_BTS is not None for segment in segments):
            # Padding that no token follows is left as it is where a micro-batch is alone.
            valid = [
                batch.attention_mask if segment.mask_BTS is not None else torch.ones_like(batch.attention_mask)
                for batch, segment in zip(batches.values(), segments, strict=True)
            ]
            valid_BT = torch.cat([each.reshape(-1) for each in valid])[None].to(self._ops.device)
        real = torch.cat([batch.attention_mask.reshape(-1) for batch in batches.values()])[None]
        ctx = ForwardContext(
            positions[None].to(self._ops.device),
            valid_BT=valid_BT,
            real_BT=None if real.all() else real.to(self._ops.device),
            segments=tuple(segments),
            shares=tuple(batch.n_targets * scale for batch in batches.values()),
        )
        self.adapter.prepare(ctx)
        ctx.within = sliding(ctx, self.adapter.windows, 1, start)
        return _Group(number, ids[None], ctx, Pass(ctx.segments, Dropout(seed, step, ctx.segments)))

    def _block(self, group: _Group, layer: int, x_1NC: Tensor, one_pass: Pass) -> Tensor:
        with self._ops.during(one_pass):
            return self.adapter.block(self._ops, layer, x_1NC, group.ctx)

    def _forward(self, group: _Group, layer: int, level: Level, wants_dx: bool) -> _Left:
        x_in = group.x_1NC
        if level is Level.GRAPH:
            x_in = x_in.detach().requires_grad_(wants_dx)
            with torch.enable_grad():
                x_out = self._block(group, layer, x_in, group.first_pass)
            group.x_1NC = x_out.detach()
            return _Left(x_in, x_out)
        tape = Tape() if level is Level.KEEP else None
        group.x_1NC = self._block(group, layer, x_in, replace(group.first_pass, tape=tape))
        self.activations.put((layer, group.number), x_in)
        return _Left(tape=tape)

    def _logits(self, batches: Mapping[int, TokenBatch], groups: Sequence[_Group]) -> dict[int, Tensor]:
        """fp32 [B, T, V] on the CPU, by micro-batch."""
        return {
            index: self._project(x_CN.t().view(*batches[index].input_ids.shape, -1))
            for index, x_CN in _by_micro_batch(groups, "x_1NC").items()
        }

    def _head(
        self, batches: Mapping[int, TokenBatch], groups: Sequence[_Group], scale: float, wants_dx: bool
    ) -> Tensor:
        """The loss over all micro-batches; each group's ``x_1NC`` becomes ``dx_1NC``."""
        hidden = _by_micro_batch(groups, "x_1NC")
        if wants_dx:
            for group in groups:
                group.dx_1NC = torch.zeros_like(group.x_1NC)
        supervised = [tuple(t.to(self._ops.device) for t in batches[index].supervised) for index in hidden]
        gradients = list(_by_micro_batch(groups, "dx_1NC").values()) if wants_dx else None
        loss = head_loss(self.adapter, self._ops, list(hidden.values()), supervised, scale, gradients)
        for group in groups:
            group.x_1NC = None
        return loss

    def _backward(self, group: _Group, layer: int, left: _Left, wants_dx: bool) -> None:
        x_in, x_out = left.x_in, left.x_out
        if x_in is None:
            x_in = self.activations.take((layer, group.number)).requires_grad_(wants_dx)
            with torch.enable_grad():
                again = replace(group.first_pass, tape=left.tape, again=True)
                x_out = self._block(group, layer, x_in, again)
        dx_1NC, group.dx_1NC = group.dx_1NC, None
        # A block in which nothing is trained, below none that is, has no graph to go through.
        backward_from(x_out, dx_1NC)
        group.dx_1NC = x_in.grad

    def _embed_gradient(self, group: _Group) -> None:
        """The embedding runs again, with the same dropout, for the gradient of its tables."""
        with torch.enable_grad(), self._ops.during(replace(group.first_pass, again=True)):
            x_1NC = self.adapter.embed(self._ops, group.ids_1N, group.ctx)
        dx_1NC, group.dx_1NC = group.dx_1NC, None
        backward_from(x_1NC, dx_1NC)

    # -- evaluation

    @torch.no_grad()
    def loss(self, batch: TokenBatch) -> tuple[float, int]:
        """Summed negative log-likelihood (nats) and the number of targets, without gradients or dropout."""
        if batch.n_targets == 0:
            return 0.0, 0
        self.check_length(batch.input_ids.shape[1], "shorten it")
        with self._forward_step(batch, cut_tokens(batch.n_targets, self.adapter.vocab_size)):
            x_NC = self._hidden(batch, self._context(batch)).flatten(0, 1)
            supervised = tuple(t.to(x_NC.device) for t in batch.supervised)
            return head_loss(self.adapter, self._ops, [x_NC.t()], [supervised], None).item(), batch.n_targets

    @torch.no_grad()
    def logits(self, batch: TokenBatch) -> Tensor:
        """fp32 [B, T, V] on the CPU, without dropout. Raises DataError for more tokens than positions."""
        self.check_length(batch.input_ids.shape[1], "shorten it")
        with self._forward_step(batch, cut_tokens(batch.input_ids.numel(), self.adapter.vocab_size)):
            return self._project(self._hidden(batch, self._context(batch)))

    def _project(self, x_BTC: Tensor) -> Tensor:
        """The head over every token, a chunk at a time: fp32 [B, T, V] on the CPU."""
        chunk = chunk_tokens(self.adapter.vocab_size)
        x_NC = x_BTC.reshape(-1, x_BTC.shape[-1])
        out_NV = torch.empty(len(x_NC), self.adapter.vocab_size)
        for chunk_nC, out_nV in zip(x_NC.split(chunk), out_NV.split(chunk), strict=True):
            out_nV.copy_(self.adapter.head(self._ops, chunk_nC))
        return out_NV.view(*x_BTC.shape[:-1], -1)

    @torch.no_grad()
    def next_logits(self, batch: TokenBatch, cache: KVCache) -> Tensor:
        """Feed new tokens after those in ``cache``; fp32 logits [B, V] of the last one, on the CPU.

        ``batch.attention_mask`` covers cached and new tokens; the new ones are the last ``input_ids.shape[1]``.
        """
        with self._forward_step(batch, [batch.input_ids.shape[0]]):
            x_BTC = self._hidden(batch, self._context(batch, cache))
            return self.adapter.head(self._ops, x_BTC[:, -1]).float().cpu()

    def _hidden(self, batch: TokenBatch, ctx: ForwardContext) -> Tensor:
        x_BTC = self.adapter.embed(self._ops, batch.input_ids, ctx)
        for layer in range(self.adapter.n_layers):
            x_BTC = self.adapter.block(self._ops, layer, x_BTC, ctx)
        return x_BTC

    def check_length(self, tokens: int, way_out: str) -> None:
        """Raises DataError where the model has fewer positions than a row of so many tokens needs."""
        limit = self.adapter.max_positions
        if self.adapter.hard_max_positions and tokens > limit:
            raise DataError(f"a row of {tokens} tokens is wanted, the model has {limit} positions; {way_out}")

    def _context(self, batch: TokenBatch, cache: KVCache | None = None) -> ForwardContext:
        n_queries = batch.input_ids.shape[1]
        positions = token_positions(batch.attention_mask)[:, -n_queries:].to(self._ops.device)
        mask = attention_mask_BTS(batch.attention_mask, n_queries)
        ctx = ForwardContext(positions, None if mask is None else mask.to(self._ops.device), cache)
        if needs_mask(batch.attention_mask, n_queries):
            ctx.valid_BT = batch.attention_mask[:, -n_queries:].to(self._ops.device)
        self.adapter.prepare(ctx)
        ctx.within = sliding(ctx, self.adapter.windows, len(positions), n_queries)
        return ctx

    # -- steps

    def _forward_step(self, batch: TokenBatch, head_chunks: Sequence[int]) -> AbstractContextManager[None]:
        rows, tokens = batch.input_ids.shape
        return self._step(self.scheduler.costs.evaluation(rows * tokens, tokens, tuple(head_chunks)))

    def _shape_of(self, batch: TokenBatch) -> MicroBatch:
        rows, tokens = batch.input_ids.shape
        padded = needs_mask(batch.attention_mask, tokens)
        return MicroBatch(rows, tokens, batch.n_targets, padded + self.adapter.masks(tokens))

    def stats(self) -> dict[str, StoreStats]:
        """Figures of the present or latest step by kind of stream."""
        return {**self.store.stats(), "activations": self.activations.stats()}

    def close(self) -> None:
        """Stop the threads and free the windows; safe to call twice."""
        self.activations.close()
        self.store.close()

    @contextmanager
    def _step(self, trace: Trace) -> Iterator[None]:
        self.store.begin_step(trace)
        try:
            yield
            self.store.end_step()
        except BaseException:
            self.store.abort_step()
            raise


def _by_micro_batch(groups: Sequence[_Group], which: str) -> dict[int, Tensor]:
    """The columns [C, n] of each micro-batch in its group's ``x_1NC`` or ``dx_1NC``; views."""
    return {
        segment.micro_batch: getattr(group, which)[0, segment.start : segment.stop].t()
        for group in groups
        for segment in group.ctx.segments
    }
