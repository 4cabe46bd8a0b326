"""LFM2's gated short convolution (Liquid AI 2025, "LFM2 Technical Report", arXiv:2511.23404).

Shapes: B rows, T tokens, C hidden size.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor

from lema_core.adapter import TensorSpec
from lema_core.blocks.attention import linear_tensors
from lema_core.ops.context import ForwardContext
from lema_core.ops.streamed import StreamedOps


@dataclass(frozen=True)
class GatedShortConv:
    """``out(c * conv(b * x))``, where one projection of the input gives b, c and x; ``taps`` of the convolution."""

    hidden_size: int
    taps: int
    bias: bool = False

    def tensors(self, prefix: str, layer: int) -> Iterator[TensorSpec]:
        """What lies under ``prefix`` (``model.layers.3.conv``)."""
        c = self.hidden_size
        yield from linear_tensors(f"{prefix}.in_proj", (3 * c, c), layer, self.bias)
        yield TensorSpec(f"{prefix}.conv.weight", (c, 1, self.taps), "conv", layer)
        if self.bias:
            yield TensorSpec(f"{prefix}.conv.bias", (c,), "bias", layer)
        yield from linear_tensors(f"{prefix}.out_proj", (c, c), layer, self.bias)

    def __call__(self, ops: StreamedOps, prefix: str, layer: int, x_BTC: Tensor, ctx: ForwardContext) -> Tensor:
        """x_BTC -> [B, T, C]. Padding before a row's tokens counts as zeros, as if the row began with them.

        (transformers puts the zeros before the projection, whose bias then reaches the first tokens.)
        """
        b_BTC, c_BTC, x_BTC = ops.linear(x_BTC, f"{prefix}.in_proj").chunk(3, dim=-1)
        gated_BTC = b_BTC * x_BTC
        if ctx.valid_BT is not None:
            gated_BTC = gated_BTC * ctx.valid_BT.unsqueeze(-1)
        return ops.linear(c_BTC * ops.conv(gated_BTC, f"{prefix}.conv", ctx, layer), f"{prefix}.out_proj")
