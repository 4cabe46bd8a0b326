"""LFM2 (Liquid AI 2025, arXiv:2511.23404): gated short convolutions in most layers, attention in the others.

Shapes: B rows, T tokens, C hidden size.
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
from lema_core.blocks.mlp import GatedMlp
from lema_core.blocks.short_conv import GatedShortConv
from lema_core.ops.context import ForwardContext
from lema_core.ops.streamed import StreamedOps

_ATTENTION, _CONV = "full_attention", "conv"


@dataclass(frozen=True)
class Lfm2Config(DecoderConfig):
    """``attends``: by layer, whether it has attention; else it has a convolution of ``conv_taps``."""

    attends: tuple[bool, ...]
    conv_taps: int
    conv_bias: bool

    @classmethod
    def from_hf_config(cls, hf_config: Mapping[str, Any]) -> Lfm2Config:
        """Reads the old spellings (``block_ff_dim``, ``full_attn_idxs``, ``tie_embedding``) too. Raises ConfigError
        naming missing fields, or two that contradict each other."""
        hf = HfConfig(hf_config)
        return cls(**{**cls.lfm2(hf), "intermediate_size": _adjusted_width(hf)})

    @staticmethod
    def lfm2(hf: HfConfig) -> dict[str, Any]:
        """The fields that dense models and those with experts have in common, by name."""
        width = hf.get("block_ff_dim") or hf.get("intermediate_size")
        given = HfConfig({**hf, "intermediate_size": width})
        common = DecoderConfig.common(
            given, 128_000, n_kv_heads=8, theta=1e6, eps_field="norm_eps", eps=1e-5, padding_id=0
        )
        return {
            **common,
            "tied": hf.flag("tie_embedding", hf.flag("tie_word_embeddings", True)),
            "attends": _attends(hf, common["n_layers"]),
            "conv_taps": hf.size("conv_L_cache", 3),
            "conv_bias": hf.flag("conv_bias"),
        }


def _attends(hf: HfConfig, n_layers: int) -> tuple[bool, ...]:
    kinds = hf.layer_types(n_layers, _ATTENTION, _CONV)
    if kinds is None:
        attending = hf.get("full_attn_idxs")
        return tuple(attending is None or layer in attending for layer in range(n_layers))
    return tuple(kind == _ATTENTION for kind in kinds)


def _adjusted_width(hf: HfConfig) -> int:
    """What ``intermediate_size`` comes to: the config states the size of a feed-forward part without a gate."""
    width = hf.size("block_ff_dim", hf.optional_size("intermediate_size"))
    if not hf.flag("block_auto_adjust_ff_dim", True):
        return width
    width = int(2 * width / 3)
    if hf.get("block_ffn_dim_multiplier", 1.0) is None:
        return width
    multiple = hf.size("block_multiple_of", 256)
    return -(-int(hf.number("block_ffn_dim_multiplier", 1.0) * width) // multiple) * multiple


class Lfm2Adapter(PreNormDecoder):
    final_norm: ClassVar[str] = "model.embedding_norm"
    norms: ClassVar[tuple[str, str]] = ("operator_norm", "ffn_norm")
    feed_forward_name: ClassVar[str] = "feed_forward"
    config: Lfm2Config

    def __init__(self, config: Lfm2Config) -> None:
        super().__init__(config)
        norms = "q_layernorm", "k_layernorm"
        self.attention = SelfAttention(
            config.hidden_size, config.heads, norms=norms, norm_eps=config.norm_eps, o_proj="out_proj"
        )
        self.conv = GatedShortConv(config.hidden_size, config.conv_taps, config.conv_bias)
        self.mlp = GatedMlp(config.hidden_size, config.intermediate_size, gate="w1", up="w3", down="w2")

    @classmethod
    def from_hf_config(cls, hf_config: Mapping[str, Any]) -> Lfm2Adapter:
        return cls(Lfm2Config.from_hf_config(hf_config))

    @property
    def cached_layers(self) -> int:
        return sum(self.config.attends)

    def mixing_tensors(self, prefix: str, layer: int) -> Iterable[TensorSpec]:
        if self.config.attends[layer]:
            return super().mixing_tensors(prefix, layer)
        return self.conv.tensors(f"{prefix}.conv", layer)

    def mixed(self, ops: StreamedOps, prefix: str, layer: int, x_BTC: Tensor, ctx: ForwardContext) -> Tensor:
        if self.config.attends[layer]:
            return super().mixed(ops, prefix, layer, x_BTC, ctx)
        return self.conv(ops, f"{prefix}.conv", layer, x_BTC, ctx)
