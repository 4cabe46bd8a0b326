"""Mistral (Jiang et al. 2023, arXiv:2310.06825): Llama with sliding-window attention.

Shapes: B rows, T tokens, C hidden size.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from lema_core.adapter import TensorSpec
from lema_core.blocks.attention import SelfAttention
from lema_core.blocks.config import HfConfig
from lema_core.blocks.decoder import Decoder, DecoderConfig
from lema_core.blocks.mlp import GatedMlp
from lema_core.ops.context import ForwardContext
from lema_core.ops.streamed import StreamedOps


@dataclass(frozen=True)
class MistralConfig(DecoderConfig):
    """``window``: a token sees so many keys, itself included; None: all before it."""

    window: int | None

    @classmethod
    def from_hf_config(cls, hf_config: Mapping[str, Any]) -> MistralConfig:
        """Raises ConfigError naming missing fields, or two that contradict each other."""
        hf = HfConfig(hf_config)
        hf.not_applied("layer_types")
        common = cls.common(hf, max_positions=131_072, n_kv_heads=8)
        # The first version's files say nothing and mean 4096; later ones say null.
        return cls(**common, window=hf.optional_size("sliding_window", 4096))


class MistralAdapter(Decoder):
    config: MistralConfig

    def __init__(self, config: MistralConfig) -> None:
        super().__init__(config)
        self.attention = SelfAttention(config.hidden_size, config.heads)
        self.mlp = GatedMlp(config.hidden_size, config.intermediate_size)
        self.windows = () if config.window is None else (config.window,)

    @classmethod
    def from_hf_config(cls, hf_config: Mapping[str, Any]) -> MistralAdapter:
        return cls(MistralConfig.from_hf_config(hf_config))

    def block_tensors(self, prefix: str, layer: int) -> Iterable[TensorSpec]:
        yield self.norm_tensor(f"{prefix}.input_layernorm", layer)
        yield from self.attention.tensors(f"{prefix}.self_attn", layer)
        yield self.norm_tensor(f"{prefix}.post_attention_layernorm", layer)
        yield from self.mlp.tensors(f"{prefix}.mlp", layer)

    def block(self, ops: StreamedOps, layer: int, x_BTC: Tensor, ctx: ForwardContext) -> Tensor:
        prefix = f"model.layers.{layer}"
        h_BTC = self.norm(ops, x_BTC, f"{prefix}.input_layernorm")
        x_BTC = x_BTC + self.attention(ops, f"{prefix}.self_attn", layer, h_BTC, ctx, self.config.window)
        h_BTC = self.norm(ops, x_BTC, f"{prefix}.post_attention_layernorm")
        return self.mlp.block_output(ops, f"{prefix}.mlp", x_BTC, h_BTC)
