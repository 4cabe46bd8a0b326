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
from lema_core.blocks.decoder import Decoder, DecoderConfig
from lema_core.blocks.moe import Experts, softmax_scores, unfolded_experts
from lema_core.checkpoint.segments import TensorInfo
from lema_core.errors import ConfigError
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
        n_experts, n_picked = hf.size("num_local_experts", 8), hf.size("num_experts_per_tok", 2)
        if n_picked > n_experts:
            raise ConfigError(f"config.json: num_experts_per_tok={n_picked} is more than num_local_experts={n_experts}")
        return cls(
            **cls.common(hf, max_positions=131_072, n_kv_heads=8, theta=1e6, eps=1e-5),
            window=hf.optional_size("sliding_window"),
            n_experts=n_experts,
            n_picked=n_picked,
            balance=hf.number("router_aux_loss_coef", 0.001) if hf.flag("output_router_logits") else 0.0,
        )


class MixtralAdapter(Decoder):
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

    def block_tensors(self, prefix: str, layer: int) -> Iterable[TensorSpec]:
        yield self.norm_tensor(f"{prefix}.input_layernorm", layer)
        yield from self.attention.tensors(f"{prefix}.self_attn", layer)
        yield self.norm_tensor(f"{prefix}.post_attention_layernorm", layer)
        yield TensorSpec(f"{prefix}.mlp.gate.weight", (self.config.n_experts, self.hidden_size), "router", layer)
        yield from self.experts.tensors(f"{prefix}.mlp.experts", layer)

    def expert_modules(self, prefix: str, layer: int) -> Iterable[TensorSpec]:
        return self.experts.modules(f"{prefix}.mlp.experts", layer)

    def block(self, ops: StreamedOps, layer: int, x_BTC: Tensor, ctx: ForwardContext) -> Tensor:
        prefix = f"model.layers.{layer}"
        h_BTC = self.norm(ops, x_BTC, f"{prefix}.input_layernorm")
        x_BTC = x_BTC + self.attention(ops, f"{prefix}.self_attn", layer, h_BTC, ctx, self.config.window)
        h_BTC = self.norm(ops, x_BTC, f"{prefix}.post_attention_layernorm")
        logits_NE = ops.linear(h_BTC, f"{prefix}.mlp.gate").flatten(0, 1)
        balance: RouterBalance | None = ctx.shared.get(_BALANCE)
        if balance is not None:
            logits_NE = balance.watched(logits_NE)
        scores_Nk, picked_Nk = softmax_scores(logits_NE, self.config.n_picked)
        if balance is not None:
            balance.count(ops.now, logits_NE, picked_Nk)
        return x_BTC + self.experts(ops, f"{prefix}.mlp.experts", h_BTC, scores_Nk, picked_Nk)
