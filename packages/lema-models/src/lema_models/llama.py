"""Llama (Touvron et al. 2023, arXiv:2302.13971; grouped-query attention as in Llama 2 and 3)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lema_core.blocks.attention import SelfAttention
from lema_core.blocks.config import HfConfig
from lema_core.blocks.decoder import DecoderConfig, PreNormDecoder
from lema_core.blocks.mlp import GatedMlp


@dataclass(frozen=True)
class LlamaConfig(DecoderConfig):
    attention_bias: bool
    mlp_bias: bool

    @classmethod
    def from_hf_config(cls, hf_config: Mapping[str, Any]) -> LlamaConfig:
        """Raises ConfigError naming missing fields, or two that contradict each other."""
        hf = HfConfig(hf_config)
        return cls(**cls.common(hf), attention_bias=hf.flag("attention_bias"), mlp_bias=hf.flag("mlp_bias"))


class LlamaAdapter(PreNormDecoder):
    def __init__(self, config: LlamaConfig) -> None:
        super().__init__(config)
        bias = config.attention_bias
        self.attention = SelfAttention(config.hidden_size, config.heads, qkv_bias=bias, o_bias=bias)
        self.mlp = GatedMlp(config.hidden_size, config.intermediate_size, config.mlp_bias)

    @classmethod
    def from_hf_config(cls, hf_config: Mapping[str, Any]) -> LlamaAdapter:
        return cls(LlamaConfig.from_hf_config(hf_config))
