"""Mistral (Jiang et al. 2023, arXiv:2310.06825): Llama with sliding-window attention."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lema_core.blocks.attention import SelfAttention
from lema_core.blocks.config import HfConfig
from lema_core.blocks.decoder import DecoderConfig, PreNormDecoder
from lema_core.blocks.mlp import GatedMlp


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


class MistralAdapter(PreNormDecoder):
    config: MistralConfig

    def __init__(self, config: MistralConfig) -> None:
        super().__init__(config)
        self.attention = SelfAttention(config.hidden_size, config.heads)
        self.mlp = GatedMlp(config.hidden_size, config.intermediate_size)
        self.windows = () if config.window is None else (config.window,)

    @classmethod
    def from_hf_config(cls, hf_config: Mapping[str, Any]) -> MistralAdapter:
        return cls(MistralConfig.from_hf_config(hf_config))

    def window(self, layer: int) -> int | None:
        return self.config.window
