"""The operations an adapter writes its math with. Each borrows the weights it needs and gives them back before it
returns.

A linear saves where its weight lies, never the weight, and borrows again when the gradient comes. Frozen weights get no
gradient. Several micro-batches may be packed into one pass: what mixes tokens, and what might round by their number,
is then computed for each apart. Shapes: N tokens, K inputs, O outputs, r rank of a low-rank update.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lema_core.ops.attention import attention
from lema_core.ops.context import Dropout, ForwardContext, Segment
from lema_core.ops.conv import short_conv
from lema_core.ops.elementwise import gelu, layer_norm, rms_norm, rotary, silu_product
from lema_core.ops.kernels import Kernels
from lema_core.ops.low_rank import LowRankUpdate
from lema_core.ops.tape import Products, Tape
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
    bias; ``transposed``: those whose weight lies as [in, out]."""

    def __init__(
        self,
        weights: WeightSource,
        kernels: Kernels,
        device: torch.device,
        dtype: torch.dtype,
        updates: Mapping[str, LowRankUpdate],
        biased: frozenset[str] = frozenset(),
        transposed: frozenset[str] = frozenset(),
    ) -> None:
        self.weights = weights
        self.kernels = kernels
        self.device = device
        self.dtype = dtype
        self.updates = updates
        self.biased = biased
        self.transposed = transposed
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

    def embedding(self, ids_BT: Tensor, name: str) -> Tensor:
        """Rows of the table ``name`` -> [B, T, C], feature-major."""
        rows_NC = self.weights.rows(name, ids_BT.reshape(-1).cpu(), self.dtype)
        return rows_NC.t().contiguous().t().view(*ids_BT.shape, -1)

    def vector(self, name: str) -> Tensor:
        """A small tensor (norm weight, bias) copied out in fp32."""
        (part,) = self.weights.parts(name)
        with self.weights.borrow(part) as held:
            return held.to(torch.float32, copy=True)

    def rms_norm(self, x_BTC: Tensor, name: str, eps: float) -> Tensor:
        """x / rms(x) * weight, statistics in fp32 (Zhang and Sennrich, 2019)."""
        return rms_norm(self.kernels.elementwise, x_BTC, self.vector(name), eps)

    def head_norm(self, x_BHTD: Tensor, name: str, eps: float) -> Tensor:
        """The same over the features of each head."""
        return rms_norm(self.kernels.elementwise, x_BHTD, self.vector(name), eps)

    def layer_norm(self, x_BTC: Tensor, module: str, eps: float) -> Tensor:
        """(x - mean) / std * weight + bias, statistics in fp32 (Ba et al., 2016)."""
        weight_C, bias_C = self.vector(f"{module}.weight"), self.vector(f"{module}.bias")
        return layer_norm(self.kernels.elementwise, x_BTC, weight_C, bias_C, eps)

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
    ) -> Tensor:
        """Causal softmax attention inside each row; query heads are a multiple of key heads. -> [B, T, H * D].

        ``window``: one of the adapter's ``windows``; a query sees so many keys at most, itself included.
        """
        return attention(self.kernels.attention, q_BHTD, k_BHSD, v_BHSD, ctx, scale, window)

    def conv(self, x_BTC: Tensor, module: str, ctx: ForwardContext, layer: int) -> Tensor:
        """A short causal convolution along each row, every feature by itself; the weight is [C, 1, taps]."""
        taps_CK = self.vector(f"{module}.weight").flatten(1)
        bias_C = self.vector(f"{module}.bias") if self.has_bias(module) else None
        return short_conv(x_BTC, taps_CK, bias_C, ctx, layer)

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
    """Several linears of one input. Inputs after x are lora_A, lora_B of the modules that have an update, in order.

    Their gradients are added to ``.grad`` here, micro-batch by micro-batch, so that the order of the sums does not
    depend on what is packed together.
    """

    @staticmethod
    def forward(
        ctx: Any, ops: StreamedOps, now: Pass, modules: tuple[str, ...], last: bool, x_NK: Tensor, *trained: Tensor
    ) -> tuple[Tensor, ...]:
        x_KN = _feature_major(x_NK)
        tape = None if last else now.tape
        if tape is not None and now.again:
            products = tape.replay()
        else:
            products = _products(ops, now, modules, x_KN, values=not (last and now.again))
            if tape is not None:
                tape.record(products)
        ctx.ops, ctx.now, ctx.modules = ops, now, modules
        ctx.save_for_backward(x_KN if trained else None, products.projected)
        return tuple(y_ON.t() for y_ON in products.outputs)

    @staticmethod
    def backward(ctx: Any, *dy_NO: Tensor) -> tuple[Tensor | None, ...]:
        ops, now, modules = ctx.ops, ctx.now, ctx.modules
        x_KN, projected_rN = ctx.saved_tensors
        dy = {module: _feature_major(d) for module, d in zip(modules, dy_NO, strict=True)}
        da = {
            module: _through_B(ops, now, ops.updates[module], dy[module]) for module in modules if module in ops.updates
        }
        dx_KN = _input_gradient(ops, now, modules, dy, da, x_KN) if ctx.needs_input_grad[4] else None
        if da:
            _add_low_rank_gradients(ops, now, dy, da, x_KN, projected_rN)
        return None, None, None, None, None if dx_KN is None else dx_KN.t(), *(None for _ in range(2 * len(da)))


