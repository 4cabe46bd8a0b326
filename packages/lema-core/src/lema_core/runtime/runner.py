"""Run an adapter's math layer by layer over streamed weights: train, evaluate, and compute logits.

Every kind of step is traced once on the meta device, with the same code that then computes. Shapes: B rows, T tokens, C
hidden size, N = B * T tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import chain
from typing import TypeVar

import torch
from torch import Tensor

from lema_core.adapter import ModelAdapter
from lema_core.device import Device
from lema_core.errors import DataError
from lema_core.kv import KVCache
from lema_core.ops.context import DropoutKey, ForwardContext, attention_mask_BTS, token_positions
from lema_core.ops.linear import LinearKernel
from lema_core.ops.low_rank import LowRankUpdate
from lema_core.ops.streamed import StreamedOps
from lema_core.runtime.batch import TokenBatch, total_targets
from lema_core.runtime.head_loss import chunk_tokens, head_loss, n_chunks
from lema_core.store.model import StreamedModel
from lema_core.store.store import TensorStore
from lema_core.store.trace import Trace, TraceRecorder

T = TypeVar("T")


@dataclass(frozen=True)
class TrainPass:
    """How a training step is computed. ``first_layer``: the lowest one with something trainable (n_layers: only the
    head has).

    ``recompute``: keep each block's input only and compute the block again when its gradient comes. ``seed``: of
    dropout.
    """

    first_layer: int
    recompute: bool
    seed: int


class ModelRunner:
    """Computes with ``adapter`` on ``store``. ``updates``: low-rank updates by module name, trained through their
    ``.grad``."""

    def __init__(
        self,
        adapter: ModelAdapter,
        model: StreamedModel,
        store: TensorStore,
        updates: Mapping[str, LowRankUpdate],
        kernel: LinearKernel,
    ) -> None:
        self.adapter = adapter
        self.store = store
        self._model = model
        self._device: Device = store.device
        self.dtype = self._device.compute_dtype(model.matrix_dtype)
        self._ops = StreamedOps(store, kernel, self._device.torch_device, self.dtype, updates, model.biased_modules)
        self._traces: dict[Hashable, Trace] = {}

    # -- training

    def train_step(
        self, batches: Sequence[TokenBatch], how: TrainPass, step: int, logits: dict[int, Tensor] | None = None
    ) -> float:
        """Add the gradient of the token-weighted mean loss over all micro-batches to the parameters; returns that loss.

        Micro-batches without a target are left out. ``step`` keys dropout. ``logits``, where given, takes those of this
        forward by micro-batch, fp32 [B, T, V] on the CPU; none of one that was left out.
        """
        n_targets = total_targets(batches)
        if n_targets == 0:
            raise DataError("every label of this step is masked: there is nothing to learn from")

        def compute(ops: StreamedOps, batch: TokenBatch, index: int = 0) -> Tensor:
            dropout = DropoutKey(how.seed, step, index)
            return self._train_micro_batch(ops, batch, how, dropout, 1.0 / n_targets, logits)

        def key(batch: TokenBatch) -> Hashable:
            projected = 0 if logits is None else n_chunks(batch.input_ids.numel(), self.adapter.vocab_size)
            targets = n_chunks(batch.n_targets, self.adapter.vocab_size)
            return "train", how.first_layer, how.recompute, targets, projected

        learning = [(index, batch) for index, batch in enumerate(batches) if batch.n_targets]
        traces = [self.trace(key(batch), compute, batch) for _, batch in learning]
        if logits is not None:
            logits.clear()
        with self._step(_one_after_another(traces)):
            losses = [compute(self._ops, batch, index) for index, batch in learning]
        return sum(loss.item() for loss in losses) / n_targets

    def _train_micro_batch(
        self,
        ops: StreamedOps,
        batch: TokenBatch,
        how: TrainPass,
        dropout: DropoutKey,
        scale: float,
        logits: dict[int, Tensor] | None,
    ) -> Tensor:
        adapter, last = self.adapter, self.adapter.n_layers - 1
        ctx = self._context(ops, batch, dropout=dropout)
        inputs: dict[int, Tensor] = {}
        kept: dict[int, tuple[Tensor, Tensor]] = {}
        with torch.no_grad():
            x_BTC = adapter.embed(ops, batch.input_ids, ctx)
            for layer in range(adapter.n_layers):
                if layer < how.first_layer or (how.recompute and layer < last):
                    if layer >= how.first_layer:
                        inputs[layer] = x_BTC
                    x_BTC = adapter.block(ops, layer, x_BTC, ctx)
                else:
                    kept[layer] = self._with_graph(ops, layer, x_BTC, ctx, how, again=False)
                    x_BTC = kept[layer][1].detach()
            if logits is not None:
                logits[dropout.micro_batch] = self._project(ops, x_BTC)
        positions, targets = (t.to(x_BTC.device) for t in batch.supervised)
        x_NC = x_BTC.reshape(-1, x_BTC.shape[-1])
        loss, dx = head_loss(adapter, ops, x_NC, positions, targets, scale, wants_dx=how.first_layer <= last)
        if dx is None:
            return loss
        dx_BTC = dx.view(x_BTC.shape)
        del x_BTC, x_NC, dx
        for layer in range(last, how.first_layer - 1, -1):
            if layer in kept:
                x_in, x_out = kept.pop(layer)
            else:
                x_in, x_out = self._with_graph(ops, layer, inputs.pop(layer), ctx, how, again=True)
            torch.autograd.backward(x_out, dx_BTC)
            dx_BTC = x_in.grad
            del x_in, x_out
        return loss

    def _with_graph(
        self, ops: StreamedOps, layer: int, x_BTC: Tensor, ctx: ForwardContext, how: TrainPass, again: bool
    ) -> tuple[Tensor, Tensor]:
        """A block's input and output with the graph between them; ``again``: its output's values are known already."""
        x_in = x_BTC.detach().requires_grad_(layer > how.first_layer)
        ops.recomputing = again
        try:
            with torch.enable_grad():
                return x_in, self.adapter.block(ops, layer, x_in, ctx)
        finally:
            ops.recomputing = False

    # -- evaluation

    @torch.no_grad()
    def loss(self, batch: TokenBatch) -> tuple[float, int]:
        """Summed negative log-likelihood (nats) and the number of targets, without gradients or dropout."""
        if batch.n_targets == 0:
            return 0.0, 0

        def compute(ops: StreamedOps, batch: TokenBatch) -> Tensor:
            x_BTC = self._hidden(ops, batch, self._context(ops, batch))
            positions, targets = (t.to(x_BTC.device) for t in batch.supervised)
            return head_loss(self.adapter, ops, x_BTC.reshape(-1, x_BTC.shape[-1]), positions, targets, None)[0]

        key = ("evaluate", n_chunks(batch.n_targets, self.adapter.vocab_size))
        return self._run(key, compute, batch).item(), batch.n_targets

    @torch.no_grad()
    def logits(self, batch: TokenBatch) -> Tensor:
        """fp32 [B, T, V] on the CPU, without dropout."""

        def compute(ops: StreamedOps, batch: TokenBatch) -> Tensor:
            return self._project(ops, self._hidden(ops, batch, self._context(ops, batch)))

        return self._run(("logits", n_chunks(batch.input_ids.numel(), self.adapter.vocab_size)), compute, batch)

    def _project(self, ops: StreamedOps, x_BTC: Tensor) -> Tensor:
        """The head over every token, a chunk at a time: fp32 [B, T, V] on the CPU."""
        chunk = chunk_tokens(self.adapter.vocab_size)
        x_NC = x_BTC.reshape(-1, x_BTC.shape[-1])
        out_NV = torch.empty(len(x_NC), self.adapter.vocab_size, device="meta" if x_NC.is_meta else "cpu")
        for chunk_nC, out_nV in zip(x_NC.split(chunk), out_NV.split(chunk), strict=True):
            out_nV.copy_(self.adapter.head(ops, chunk_nC))
        return out_NV.view(*x_BTC.shape[:-1], -1)

    @torch.no_grad()
    def next_logits(self, batch: TokenBatch, cache: KVCache) -> Tensor:
        """Feed new tokens after those in ``cache``; fp32 logits [B, V] of the last one, on the CPU.

        ``batch.attention_mask`` covers cached and new tokens; the new ones are the last ``input_ids.shape[1]``.
        """

        def compute(ops: StreamedOps, batch: TokenBatch) -> Tensor:
            held = None if batch.input_ids.is_meta else cache
            ctx = self._context(ops, batch, cache=held)
            x_BTC = self._hidden(ops, batch, ctx)
            return self.adapter.head(ops, x_BTC[:, -1]).float()

        return self._run(("generate",), compute, batch).cpu()

    def _hidden(self, ops: StreamedOps, batch: TokenBatch, ctx: ForwardContext) -> Tensor:
        x_BTC = self.adapter.embed(ops, batch.input_ids, ctx)
        for layer in range(self.adapter.n_layers):
            x_BTC = self.adapter.block(ops, layer, x_BTC, ctx)
        return x_BTC

    # -- steps

    def _context(
        self, ops: StreamedOps, batch: TokenBatch, dropout: DropoutKey | None = None, cache: KVCache | None = None
    ) -> ForwardContext:
        n_queries = batch.input_ids.shape[1]
        if batch.input_ids.is_meta:
            positions, mask = torch.empty(batch.input_ids.shape, dtype=torch.int64, device="meta"), None
        else:
            positions = token_positions(batch.attention_mask)[:, -n_queries:].to(ops.device)
            mask = attention_mask_BTS(batch.attention_mask, n_queries)
            mask = None if mask is None else mask.to(ops.device)
        ctx = ForwardContext(positions, mask, cache, dropout)
        self.adapter.prepare(ctx)
        return ctx

    def _run(self, key: Hashable, compute: Callable[[StreamedOps, TokenBatch], T], batch: TokenBatch) -> T:
        with self._step(self.trace(key, compute, batch)):
            return compute(self._ops, batch)

    @contextmanager
    def _step(self, trace: Trace):
        self.store.begin_step(trace)
        try:
            yield
            self.store.end_step()
        except BaseException:
            self.store.abort_step()
            raise

    def trace(self, key: Hashable, compute: Callable[[StreamedOps, TokenBatch], object], batch: TokenBatch) -> Trace:
        """The accesses of one micro-batch, from a run on the meta device; kept by ``key``, which holds all that they
        depend on. Such a run takes about 0.1 s per layer, so nothing is traced twice."""
        if key not in self._traces:
            recorder = TraceRecorder(self._model)
            ops = StreamedOps(
                recorder,
                self._ops.kernel,
                torch.device("meta"),
                self.dtype,
                {name: update.on_meta() for name, update in self._ops.updates.items()},
                self._ops.biased,
            )
            compute(ops, _batch_on_meta(batch))
            self._traces[key] = recorder.trace(key)
        return self._traces[key]


def _one_after_another(traces: Sequence[Trace]) -> Trace:
    accesses = tuple(chain.from_iterable(trace.accesses for trace in traces))
    return Trace(tuple(trace.key for trace in traces), accesses)


def _batch_on_meta(batch: TokenBatch) -> TokenBatch:
    """The ids' shape without their numbers; labels stay, since where the targets are decides what is computed."""
    return replace(batch, input_ids=torch.empty_like(batch.input_ids, device="meta"))
