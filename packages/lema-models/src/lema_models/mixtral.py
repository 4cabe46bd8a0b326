"""Mixtral (Jiang et al. 2024, arXiv:2401.04088): Mistral with experts in place of the feed-forward part.

Shapes: B rows, T tokens, C hidden size, E experts.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from lema_core.adapter import TensorSpec
from lema_core.blocks.attention import SelfAttention
from lema_core.blocks.config import HfConfig
from lema_core.blocks.decoder import DecoderConfig, PreNormDecoder
from lema_core.blocks.moe import Experts, expert_counts, softmax_scores, unfolded_experts
from lema_core.checkpoint.segments import TensorInfo
from lema_core.ops.balance import RouterBalance
from lema_core.ops.context import ForwardContext
from lema_core.ops.streamed import StreamedOps

#: where what the routers do is kept
_BALANCE = "balance"


@dataclass(frozen=True)
class MixtralConfig(DecoderConfig):
    """``window``: a token sees so many keys, itself included; None: all before it. ``n_picked`` of ``n_experts``
    compute a token; ``balance``: coefficient of the routers' auxiliary loss."""

    window: int | None
    n_experts: int
    n_picked: int
    balance: float

    @classmethod
    def from_hf_config(cls, hf_config: Mapping[str, Any]) -> MixtralConfig:
        """Raises ConfigError naming missing fields, or two that contradict each other."""
        hf = HfConfig(hf_config)
        hf.not_applied("router_jitter_noise")
        n_experts, n_picked = expert_counts(hf, "num_local_experts", 8, 2)
        return cls(
            **cls.common(hf, max_positions=131_072, n_kv_heads=8, theta=1e6, eps=1e-5),
            window=hf.optional_size("sliding_window"),
            n_experts=n_experts,
            n_picked=n_picked,
            balance=hf.number("router_aux_loss_coef", 0.001) if hf.flag("output_router_logits") else 0.0,
        )


class MixtralAdapter(PreNormDecoder):
    all_linear_routes: ClassVar[bool] = True
    config: MixtralConfig

    def __init__(self, config: MixtralConfig) -> None:
        super().__init__(config)
        self.attention = SelfAttention(config.hidden_size, config.heads)
        self.experts = Experts(config.hidden_size, config.intermediate_size, config.n_experts)
        self.windows = () if config.window is None else (config.window,)

    @classmethod
    def from_hf_config(cls, hf_config: Mapping[str, Any]) -> MixtralAdapter:
        return cls(MixtralConfig.from_hf_config(hf_config))

    def unfolded(self, found: Mapping[str, TensorInfo]) -> Mapping[str, TensorInfo]:
        return unfolded_experts(found, "mlp")

    def prepare(self, ctx: ForwardContext) -> None:
        super().prepare(ctx)
        c = self.config
        if c.balance and ctx.shares:
            ctx.shared[_BALANCE] = RouterBalance(ctx, c.n_experts, c.n_layers, c.balance)

    def extra_loss(self, ctx: ForwardContext) -> float:
        return ctx.shared[_BALANCE].loss() if _BALANCE in ctx.shared else 0.0

    def window(self, layer: int) -> int | None:
        return self.config.window

    def feed_forward_tensors(self, prefix: str, layer: int) -> Iterable[TensorSpec]:
        yield TensorSpec(f"{prefix}.gate.weight", (self.config.n_experts, self.hidden_size), "router", layer)
        yield from self.experts.tensors(f"{prefix}.experts", layer)

    def expert_modules(self, prefix: str, layer: int) -> Iterable[TensorSpec]:
        return self.experts.modules(f"{prefix}.mlp.experts", layer)

    def feed_forward(
        self, ops: StreamedOps, prefix: str, layer: int, residual_BTC: Tensor, x_BTC: Tensor, ctx: ForwardContext
    ) -> Tensor:
        logits_NE = ops.linear(x_BTC, f"{prefix}.gate").flatten(0, 1)
        balance: RouterBalance | None = ctx.shared.get(_BALANCE)
        if balance is not None:
            logits_NE = balance.watched(logits_NE)
        scores_Nk, picked_Nk = softmax_scores(logits_NE, self.config.n_picked)
        if balance is not None:
            balance.count(ops.now, logits_NE, picked_Nk)
        return residual_BTC + self.experts(ops, f"{prefix}.experts", x_BTC, scores_Nk, picked_Nk)
