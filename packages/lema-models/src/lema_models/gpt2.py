"""GPT-2 (Radford et al. 2019, "Language Models are Unsupervised Multitask Learners"): learned positions, layer norms
before each part, and linears whose weights lie as [in, out].

Shapes: B rows, T tokens, C hidden size, F feed-forward size, H heads, D head size, N tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

from torch import Tensor

from lema_core.adapter import ModelAdapter, TensorSpec
from lema_core.blocks.config import HfConfig
from lema_core.errors import ConfigError
from lema_core.ops.context import ForwardContext
from lema_core.ops.streamed import StreamedOps

#: values of ``activation_function``, and what torch's gelu calls them
_GELU = {"gelu_new": "tanh", "gelu_pytorch_tanh": "tanh", "gelu": "none"}


@dataclass(frozen=True)
class GPT2Config:
    """The fields of ``config.json`` that the computation depends on."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    n_layers: int
    n_heads: int
    norm_eps: float
    max_positions: int
    gelu: str
    scaled: bool
    scaled_by_layer: bool
    attention_dropout: float
    embedding_dropout: float
    residual_dropout: float
    tied: bool

    @classmethod
    def from_hf_config(cls, hf_config: Mapping[str, Any]) -> GPT2Config:
        """Raises ConfigError naming missing fields, or two that contradict each other."""
        hf = HfConfig(hf_config)
        hf.require("vocab_size", "n_embd", "n_layer", "n_head")
        hf.expect("add_cross_attention", False)
        hidden, heads = hf.size("n_embd"), hf.size("n_head")
        if hidden % heads:
            raise ConfigError(f"config.json: n_embd={hidden} is not a multiple of n_head={heads}")
        return cls(
            vocab_size=hf.size("vocab_size"),
            hidden_size=hidden,
            intermediate_size=hf.optional_size("n_inner") or 4 * hidden,
            n_layers=hf.size("n_layer"),
            n_heads=heads,
            norm_eps=hf.number("layer_norm_epsilon", 1e-5),
            max_positions=hf.size("n_positions", 1024),
            gelu=_GELU[hf.expect("activation_function", *_GELU)],
            scaled=hf.flag("scale_attn_weights", True),
            scaled_by_layer=hf.flag("scale_attn_by_inverse_layer_idx"),
            attention_dropout=hf.number("attn_pdrop", 0.1),
            embedding_dropout=hf.number("embd_pdrop", 0.1),
            residual_dropout=hf.number("resid_pdrop", 0.1),
            tied=hf.flag("tie_word_embeddings", True),
        )


