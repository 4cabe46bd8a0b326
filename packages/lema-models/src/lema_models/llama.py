"""Llama (Touvron et al. 2023, arXiv:2302.13971; grouped-query attention as in Llama 2 and 3).

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
class LlamaConfig(DecoderConfig):
    attention_bias: bool
    mlp_bias: bool

    @classmethod
    def from_hf_config(cls, hf_config: Mapping[str, Any]) -> LlamaConfig:
        """Raises ConfigError naming missing fields, or two that contradict each other."""
        hf = HfConfig(hf_config)
        return cls(**cls.common(hf), attention_bias=hf.flag("attention_bias"), mlp_bias=hf.flag("mlp_bias"))


class LlamaAdapter(Decoder):
    def __init__(self, config: LlamaConfig) -> None:
        super().__init__(config)
        bias = config.attention_bias
        self.attention = SelfAttention(config.hidden_size, config.heads, qkv_bias=bias, o_bias=bias)
        self.mlp = GatedMlp(config.hidden_size, config.intermediate_size, config.mlp_bias)

    @classmethod
    def from_hf_config(cls, hf_config: Mapping[str, Any]) -> LlamaAdapter:
        return cls(LlamaConfig.from_hf_config(hf_config))

    def block_tensors(self, prefix: str, layer: int) -> Iterable[TensorSpec]:
        yield self.norm_tensor(f"{prefix}.input_layernorm", layer)
        yield from self.attention.tensors(f"{prefix}.self_attn", layer)
        yield self.norm_tensor(f"{prefix}.post_attention_layernorm", layer)
        yield from self.mlp.tensors(f"{prefix}.mlp", layer)

    def block(self, ops: StreamedOps, layer: int, x_BTC: Tensor, ctx: ForwardContext) -> Tensor:
        prefix = f"model.layers.{layer}"
        h_BTC = self.norm(ops, x_BTC, f"{prefix}.input_layernorm")
        x_BTC = x_BTC + self.attention(ops, f"{prefix}.self_attn", layer, h_BTC, ctx)
        h_BTC = self.norm(ops, x_BTC, f"{prefix}.post_attention_layernorm")
        return self.mlp.block_output(ops, f"{prefix}.mlp", x_BTC, h_BTC)