def _products(ops: StreamedOps, now: Pass, modules: Sequence[str], x_KN: Tensor, values: bool) -> Products:
    updates = {module: ops.updates[module] for module in modules if module in ops.updates}
    x = ops.kernels.linear.packed(x_KN, now.columns) if values or updates else x_KN
    projected_rN = _through_A(ops, now, updates, x_KN, x) if updates else None
    outputs, first_row = [], 0
    for module in modules:
        update = updates.get(module)
        term = None
        if update is not None:
            a_rN = projected_rN[first_row : first_row + update.rank]
            term = update.lora_B.detach().to(x_KN.dtype), a_rN, update.scale
            first_row += update.rank
        outputs.append(_product(ops, now, module, x, x_KN, term) if values else _no_values(ops, module, x_KN))
    return Products(outputs, projected_rN)


def _product(
    ops: StreamedOps, now: Pass, module: str, x: Any, x_KN: Tensor, term: tuple[Tensor, Tensor, float] | None
) -> Tensor:
    """W x + b + scale * B a, [O, N]. ``x``: what the kernel packed ``x_KN`` into."""
    parts = ops.weights.parts(f"{module}.weight")
    y_ON = torch.empty(ops.outputs(module), x_KN.shape[1], dtype=x_KN.dtype, device=x_KN.device)
    if module in ops.transposed:
        # What lies transposed is multiplied as the gradient of what does not.
        update = None if term is None else (term[0].t().contiguous(), term[1] * term[2])
        for part in parts:
            with ops.weights.borrow(part) as weight:
                given_KN = x_KN[part.start : part.stop]
                ops.kernels.linear.input_gradient(weight, given_KN, y_ON, part.start == 0, update, now.columns)
            update = None
        return _with_bias(ops, module, y_ON)
    for part in parts:
        rows = slice(part.start, part.stop)
        update = None if term is None else (term[0][rows], *term[1:])
        with ops.weights.borrow(part) as weight:
            ops.kernels.linear.forward(weight, x, y_ON[rows], update, now.columns)
    return _with_bias(ops, module, y_ON)


def _with_bias(ops: StreamedOps, module: str, y_ON: Tensor) -> Tensor:
    if ops.has_bias(module):
        y_ON += ops.vector(f"{module}.bias").to(y_ON.dtype).unsqueeze(1)
    return y_ON


def _no_values(ops: StreamedOps, module: str, x_KN: Tensor) -> Tensor:
    """The shape of a product, [O, N], without memory behind it."""
    return x_KN.new_zeros(()).expand(ops.outputs(module), x_KN.shape[1])


def _through_A(ops: StreamedOps, now: Pass, updates: Mapping[str, LowRankUpdate], x_KN: Tensor, x: Any) -> Tensor:
    """``A x`` of all modules, one below the other: one product where all see the same input."""
    if any(_drops(now, update) for update in updates.values()):
        rows = []
        for module, update in updates.items():
            dropped = ops.kernels.linear.packed(_dropped(now, module, update, x_KN), now.columns)
            rows.append(_small_product(ops, now, update.lora_A.detach().to(x_KN.dtype), dropped, x_KN))
        return torch.cat(rows)
    a_rK = [update.lora_A.detach().to(x_KN.dtype) for update in updates.values()]
    return _small_product(ops, now, a_rK[0] if len(a_rK) == 1 else torch.cat(a_rK), x, x_KN)


def _small_product(ops: StreamedOps, now: Pass, a_rK: Tensor, x: Any, like_KN: Tensor) -> Tensor:
    out_rN = torch.empty(len(a_rK), like_KN.shape[1], dtype=like_KN.dtype, device=like_KN.device)
    ops.kernels.linear.forward(a_rK, x, out_rN, None, now.columns)
    return out_rN


def _through_B(ops: StreamedOps, now: Pass, update: LowRankUpdate, dy_ON: Tensor) -> Tensor:
    """The gradient of ``A x``: scale * B^T dy, [r, N]."""
    da_rN = torch.empty(update.rank, dy_ON.shape[1], dtype=dy_ON.dtype, device=dy_ON.device)
    ops.kernels.linear.input_gradient(update.lora_B.detach().to(dy_ON.dtype), dy_ON, da_rN, True, None, now.columns)
    return da_rN.mul_(update.scale)