class GPT2Adapter(ModelAdapter):
    prefixes: ClassVar[tuple[str, ...]] = ("transformer.", "")
    ignored: ClassVar[tuple[str, ...]] = (r"\.attn\.(bias|masked_bias)$",)
    hard_max_positions: ClassVar[bool] = True

    def __init__(self, config: GPT2Config) -> None:
        self.config = config
        self.n_layers = config.n_layers
        self.hidden_size = config.hidden_size
        self.vocab_size = config.vocab_size
        self.max_positions = config.max_positions
        self.dropped_heads = config.n_heads if config.attention_dropout else 0

    @classmethod
    def from_hf_config(cls, hf_config: Mapping[str, Any]) -> GPT2Adapter:
        return cls(GPT2Config.from_hf_config(hf_config))

    def tensors(self) -> Sequence[TensorSpec]:
        return self._tensors

    @cached_property
    def _tensors(self) -> tuple[TensorSpec, ...]:
        c, words = self.config, "transformer.wte.weight"
        blocks = (self._block_tensors(f"transformer.h.{layer}", layer) for layer in range(c.n_layers))
        return (
            TensorSpec(words, (c.vocab_size, c.hidden_size), "embedding"),
            TensorSpec("transformer.wpe.weight", (c.max_positions, c.hidden_size), "embedding"),
            *(spec for block in blocks for spec in block),
            *self._norm_tensors("transformer.ln_f", None),
            TensorSpec("lm_head.weight", (c.vocab_size, c.hidden_size), "head", tied_to=words if c.tied else None),
        )

    def _block_tensors(self, prefix: str, layer: int) -> Iterable[TensorSpec]:
        c, f = self.config.hidden_size, self.config.intermediate_size
        yield from self._norm_tensors(f"{prefix}.ln_1", layer)
        yield from self._linear_tensors(f"{prefix}.attn.c_attn", (c, 3 * c), layer)
        yield from self._linear_tensors(f"{prefix}.attn.c_proj", (c, c), layer)
        yield from self._norm_tensors(f"{prefix}.ln_2", layer)
        yield from self._linear_tensors(f"{prefix}.mlp.c_fc", (c, f), layer)
        yield from self._linear_tensors(f"{prefix}.mlp.c_proj", (f, c), layer)

    def _norm_tensors(self, module: str, layer: int | None) -> Iterator[TensorSpec]:
        for name in ("weight", "bias"):
            yield TensorSpec(f"{module}.{name}", (self.hidden_size,), "norm", layer)

    def _linear_tensors(self, module: str, shape: tuple[int, int], layer: int) -> Iterator[TensorSpec]:
        yield TensorSpec(f"{module}.weight", shape, "linear", layer, transposed=True)
        yield TensorSpec(f"{module}.bias", shape[1:], "bias", layer)

    def cache_shape(self) -> tuple[int, int]:
        return self.config.n_heads, self.hidden_size // self.config.n_heads

    def prepare(self, ctx: ForwardContext) -> None:
        """Blocks share nothing: positions are in the embeddings."""

    def embed(self, ops: StreamedOps, ids_BT: Tensor, ctx: ForwardContext) -> Tensor:
        words_BTC = ops.embedding(ids_BT, "transformer.wte.weight")
        x_BTC = words_BTC + ops.embedding(ctx.positions_BT, "transformer.wpe.weight")
        return ops.dropout(x_BTC, self.config.embedding_dropout, "embedding")

    def block(self, ops: StreamedOps, layer: int, x_BTC: Tensor, ctx: ForwardContext) -> Tensor:
        c, prefix = self.config, f"transformer.h.{layer}"
        h_BTC = ops.layer_norm(x_BTC, f"{prefix}.ln_1", c.norm_eps)
        attended_BTC = self._attention(ops, f"{prefix}.attn", layer, h_BTC, ctx)
        x_BTC = x_BTC + ops.dropout(attended_BTC, c.residual_dropout, f"{prefix}.attn")
        h_BTC = ops.layer_norm(x_BTC, f"{prefix}.ln_2", c.norm_eps)
        h_BTF = ops.gelu(ops.linear(h_BTC, f"{prefix}.mlp.c_fc"), c.gelu)
        return ops.block_output(x_BTC, h_BTF, f"{prefix}.mlp.c_proj", c.residual_dropout)

    def _attention(self, ops: StreamedOps, prefix: str, layer: int, x_BTC: Tensor, ctx: ForwardContext) -> Tensor:
        c, size = self.config, self.hidden_size // self.config.n_heads
        qkv = ops.linear(x_BTC, f"{prefix}.c_attn").chunk(3, dim=-1)
        q_BHTD, k_BHSD, v_BHSD = (y.unflatten(-1, (-1, size)).transpose(1, 2) for y in qkv)
        if ctx.cache is not None:
            k_BHSD, v_BHSD = ctx.cache.append(layer, k_BHSD, v_BHSD)
        scale = (size**-0.5 if c.scaled else 1.0) / (layer + 1 if c.scaled_by_layer else 1)
        dropout = c.attention_dropout
        out_BTC = ops.attention(q_BHTD, k_BHSD, v_BHSD, ctx, scale, dropout=dropout, name=prefix)
        return ops.linear(out_BTC, f"{prefix}.c_proj")

    def head(self, ops: StreamedOps, x_NC: Tensor) -> Tensor:
        return ops.linear(ops.layer_norm(x_NC, "transformer.ln_f", self.config.norm_eps), "lm_head")
