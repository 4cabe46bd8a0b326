"""The operations an adapter writes its math with. Each borrows the weights it needs and gives them back before it
returns.

A linear saves where its weight lies, never the weight, and borrows again when the gradient comes. Weights that train
get their gradient in accumulators outside of autograd, frozen ones get none. Several micro-batches may be packed into
one pass: what mixes tokens, and what might round by their number, is then computed for each apart. Shapes: N tokens, K
inputs, O outputs, r rank of a low-rank update.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lema_core.ops.attention import attention, dropped_attention
from lema_core.ops.context import Dropout, ForwardContext, Segment
from lema_core.ops.conv import short_conv
from lema_core.ops.elementwise import gelu, layer_norm, rms_norm, rotary, silu_product
from lema_core.ops.experts import run_experts
from lema_core.ops.gradients import ANCHOR, Collected, Gradients, Rows, Sink
from lema_core.ops.kernels import Kernels
from lema_core.ops.low_rank import LowRankUpdate
from lema_core.ops.products import (
    add_bias_gradients,
    add_low_rank_gradients,
    add_weight_gradients,
    input_gradient,
    products,
    through_B,
)
from lema_core.ops.tape import Tape
from lema_core.store.source import WeightSource


@dataclass(frozen=True)
class Pass:
    """What holds for all operations of one pass through a block. ``segments``: packed micro-batches, empty where there
    is but one batch. ``dropout``: None outside training.

    ``tape``: records the block's products, or, when ``again``, has them. ``again``: the block runs a second time for
    its gradient; see StreamedOps.block_output.
    """

    segments: tuple[Segment, ...] = ()
    dropout: Dropout | None = None
    tape: Tape | None = None
    again: bool = False

    @property
    def columns(self) -> tuple[tuple[int, int], ...]:
        return tuple((segment.start, segment.stop) for segment in self.segments)


_ALONE = Pass()


class StreamedOps:
    """Operations over one weight source. ``updates``: low-rank updates by module name; ``biased``: modules that have a
    bias; ``transposed``: those whose weight lies as [in, out]; ``gradients``: of weights that train, None where none
    does."""

    def __init__(
        self,
        weights: WeightSource,
        kernels: Kernels,
        device: torch.device,
        dtype: torch.dtype,
        updates: Mapping[str, LowRankUpdate],
        biased: frozenset[str] = frozenset(),
        transposed: frozenset[str] = frozenset(),
        gradients: Gradients | None = None,
    ) -> None:
        self.weights = weights
        self.kernels = kernels
        self.device = device
        self.dtype = dtype
        self.updates = updates
        self.biased = biased
        self.transposed = transposed
        self.gradients = gradients
        self.now = _ALONE

    @contextmanager
    def during(self, one_pass: Pass) -> Iterator[None]:
        """Operations inside belong to ``one_pass``."""
        self.now, before = one_pass, self.now
        try:
            yield
        finally:
            self.now = before

    def linears(self, x_BTK: Tensor, modules: Sequence[str], last: bool = False) -> list[Tensor]:
        """``[W x + b + low-rank update for each module]`` of one input, given together so that they can be computed
        together. ``last``: a block's output; see :meth:`block_output`."""
        trained = [tensor for name in modules if name in self.updates for tensor in self.updates[name].parameters()]
        if any(self.trains(f"{name}.weight") or self.trains(f"{name}.bias") for name in modules):
            trained.append(ANCHOR)
        leading = x_BTK.shape[:-1]
        x_NK = x_BTK.reshape(-1, x_BTK.shape[-1])
        outputs = _Linears.apply(self, self.now, tuple(modules), last, x_NK, *trained)
        return [y.view(*leading, y.shape[-1]) for y in outputs]

    def block_output(self, residual_BTC: Tensor, x_BTK: Tensor, module: str, dropout: float = 0.0) -> Tensor:
        """``residual + dropout(linear(x))``: what a block returns, and nothing else reads.

        When a block runs again for its gradient, only the graph of this sum is needed: the product is left out, the
        values are undefined, and no tape keeps them.
        """
        return residual_BTC + self.dropout(self.linears(x_BTK, [module], last=True)[0], dropout, module)

    def linear(self, x_BTK: Tensor, module: str) -> Tensor:
        return self.linears(x_BTK, [module])[0]

    def experts(self, x_BTC: Tensor, scores_Nk: Tensor, picked_Nk: Tensor, prefix: str) -> Tensor:
        """``sum_k scores[:, k] * expert[picked[:, k]](x)`` over the experts under ``prefix``; comes last in a block, as
        :meth:`block_output` does."""
        return run_experts(self, x_BTC, scores_Nk, picked_Nk, prefix)

    def embedding(self, ids_BT: Tensor, name: str, padding_id: int | None = None) -> Tensor:
        """Rows of the table ``name`` -> [B, T, C], feature-major. ``padding_id``: its row gets no gradient here, as in
        torch's embedding."""
        ids_N = ids_BT.reshape(-1).cpu()
        rows_NC = self.weights.rows(name, ids_N, self.dtype)
        if self.trains(name):
            learning_N = ids_N if padding_id is None else ids_N.masked_fill(ids_N == padding_id, -1)
            rows_NC = Rows.apply(rows_NC, self.gradients, name, learning_N, self.now.columns, ANCHOR)
        return rows_NC.t().contiguous().t().view(*ids_BT.shape, -1)

    def vector(self, name: str) -> Tensor:
        """A small tensor, copied out in fp32, for math of an adapter's own.

        Where it trains, its gradient is added for all micro-batches of a pass at once, and so may round by what is
        packed together; the operations below add it micro-batch by micro-batch.
        """
        sink = self.sink(name)
        held = self.held(name)
        return held if sink is None else Collected.apply(held, sink, ANCHOR)

    def held(self, name: str) -> Tensor:
        """A small tensor (norm weight, bias), copied out in fp32; autograd knows nothing of it."""
        (part,) = self.weights.parts(name)
        with self.weights.borrow(part) as held:
            return held.to(torch.float32, copy=True)

    def trains(self, name: str) -> bool:
        return self.gradients is not None and self.gradients.trains(name)

    def sink(self, name: str, one_pass: Pass | None = None) -> Sink | None:
        """Where the gradient of a small tensor goes, from the present pass if not from ``one_pass``; None where it is
        frozen."""
        if not self.trains(name):
            return None
        (part,) = self.weights.parts(name)
        return Sink(self.gradients, part, (one_pass or self.now).columns)

    def rms_norm(self, x_BTC: Tensor, name: str, eps: float) -> Tensor:
        """x / rms(x) * weight, statistics in fp32 (Zhang and Sennrich, 2019)."""
        return rms_norm(self.kernels.elementwise, x_BTC, self.held(name), eps, self.sink(name))

    def head_norm(self, x_BHTD: Tensor, name: str, eps: float) -> Tensor:
        """The same over the features of each head."""
        return rms_norm(self.kernels.elementwise, x_BHTD, self.held(name), eps, self.sink(name))

    def layer_norm(self, x_BTC: Tensor, module: str, eps: float) -> Tensor:
        """(x - mean) / std * weight + bias, statistics in fp32 (Ba et al., 2016)."""
        names = f"{module}.weight", f"{module}.bias"
        return layer_norm(
            self.kernels.elementwise, x_BTC, *map(self.held, names), eps, *(self.sink(name) for name in names)
        )

    def gelu(self, x_BTF: Tensor, approximate: str = "none") -> Tensor:
        """x times the normal distribution's cumulative function (Hendrycks and Gimpel, 2016); ``approximate="tanh"``:
        GPT-2's approximation of it."""
        return gelu(self.kernels.elementwise, x_BTF, approximate)

    def silu_product(self, gate_BTF: Tensor, up_BTF: Tensor) -> Tensor:
        """silu(gate) * up (Shazeer, 2020)."""
        return silu_product(self.kernels.elementwise, gate_BTF, up_BTF)

    def rotary(self, x_BHTD: Tensor, tables: tuple[Tensor, Tensor]) -> Tensor:
        """The halves of each head, turned by its token's angles; ``tables``: cos and sin, fp32 [B, 1, T, D / 2]."""
        return rotary(self.kernels.elementwise, x_BHTD, tables)

    def attention(
        self,
        q_BHTD: Tensor,
        k_BHSD: Tensor,
        v_BHSD: Tensor,
        ctx: ForwardContext,
        scale: float,
        window: int | None = None,
        dropout: float = 0.0,
        name: str = "",
    ) -> Tensor:
        """Causal softmax attention inside each row; query heads are a multiple of key heads. -> [B, T, H * D].

        ``window``: one of the adapter's ``windows``; a query sees so many keys at most, itself included. ``dropout``:
        of its weights in training, drawn by ``name``; the adapter says so in ``dropped_heads``.
        """
        if dropout and self.now.dropout is not None:
            q, k, v = q_BHTD, k_BHSD, v_BHSD
            return dropped_attention(q, k, v, ctx.seen(window), scale, self.now.dropout, dropout, f"{name}.weights")
        return attention(self.kernels.attention, q_BHTD, k_BHSD, v_BHSD, ctx, scale, window)

    def conv(self, x_BTC: Tensor, module: str, ctx: ForwardContext, layer: int) -> Tensor:
        """A short causal convolution along each row, every feature by itself; the weight is [C, 1, taps]."""
        taps_CK, taps_to = self.held(f"{module}.weight").flatten(1), self.sink(f"{module}.weight")
        bias_C, bias_to = None, None
        if self.has_bias(module):
            bias_C, bias_to = self.held(f"{module}.bias"), self.sink(f"{module}.bias")
        return short_conv(x_BTC, taps_CK, bias_C, ctx, layer, taps_to, bias_to)

    def dropout(self, x_BTC: Tensor, p: float, name: str) -> Tensor:
        """Dropout in training, identity otherwise."""
        dropout = self.now.dropout
        if dropout is None or p == 0:
            return x_BTC
        x_CN = x_BTC.reshape(-1, x_BTC.shape[-1]).t()
        return (x_CN * dropout.mask(name, x_CN, p)).t().view_as(x_BTC)

    def has_bias(self, module: str) -> bool:
        return module in self.biased

    def outputs(self, module: str) -> int:
        """How many features a linear gives."""
        parts = self.weights.parts(f"{module}.weight")
        return parts[0].shape[1] if module in self.transposed else parts[-1].stop


