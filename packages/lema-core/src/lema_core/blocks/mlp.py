"""The gated feed-forward part (Shazeer 2020, "GLU Variants Improve Transformer", arXiv:2002.05202).

Shapes: B rows, T tokens, C hidden size, F feed-forward size.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor

from lema_core.adapter import TensorSpec
from lema_core.blocks.attention import linear_tensors
from lema_core.ops.streamed import StreamedOps


@dataclass(frozen=True)
class GatedMlp:
    """``down(silu(gate(x)) * up(x))``. ``gate``, ``up``, ``down``: what an architecture names them."""

    hidden_size: int
    intermediate_size: int
    bias: bool = False
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"

    def tensors(self, prefix: str, layer: int) -> Iterator[TensorSpec]:
        """What lies under ``prefix`` (``model.layers.3.mlp``)."""
        inside = (self.intermediate_size, self.hidden_size)
        for name, shape in ((self.gate, inside), (self.up, inside), (self.down, inside[::-1])):
            yield from linear_tensors(f"{prefix}.{name}", shape, layer, self.bias)

    def block_output(self, ops: StreamedOps, prefix: str, residual_BTC: Tensor, x_BTC: Tensor) -> Tensor:
        """``residual + mlp(x)``, which must be what the block returns; see StreamedOps.block_output."""
        gate_BTF, up_BTF = ops.linears(x_BTC, [f"{prefix}.{self.gate}", f"{prefix}.{self.up}"])
        return ops.block_output(residual_BTC, ops.silu_product(gate_BTF, up_BTF), f"{prefix}.{self.down}")