def _input_gradient(
    ops: StreamedOps,
    now: Pass,
    modules: Sequence[str],
    dy: Mapping[str, Tensor],
    da: Mapping[str, Tensor],
    x_KN: Tensor | None,
) -> Tensor:
    """The sum over modules of W^T dy + A^T da, [K, N]; borrows in the reverse order of the forward pass."""
    dx_KN: Tensor | None = None
    masked: list[str] = []
    for module in reversed(modules):
        dy_ON, update = dy[module], ops.updates.get(module)
        term = None
        if update is not None and _drops(now, update):
            masked.append(module)
        elif update is not None:
            term = update.lora_A.detach().to(dy_ON.dtype), da[module]
        if module in ops.transposed:
            through_KN = _transposed_input_gradient(ops, now, module, dy_ON, term)
            dx_KN = through_KN if dx_KN is None else dx_KN.add_(through_KN)
            continue
        for part in reversed(ops.weights.parts(f"{module}.weight")):
            with ops.weights.borrow(part) as weight:
                first = dx_KN is None
                if dx_KN is None:
                    dx_KN = torch.empty(weight.shape[1], dy_ON.shape[1], dtype=dy_ON.dtype, device=dy_ON.device)
                ops.kernels.linear.input_gradient(
                    weight, dy_ON[part.start : part.stop], dx_KN, first, term, now.columns
                )
            term = None
    for module in masked:
        update = ops.updates[module]
        branch_KN = torch.empty_like(dx_KN)
        a_rK = update.lora_A.detach().to(dx_KN.dtype)
        ops.kernels.linear.input_gradient(a_rK, da[module], branch_KN, True, None, now.columns)
        dx_KN += branch_KN.mul_(now.dropout.mask(f"{module}.lora", branch_KN, update.dropout))
    return dx_KN


def _transposed_input_gradient(
    ops: StreamedOps, now: Pass, module: str, dy_ON: Tensor, term: tuple[Tensor, Tensor] | None
) -> Tensor:
    """Of one module whose weight lies as [in, out]: W dy + A^T da, [K, N]."""
    parts = ops.weights.parts(f"{module}.weight")
    dx_KN = torch.empty(parts[-1].stop, dy_ON.shape[1], dtype=dy_ON.dtype, device=dy_ON.device)
    a_Kr = None if term is None else term[0].t().contiguous()
    dy = ops.kernels.linear.packed(dy_ON, now.columns)
    for part in reversed(parts):
        rows = slice(part.start, part.stop)
        with ops.weights.borrow(part) as weight:
            update = None if a_Kr is None else (a_Kr[rows], term[1], 1.0)
            ops.kernels.linear.forward(weight, dy, dx_KN[rows], update, now.columns)
    return dx_KN


def _add_low_rank_gradients(
    ops: StreamedOps,
    now: Pass,
    dy: Mapping[str, Tensor],
    da: Mapping[str, Tensor],
    x_KN: Tensor,
    projected_rN: Tensor,
) -> None:
    """Add dB = scale * dy a^T and dA = da x^T to the ``.grad`` of each module's lora_B and lora_A."""
    columns = now.columns or ((0, x_KN.shape[1]),)
    first_row = 0
    for module, da_rN in da.items():
        update = ops.updates[module]
        a_rN = projected_rN[first_row : first_row + update.rank]
        first_row += update.rank
        seen_KN = _dropped(now, module, update, x_KN)
        dA_rK, dB_Or = map(update.gradient, update.parameters())
        for start, stop in columns:
            _add_product(dB_Or, dy[module][:, start:stop], a_rN[:, start:stop], update.scale)
            _add_product(dA_rK, da_rN[:, start:stop], seen_KN[:, start:stop], 1.0)


def _add_product(total_MK: Tensor, left_Mn: Tensor, right_Kn: Tensor, scale: float) -> None:
    """``total += scale * left right^T``. The copies make a micro-batch look as it does alone."""
    product_MK = left_Mn.contiguous() @ right_Kn.contiguous().t()
    total_MK.add_(product_MK.to(total_MK.dtype), alpha=scale)


def _drops(now: Pass, update: LowRankUpdate) -> bool:
    return now.dropout is not None and update.dropout > 0


def _dropped(now: Pass, module: str, update: LowRankUpdate, x_KN: Tensor) -> Tensor:
    """What goes into a module's A."""
    return x_KN * now.dropout.mask(f"{module}.lora", x_KN, update.dropout) if _drops(now, update) else x_KN