def _feature_major(x_NK: Tensor) -> Tensor:
    """[N, K] -> contiguous [K, N]; a copy only where x is not feature-major already."""
    return x_NK.t().contiguous()


class _Linears(torch.autograd.Function):
    """Several linears of one input. Inputs after x are lora_A, lora_B of the modules that have an update, in order, and
    an anchor where weights or biases train.

    Their gradients are added to ``.grad`` and to accumulators here, micro-batch by micro-batch, so that the order of
    the sums does not depend on what is packed together.
    """

    @staticmethod
    def forward(
        ctx: Any, ops: StreamedOps, now: Pass, modules: tuple[str, ...], last: bool, x_NK: Tensor, *trained: Tensor
    ) -> tuple[Tensor, ...]:
        x_KN = _feature_major(x_NK)
        tape = None if last else now.tape
        if tape is not None and now.again:
            found = tape.replay()
        else:
            found = products(ops, now, modules, x_KN, values=not (last and now.again))
            if tape is not None:
                tape.record(found)
        ctx.ops, ctx.now, ctx.modules = ops, now, modules
        multiplied = found.projected is not None or any(ops.trains(f"{name}.weight") for name in modules)
        ctx.save_for_backward(x_KN if multiplied else None, found.projected)
        return tuple(y_ON.t() for y_ON in found.outputs)

    @staticmethod
    def backward(ctx: Any, *dy_NO: Tensor) -> tuple[Tensor | None, ...]:
        ops, now, modules = ctx.ops, ctx.now, ctx.modules
        x_KN, projected_rN = ctx.saved_tensors
        dy = {module: _feature_major(d) for module, d in zip(modules, dy_NO, strict=True)}
        da = {
            module: through_B(ops, now, ops.updates[module], dy[module]) for module in modules if module in ops.updates
        }
        dx_KN = None
        if ctx.needs_input_grad[4]:
            dx_KN = input_gradient(ops, now, modules, dy, da, x_KN)
        else:
            add_weight_gradients(ops, now, modules, dy, x_KN)
        if da:
            add_low_rank_gradients(ops, now, dy, da, x_KN, projected_rN)
        add_bias_gradients(ops, now, modules, dy)
        return None, None, None, None, None if dx_KN is None else dx_KN.t(), *(None for _ in ctx.needs_input_grad[5:])
