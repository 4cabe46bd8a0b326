"""Llama (Touvron et al. 2023, arXiv:2302.13971; grouped-query attention as in Llama 2 and 3).

Shapes: B rows, T tokens, S keys, C hidden size, F feed-forward size, H heads, G key/value heads, D head size, N tokens,
V vocabulary.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from lema_core.adapter import ModelAdapter, TensorSpec
from lema_core.errors import ConfigError
from lema_core.ops.context import ForwardContext
from lema_core.ops.streamed import StreamedOps
from lema_models.rope import RopeConfig, rotary_tables


@dataclass(frozen=True)
class LlamaConfig:
    """The fields of ``config.json`` that the computation depends on."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    max_positions: int
    rope: RopeConfig
    attention_bias: bool
    mlp_bias: bool
    tied: bool

    @classmethod
    def from_hf_config(cls, hf_config: Mapping[str, Any]) -> LlamaConfig:
        """Raises ConfigError naming missing fields, or two that contradict each other."""
        required = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
        missing = [name for name in required if hf_config.get(name) is None]
        if missing:
            raise ConfigError(f"config.json lacks {', '.join(missing)}")
        hidden, heads = hf_config["hidden_size"], hf_config["num_attention_heads"]
        kv_heads = hf_config.get("num_key_value_heads") or heads
        if heads % kv_heads:
            raise ConfigError(
                f"config.json: num_attention_heads={heads} is not a multiple of num_key_value_heads={kv_heads}"
            )
        head_dim = hf_config.get("head_dim")
        if head_dim is None:
            if hidden % heads:
                raise ConfigError(
                    f"config.json: hidden_size={hidden} is not a multiple of num_attention_heads={heads}, "
                    "and no head_dim is given"
                )
            head_dim = hidden // heads
        if head_dim % 2:
            raise ConfigError(f"config.json: head_dim={head_dim} is odd; rotary embeddings turn pairs")
        if hf_config.get("attention_dropout"):
            warnings.warn(
                f"config.json: attention_dropout={hf_config['attention_dropout']} is not applied", stacklevel=2
            )
        activation = hf_config.get("hidden_act", "silu")
        if activation != "silu":
            raise ConfigError(f"config.json: hidden_act={activation!r} is not Llama's; expected 'silu'")
        return cls(
            vocab_size=hf_config["vocab_size"],
            hidden_size=hidden,
            intermediate_size=hf_config["intermediate_size"],
            n_layers=hf_config["num_hidden_layers"],
            n_heads=heads,
            n_kv_heads=kv_heads,
            head_dim=head_dim,
            rms_norm_eps=float(hf_config.get("rms_norm_eps", 1e-6)),
            max_positions=hf_config.get("max_position_embeddings", 2048),
            rope=RopeConfig.from_hf_config(hf_config),
            attention_bias=bool(hf_config.get("attention_bias", False)),
            mlp_bias=bool(hf_config.get("mlp_bias", False)),
            tied=bool(hf_config.get("tie_word_embeddings", False)),
        )


class LlamaTensors:
    """Names and shapes as in Hugging Face files."""

    @staticmethod
    def of(c: LlamaConfig) -> Sequence[TensorSpec]:
        q_size, kv_size = c.n_heads * c.head_dim, c.n_kv_heads * c.head_dim
        embedding = TensorSpec("model.embed_tokens.weight", (c.vocab_size, c.hidden_size), "embedding")
        specs = [embedding]
        for layer in range(c.n_layers):
            prefix = f"model.layers.{layer}"
            attention = {
                "q_proj": (q_size, c.hidden_size),
                "k_proj": (kv_size, c.hidden_size),
                "v_proj": (kv_size, c.hidden_size),
                "o_proj": (c.hidden_size, q_size),
            }
            mlp = {
                "gate_proj": (c.intermediate_size, c.hidden_size),
                "up_proj": (c.intermediate_size, c.hidden_size),
                "down_proj": (c.hidden_size, c.intermediate_size),
            }
            blocks = (
                ("self_attn", "input_layernorm", attention, c.attention_bias),
                ("mlp", "post_attention_layernorm", mlp, c.mlp_bias),
            )
            for group, norm, linears, biased in blocks:
                specs.append(TensorSpec(f"{prefix}.{norm}.weight", (c.hidden_size,), "norm", layer))
                for name, shape in linears.items():
                    specs.append(TensorSpec(f"{prefix}.{group}.{name}.weight", shape, "linear", layer))
                    if biased:
                        specs.append(TensorSpec(f"{prefix}.{group}.{name}.bias", shape[:1], "bias", layer))
        specs.append(TensorSpec("model.norm.weight", (c.hidden_size,), "norm"))
        tied_to = embedding.name if c.tied else None
        specs.append(TensorSpec("lm_head.weight", (c.vocab_size, c.hidden_size), "head", tied_to=tied_to))
        return specs


