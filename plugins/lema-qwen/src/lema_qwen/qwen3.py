"""Qwen3, dense (Yang et al. 2025, arXiv:2505.09388): Qwen2's block with a norm over each head of q and k, where the
biases were."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lema_core.blocks.attention import SelfAttention
from lema_core.blocks.config import HfConfig
from lema_qwen.qwen2 import Qwen2Adapter, Qwen2Config, layer_windows


@dataclass(frozen=True)
class Qwen3Config(Qwen2Config):
    attention_bias: bool

    @classmethod
    def from_hf_config(cls, hf_config: Mapping[str, Any]) -> Qwen3Config:
        """Raises ConfigError naming missing fields, or two that contradict each other."""
        hf = HfConfig(hf_config)
        common = cls.common(hf, max_positions=32_768, n_kv_heads=32, head_dim=128)
        windows = layer_windows(hf, common["n_layers"])
        return cls(**common, windows=windows, attention_bias=hf.flag("attention_bias"))


class Qwen3Adapter(Qwen2Adapter):
    def __init__(self, config: Qwen3Config) -> None:
        super().__init__(config)
        self.attention = SelfAttention(
            config.hidden_size,
            config.heads,
            qkv_bias=config.attention_bias,
            o_bias=config.attention_bias,
            norms=("q_norm", "k_norm"),
            norm_eps=config.norm_eps,
        )

    @classmethod
    def from_hf_config(cls, hf_config: Mapping[str, Any]) -> Qwen3Adapter:
        return cls(Qwen3Config.from_hf_config(hf_config))
