"""LFM2 with experts (Liquid AI 2025, arXiv:2511.23404): the first layers have LFM2's feed-forward part, the others
experts that a sigmoid router picks from.

Shapes: B rows, T tokens, C hidden size, E experts.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from lema_core.adapter import TensorSpec
from lema_core.blocks.config import HfConfig
from lema_core.blocks.moe import Experts, expert_counts, sigmoid_scores, unfolded_experts
from lema_core.checkpoint.segments import TensorInfo
from lema_core.ops.context import ForwardContext
from lema_core.ops.streamed import StreamedOps
from lema_models.lfm2 import Lfm2Adapter, Lfm2Config


@dataclass(frozen=True)
class Lfm2MoeConfig(Lfm2Config):
    """``n_dense`` layers come before those with experts, ``n_picked`` of ``n_experts`` compute a token."""

    n_dense: int
    n_experts: int
    n_picked: int
    expert_size: int
    has_bias: bool
    normalized: bool
    scale: float

    @classmethod
    def from_hf_config(cls, hf_config: Mapping[str, Any]) -> Lfm2MoeConfig:
        """Raises ConfigError naming missing fields, or two that contradict each other."""
        hf = HfConfig(hf_config)
        hf.not_applied("output_router_logits")
        n_experts, n_picked = expert_counts(hf, "num_experts", 32, 4)
        return cls(
            **cls.lfm2(hf),
            n_dense=hf.count("num_dense_layers", 2),
            n_experts=n_experts,
            n_picked=n_picked,
            expert_size=hf.size("moe_intermediate_size", 1792),
            has_bias=hf.flag("use_expert_bias", True),
            normalized=hf.flag("norm_topk_prob", True),
            scale=hf.number("routed_scaling_factor", 1.0),
        )


class Lfm2MoeAdapter(Lfm2Adapter):
    config: Lfm2MoeConfig

    def __init__(self, config: Lfm2MoeConfig) -> None:
        super().__init__(config)
        self.experts = Experts(config.hidden_size, config.expert_size, config.n_experts)

    @classmethod
    def from_hf_config(cls, hf_config: Mapping[str, Any]) -> Lfm2MoeAdapter:
        return cls(Lfm2MoeConfig.from_hf_config(hf_config))

    def unfolded(self, found: Mapping[str, TensorInfo]) -> Mapping[str, TensorInfo]:
        return unfolded_experts(found, "feed_forward")

    def feed_forward_tensors(self, prefix: str, layer: int) -> Iterable[TensorSpec]:
        if layer < self.config.n_dense:
            yield from super().feed_forward_tensors(prefix, layer)
            return
        n = self.config.n_experts
        yield TensorSpec(f"{prefix}.gate.weight", (n, self.hidden_size), "router", layer)
        if self.config.has_bias:
            yield TensorSpec(f"{prefix}.expert_bias", (n,), "buffer", layer)
        yield from self.experts.tensors(f"{prefix}.experts", layer)

    def expert_modules(self, prefix: str, layer: int) -> Iterable[TensorSpec]:
        return () if layer < self.config.n_dense else self.experts.modules(f"{prefix}.feed_forward.experts", layer)

    def feed_forward(
        self, ops: StreamedOps, prefix: str, layer: int, residual_BTC: Tensor, x_BTC: Tensor, ctx: ForwardContext
    ) -> Tensor:
        c = self.config
        if layer < c.n_dense:
            return super().feed_forward(ops, prefix, layer, residual_BTC, x_BTC, ctx)
        logits_NE = ops.linear(x_BTC, f"{prefix}.gate").flatten(0, 1)
        bias_E = ops.vector(f"{prefix}.expert_bias") if c.has_bias else None
        scores_Nk, picked_Nk = sigmoid_scores(logits_NE, c.n_picked, bias_E, c.normalized, c.scale)
        return residual_BTC + self.experts(ops, f"{prefix}.experts", x_BTC, scores_Nk, picked_Nk)