class LlamaAdapter(ModelAdapter):
    prefixes: ClassVar[tuple[str, ...]] = ("model.", "", "model.language_model.", "language_model.model.")
    ignored: ClassVar[tuple[str, ...]] = (r"rotary_emb\.inv_freq$",)

    def __init__(self, config: LlamaConfig) -> None:
        self.config = config
        self.n_layers = config.n_layers
        self.hidden_size = config.hidden_size
        self.vocab_size = config.vocab_size
        self.max_positions = config.max_positions
        self._tensors = tuple(LlamaTensors.of(config))

    @classmethod
    def from_hf_config(cls, hf_config: Mapping[str, Any]) -> LlamaAdapter:
        return cls(LlamaConfig.from_hf_config(hf_config))

    def tensors(self) -> Sequence[TensorSpec]:
        return self._tensors

    def cache_shape(self) -> tuple[int, int]:
        return self.config.n_kv_heads, self.config.head_dim

    def prepare(self, ctx: ForwardContext) -> None:
        ctx.shared["rope"] = rotary_tables(self.config.rope, self.config.head_dim, ctx.positions_BT)

    def embed(self, ops: StreamedOps, ids_BT: Tensor, ctx: ForwardContext) -> Tensor:
        return ops.embedding(ids_BT, "model.embed_tokens.weight")

    def block(self, ops: StreamedOps, layer: int, x_BTC: Tensor, ctx: ForwardContext) -> Tensor:
        prefix, eps = f"model.layers.{layer}", self.config.rms_norm_eps
        h_BTC = ops.rms_norm(x_BTC, f"{prefix}.input_layernorm.weight", eps)
        x_BTC = x_BTC + self._attention(ops, layer, h_BTC, ctx)
        h_BTC = ops.rms_norm(x_BTC, f"{prefix}.post_attention_layernorm.weight", eps)
        gate_BTF, up_BTF = ops.linears(h_BTC, [f"{prefix}.mlp.gate_proj", f"{prefix}.mlp.up_proj"])
        return ops.block_output(x_BTC, ops.silu_product(gate_BTF, up_BTF), f"{prefix}.mlp.down_proj")

    def _attention(self, ops: StreamedOps, layer: int, x_BTC: Tensor, ctx: ForwardContext) -> Tensor:
        c, prefix = self.config, f"model.layers.{layer}.self_attn"
        modules = [f"{prefix}.{name}" for name in ("q_proj", "k_proj", "v_proj")]
        q, k, v = (y.unflatten(-1, (-1, c.head_dim)).transpose(1, 2) for y in ops.linears(x_BTC, modules))
        q_BHTD, k_BGTD, v_BGTD = ops.rotary(q, ctx.shared["rope"]), ops.rotary(k, ctx.shared["rope"]), v
        if ctx.cache is not None:
            k_BGTD, v_BGTD = ctx.cache.append(layer, k_BGTD, v_BGTD)
        out_BTC = ops.attention(q_BHTD, k_BGTD, v_BGTD, ctx, c.head_dim**-0.5)
        return ops.linear(out_BTC, f"{prefix}.o_proj")

    def head(self, ops: StreamedOps, x_NC: Tensor) -> Tensor:
        x_NC = ops.rms_norm(x_NC, "model.norm.weight", self.config.rms_norm_eps)
        return ops.linear(x_NC, "lm_head")
