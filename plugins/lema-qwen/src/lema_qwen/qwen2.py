"""Qwen2 (Yang et al. 2024, arXiv:2407.10671): Llama's block with biases on q, k and v, and sliding windows from some
layer on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lema_core.blocks.attention import SelfAttention
from lema_core.blocks.config import HfConfig
from lema_core.blocks.decoder import DecoderConfig, PreNormDecoder
from lema_core.blocks.mlp import GatedMlp
from lema_core.errors import ConfigError

_SLIDING, _FULL = "sliding_attention", "full_attention"


@dataclass(frozen=True)
class Qwen2Config(DecoderConfig):
    """``windows``: by layer, how many keys a token sees, itself included; None: all before it."""

    windows: tuple[int | None, ...]

    @classmethod
    def from_hf_config(cls, hf_config: Mapping[str, Any]) -> Qwen2Config:
        """Raises ConfigError naming missing fields, or two that contradict each other."""
        hf = HfConfig(hf_config)
        common = cls.common(hf, max_positions=32_768, n_kv_heads=32)
        return cls(**common, windows=layer_windows(hf, common["n_layers"]))


def layer_windows(hf: HfConfig, n_layers: int) -> tuple[int | None, ...]:
    """The window of each layer: as ``layer_types`` says, else from ``max_window_layers`` on."""
    window = hf.optional_size("sliding_window", 4096) if hf.flag("use_sliding_window") else None
    first = hf.count("max_window_layers", 28)
    kinds = hf.layer_types(n_layers, _FULL, _SLIDING)
    if kinds is None:
        return tuple(window if layer >= first else None for layer in range(n_layers))
    if window is None and _SLIDING in kinds:
        raise ConfigError(
            f"config.json: layer_types has {_SLIDING!r}, but use_sliding_window={hf.get('use_sliding_window')} with "
            f"sliding_window={hf.get('sliding_window')} gives no window"
        )
    return tuple(window if kind == _SLIDING else None for kind in kinds)


class Qwen2Adapter(PreNormDecoder):
    config: Qwen2Config

    def __init__(self, config: Qwen2Config) -> None:
        super().__init__(config)
        self.attention = SelfAttention(config.hidden_size, config.heads, qkv_bias=True)
        self.mlp = GatedMlp(config.hidden_size, config.intermediate_size)
        self.windows = tuple({window for window in config.windows if window is not None})

    @classmethod
    def from_hf_config(cls, hf_config: Mapping[str, Any]) -> Qwen2Adapter:
        return cls(Qwen2Config.from_hf_config(hf_config))

    def window(self, layer: int) -> int | None:
        return self.config.windows[layer]
