"""Grouped-query self-attention with rotary embeddings (Vaswani et al. 2017, arXiv:1706.03762; Ainslie et al. 2023,
arXiv:2305.13245).

Shapes: B rows, T tokens, S keys, C hidden size, H heads, G key/value heads, D head size.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from lema_core.adapter import TensorSpec
from lema_core.blocks.config import Heads
from lema_core.ops.context import ForwardContext
from lema_core.ops.streamed import StreamedOps

#: where an adapter's ``prepare`` puts the rotary tables
ROPE = "rope"


@dataclass(frozen=True)
class SelfAttention:
    """One architecture's attention. ``qkv_bias``, ``o_bias``: which linears have one. ``norms``: names of the RMS norms
    over each head of q and of k, with ``norm_eps``. ``o_proj``: the name of the output projection. ``scale``: of the
    softmax's logits, by default one over the root of the head size."""

    hidden_size: int
    heads: Heads
    qkv_bias: bool = False
    o_bias: bool = False
    norms: tuple[str, str] | None = None
    norm_eps: float = 1e-6
    o_proj: str = "o_proj"
    scale: float | None = None

    def tensors(self, prefix: str, layer: int) -> Iterator[TensorSpec]:
        """What lies under ``prefix`` (``model.layers.3.self_attn``)."""
        heads, c = self.heads, self.hidden_size
        for name, n in (("q_proj", heads.n), ("k_proj", heads.n_kv), ("v_proj", heads.n_kv)):
            yield from linear_tensors(f"{prefix}.{name}", (n * heads.dim, c), layer, self.qkv_bias)
        for name in self.norms or ():
            yield TensorSpec(f"{prefix}.{name}.weight", (heads.dim,), "norm", layer)
        yield from linear_tensors(f"{prefix}.{self.o_proj}", (c, heads.n * heads.dim), layer, self.o_bias)

    def __call__(
        self, ops: StreamedOps, prefix: str, layer: int, x_BTC: Tensor, ctx: ForwardContext, window: int | None = None
    ) -> Tensor:
        """x_BTC -> [B, T, C]. ``window``: a token sees so many keys, itself included; None: all before it.

        Reads the rotary tables from ``ctx.shared[ROPE]`` and appends to ``ctx.cache``, where there is one.
        """
        modules = [f"{prefix}.{name}" for name in ("q_proj", "k_proj", "v_proj")]
        q, k, v = (y.unflatten(-1, (-1, self.heads.dim)).transpose(1, 2) for y in ops.linears(x_BTC, modules))
        if self.norms is not None:
            q, k = (
                ops.head_norm(x, f"{prefix}.{name}.weight", self.norm_eps)
                for x, name in zip((q, k), self.norms, strict=True)
            )
        tables = ctx.shared[ROPE]
        q_BHTD, k_BGTD, v_BGTD = turned(ops, q, tables), turned(ops, k, tables), v
        if ctx.cache is not None:
            k_BGTD, v_BGTD = ctx.cache.append(layer, k_BGTD, v_BGTD)
        scale = self.heads.dim**-0.5 if self.scale is None else self.scale
        out_BTC = ops.attention(q_BHTD, k_BGTD, v_BGTD, ctx, scale, window)
        return ops.linear(out_BTC, f"{prefix}.{self.o_proj}")


def turned(ops: StreamedOps, x_BHTD: Tensor, tables: tuple[Tensor, Tensor]) -> Tensor:
    """Each head turned by its token's angles; what the tables have no angle for stays."""
    size = 2 * tables[0].shape[-1]
    if size == x_BHTD.shape[-1]:
        return ops.rotary(x_BHTD, tables)
    x_BHDT = x_BHTD.transpose(2, 3)
    turned_BHRT = ops.rotary(x_BHTD[..., :size], tables).transpose(2, 3)
    return torch.cat((turned_BHRT, x_BHDT[:, :, size:]), dim=2).transpose(2, 3)


def linear_tensors(module: str, shape: tuple[int, int], layer: int | None, bias: bool) -> Iterator[TensorSpec]:
    """A linear's weight [outputs, inputs], and its bias where it has one."""
    yield TensorSpec(f"{module}.weight", shape, "linear", layer)
    if bias:
        yield TensorSpec(f"{module}.bias", shape[:1], "bias", layer)
