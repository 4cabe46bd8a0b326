"""The operations an adapter writes its math with. Each borrows the weights it needs and gives them back before it
returns.

A linear saves where its weight lies, never the weight, and borrows again when the gradient comes. Frozen weights get no
gradient. Shapes: N tokens, K inputs, O outputs, r rank of a low-rank update.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lema_core.ops.context import DropoutKey, ForwardContext
from lema_core.ops.linear import LinearKernel
from lema_core.ops.low_rank import LowRankUpdate
from lema_core.store.source import WeightSource


class StreamedOps:
    """Operations over one weight source. ``updates``: low-rank updates by module name; ``dropout``: the key of this
    pass."""

    def __init__(
        self,
        weights: WeightSource,
        kernel: LinearKernel,
        device: torch.device,
        dtype: torch.dtype,
        updates: Mapping[str, LowRankUpdate],
        biased: frozenset[str] = frozenset(),
    ) -> None:
        self.weights = weights
        self.kernel = kernel
        self.device = device
        self.dtype = dtype
        self.updates = updates
        self.biased = biased
        #: a block runs again for its gradient; see block_output
        self.recomputing = False

    def linears(
        self, x_BTK: Tensor, modules: Sequence[str], dropout: DropoutKey | None = None, values: bool = True
    ) -> list[Tensor]:
        """``[W x + b + low-rank update for each module]`` of one input, given together so that they can be computed
        together. Without ``values`` only their graph is made."""
        updates = [self.updates[name] for name in modules if name in self.updates]
        low_rank = [tensor for update in updates for tensor in (update.lora_A, update.lora_B)]
        leading = x_BTK.shape[:-1]
        x_NK = x_BTK.reshape(-1, x_BTK.shape[-1])
        outputs = _Linears.apply(self, tuple(modules), dropout, values, x_NK, *low_rank)
        return [y.view(*leading, y.shape[-1]) for y in outputs]

    def block_output(
        self, residual_BTC: Tensor, x_BTK: Tensor, module: str, dropout: DropoutKey | None = None
    ) -> Tensor:
        """``residual + linear(x)``: what a block returns, and nothing else reads.

        While a block is recomputed for its gradient, only the graph of this sum is needed: the product is left out and
        the values are undefined.
        """
        return residual_BTC + self.linears(x_BTK, [module], dropout, values=not self.recomputing)[0]

    def linear(self, x_BTK: Tensor, module: str, dropout: DropoutKey | None = None) -> Tensor:
        return self.linears(x_BTK, [module], dropout)[0]

    def embedding(self, ids_BT: Tensor, name: str) -> Tensor:
        """Rows of the table ``name`` -> [B, T, C], feature-major."""
        rows_NC = self.weights.rows(name, ids_BT.reshape(-1), self.dtype)
        return rows_NC.t().contiguous().t().view(*ids_BT.shape, -1)

    def vector(self, name: str) -> Tensor:
        """A small tensor (norm weight, bias) copied out in fp32."""
        (part,) = self.weights.parts(name)
        with self.weights.borrow(part) as held:
            return held.to(torch.float32, copy=True)

    def rms_norm(self, x_BTC: Tensor, name: str, eps: float) -> Tensor:
        """x / rms(x) * weight, statistics in fp32 (Zhang and Sennrich, 2019)."""
        weight_C = self.vector(name)
        x = x_BTC.float()
        x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
        return (x * weight_C).to(x_BTC.dtype)

    def attention(self, q_BHTD: Tensor, k_BHSD: Tensor, v_BHSD: Tensor, ctx: ForwardContext, scale: float) -> Tensor:
        """Causal softmax attention; query heads are a multiple of key heads. -> [B, T, H * D]."""
        mask = None if ctx.mask_BTS is None else ctx.mask_BTS[:, None]
        causal = mask is None and q_BHTD.shape[2] > 1
        grouped = q_BHTD.shape[1] != k_BHSD.shape[1]
        out = F.scaled_dot_product_attention(
            q_BHTD, k_BHSD, v_BHSD, attn_mask=mask, is_causal=causal, scale=scale, enable_gqa=grouped
        )
        return out.transpose(1, 2).flatten(2)

    def dropout(self, x: Tensor, p: float, name: str, key: DropoutKey | None) -> Tensor:
        """Dropout in training (``key`` given), identity otherwise."""
        return x if key is None or p == 0 else x * key.mask(name, x, p)

    def has_bias(self, module: str) -> bool:
        return module in self.biased


def _feature_major(x_NK: Tensor) -> Tensor:
    """[N, K] -> contiguous [K, N]; a copy only where x is not feature-major already."""
    return x_NK.t().contiguous()


class _Linears(torch.autograd.Function):
    """Several linears of one input. Inputs after x are lora_A, lora_B of the modules that have an update, in order."""

    @staticmethod
    def forward(
        ctx: Any,
        ops: StreamedOps,
        modules: tuple[str, ...],
        dropout: DropoutKey | None,
        values: bool,
        x_NK: Tensor,
        *low_rank: Tensor,
    ) -> tuple[Tensor, ...]:
        x_KN = _feature_major(x_NK)
        ctx.ops, ctx.modules, ctx.dropout = ops, modules, dropout
        projected: list[Tensor] = []
        outputs = []
        for module in modules:
            update = ops.updates.get(module)
            if update is not None:
                projected.append(update.lora_A.detach().to(x_KN.dtype) @ _dropped(x_KN, update, dropout, module))
            y_ON = _product(ops, module, x_KN) if values else _no_values(ops, module, x_KN)
            if values and update is not None:
                y_ON.addmm_(update.lora_B.detach().to(x_KN.dtype), projected[-1], alpha=update.scale)
            outputs.append(y_ON.t())
        ctx.save_for_backward(x_KN if low_rank else None, *projected)
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *dy_NO: Tensor) -> tuple[Tensor | None, ...]:
        ops, modules, dropout = ctx.ops, ctx.modules, ctx.dropout
        x_KN, *projected = ctx.saved_tensors
        needs_dx = ctx.needs_input_grad[4]
        dx_KN: Tensor | None = None
        low_rank_grads: list[Tensor | None] = []
        for module, dy in zip(reversed(modules), reversed(dy_NO), strict=True):
            dy_ON = _feature_major(dy)
            if needs_dx:
                parts = ops.weights.parts(f"{module}.weight")
                first = dx_KN is None
                for part in reversed(parts):
                    with ops.weights.borrow(part) as weight:
                        if dx_KN is None:
                            dx_KN = torch.empty(weight.shape[1], dy_ON.shape[1], dtype=dy_ON.dtype, device=dy_ON.device)
                        ops.kernel.input_gradient(weight, dy_ON[part.start : part.stop], dx_KN, first)
                    first = False
            update = ops.updates.get(module)
            if update is None:
                continue
            a_rN = projected.pop()
            da_rN = (update.lora_B.detach().to(dy_ON.dtype).t() @ dy_ON).mul_(update.scale)
            low_rank_grads.append((dy_ON @ a_rN.t()).mul_(update.scale).to(update.lora_B.dtype))
            low_rank_grads.append((da_rN @ _dropped(x_KN, update, dropout, module).t()).to(update.lora_A.dtype))
            if needs_dx:
                a_Kr = update.lora_A.detach().to(dy_ON.dtype).t()
                if update.dropout and dropout is not None:
                    dx_KN += (a_Kr @ da_rN).mul_(dropout.mask(f"{module}.lora", x_KN, update.dropout))
                else:
                    dx_KN.addmm_(a_Kr, da_rN)
        dx_NK = dx_KN.t() if dx_KN is not None else None
        return None, None, None, None, dx_NK, *reversed(low_rank_grads)


def _dropped(x_KN: Tensor, update: LowRankUpdate, dropout: DropoutKey | None, module: str) -> Tensor:
    if dropout is None or update.dropout == 0:
        return x_KN
    return x_KN * dropout.mask(f"{module}.lora", x_KN, update.dropout)


def _product(ops: StreamedOps, module: str, x_KN: Tensor) -> Tensor:
    """W x + b, [O, N]."""
    parts = ops.weights.parts(f"{module}.weight")
    y_ON = torch.empty(parts[-1].stop, x_KN.shape[1], dtype=x_KN.dtype, device=x_KN.device)
    for part in parts:
        with ops.weights.borrow(part) as weight:
            ops.kernel.forward(weight, x_KN, y_ON[part.start : part.stop])
    if ops.has_bias(module):
        y_ON += ops.vector(f"{module}.bias").to(y_ON.dtype).unsqueeze(1)
    return y_ON


def _no_values(ops: StreamedOps, module: str, x_KN: Tensor) -> Tensor:
    """The shape of a product, [O, N], without memory behind it."""
    return x_KN.new_zeros(()).expand(ops.weights.parts(f"{module}.weight")[-1].stop, x_KN.shape[1])
