"""The outline that most decoders share: token embeddings, blocks, a final RMS norm, a head. Subclasses bring the block.

Shapes: B rows, T tokens, C hidden size, N tokens, V vocabulary.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

from torch import Tensor

from lema_core.adapter import ModelAdapter, TensorSpec
from lema_core.blocks.attention import ROPE, SelfAttention
from lema_core.blocks.config import Heads, HfConfig
from lema_core.blocks.mlp import GatedMlp
from lema_core.blocks.rope import RopeConfig, rotary_tables
from lema_core.ops.context import ForwardContext
from lema_core.ops.streamed import StreamedOps


@dataclass(frozen=True)
class DecoderConfig:
    """The fields of ``config.json`` that the computation of every such decoder depends on; an architecture adds its own
    in a subclass. ``padding_id``: the token whose embedding gets no gradient, as transformers has it; None: all do."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    n_layers: int
    heads: Heads
    norm_eps: float
    max_positions: int
    rope: RopeConfig
    tied: bool
    padding_id: int | None

    @staticmethod
    def common(
        hf: HfConfig,
        max_positions: int = 2048,
        n_kv_heads: int | None = None,
        head_dim: int | None = None,
        theta: float = 10000.0,
        eps_field: str = "rms_norm_eps",
        eps: float = 1e-6,
        padding_id: int | None = None,
    ) -> dict[str, Any]:
        """The fields above by name; arguments are an architecture's defaults for what ``config.json`` leaves out.

        Raises ConfigError naming missing fields, or two that contradict each other.
        """
        hf.require("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
        hf.expect("hidden_act", "silu")
        hf.not_applied("attention_dropout")
        longest = hf.size("max_position_embeddings", max_positions)
        return {
            "vocab_size": hf.size("vocab_size"),
            "hidden_size": hf.size("hidden_size"),
            "intermediate_size": hf.size("intermediate_size"),
            "n_layers": hf.size("num_hidden_layers"),
            "heads": Heads.from_hf_config(hf, n_kv_heads, head_dim),
            "norm_eps": hf.number(eps_field, eps),
            "max_positions": longest,
            "rope": RopeConfig.from_hf_config({**hf, "max_position_embeddings": longest}, theta),
            "tied": hf.flag("tie_word_embeddings"),
            "padding_id": hf.token_id("pad_token_id", hf.size("vocab_size"), padding_id),
        }


class Decoder(ModelAdapter):
    """Everything but the block, which a subclass declares (:meth:`block_tensors`) and computes (:meth:`block`)."""

    prefixes: ClassVar[tuple[str, ...]] = ("model.", "", "model.language_model.", "language_model.model.")
    ignored: ClassVar[tuple[str, ...]] = (r"rotary_emb\.inv_freq$",)
    #: what the norm before the head is called
    final_norm: ClassVar[str] = "model.norm"

    def __init__(self, config: DecoderConfig) -> None:
        self.config = config
        self.n_layers = config.n_layers
        self.hidden_size = config.hidden_size
        self.vocab_size = config.vocab_size
        self.max_positions = config.max_positions

    @abstractmethod
    def block_tensors(self, prefix: str, layer: int) -> Iterable[TensorSpec]:
        """The tensors of one block, which lie under ``prefix`` (``model.layers.3``)."""

    def tensors(self) -> Sequence[TensorSpec]:
        return self._tensors

    @cached_property
    def _tensors(self) -> tuple[TensorSpec, ...]:
        c, embedding = self.config, "model.embed_tokens.weight"
        tied_to = embedding if c.tied else None
        blocks = (self.block_tensors(f"model.layers.{layer}", layer) for layer in range(c.n_layers))
        return (
            TensorSpec(embedding, (c.vocab_size, c.hidden_size), "embedding"),
            *(spec for block in blocks for spec in block),
            TensorSpec(f"{self.final_norm}.weight", (c.hidden_size,), "norm"),
            TensorSpec("lm_head.weight", (c.vocab_size, c.hidden_size), "head", tied_to=tied_to),
        )

    def expert_modules(self, prefix: str, layer: int) -> Iterable[TensorSpec]:
        """The linears of a block's experts that LoRA can be put on."""
        return ()

    def linear_modules(self) -> Iterable[TensorSpec]:
        of_layer: dict[int | None, list[TensorSpec]] = {}
        for spec in super().linear_modules():
            of_layer.setdefault(spec.layer, []).append(spec)
        for layer in range(self.n_layers):
            yield from of_layer.get(layer, ())
            yield from self.expert_modules(f"model.layers.{layer}", layer)
        yield from of_layer.get(None, ())

    def norm_tensor(self, name: str, layer: int) -> TensorSpec:
        """A block's RMS norm over the hidden size."""
        return TensorSpec(f"{name}.weight", (self.hidden_size,), "norm", layer)

    def cache_shape(self) -> tuple[int, int]:
        return self.config.heads.n_kv, self.config.heads.dim

    def prepare(self, ctx: ForwardContext) -> None:
        ctx.shared[ROPE] = rotary_tables(self.config.rope, self.config.heads.dim, ctx)

    def embed(self, ops: StreamedOps, ids_BT: Tensor, ctx: ForwardContext) -> Tensor:
        return ops.embedding(ids_BT, "model.embed_tokens.weight", self.config.padding_id)

    def norm(self, ops: StreamedOps, x_BTC: Tensor, name: str) -> Tensor:
        return ops.rms_norm(x_BTC, f"{name}.weight", self.config.norm_eps)

    def head(self, ops: StreamedOps, x_NC: Tensor) -> Tensor:
        return ops.linear(self.norm(ops, x_NC, self.final_norm), "lm_head")


class PreNormDecoder(Decoder):
    """Blocks of two parts, each behind an RMS norm: tokens tell each other something, then each is computed by itself.

    By default these are ``attention`` and ``mlp``, which a subclass sets, as in Llama.
    """

    #: what the two norms are called, and what the second part lies under
    norms: ClassVar[tuple[str, str]] = ("input_layernorm", "post_attention_layernorm")
    feed_forward_name: ClassVar[str] = "mlp"
    attention: SelfAttention
    mlp: GatedMlp

    def window(self, layer: int) -> int | None:
        """How many keys a token sees, itself included; None: all before it."""
        return None

    def block_tensors(self, prefix: str, layer: int) -> Iterable[TensorSpec]:
        first, second = self.norms
        yield self.norm_tensor(f"{prefix}.{first}", layer)
        yield from self.mixing_tensors(prefix, layer)
        yield self.norm_tensor(f"{prefix}.{second}", layer)
        yield from self.feed_forward_tensors(f"{prefix}.{self.feed_forward_name}", layer)

    def mixing_tensors(self, prefix: str, layer: int) -> Iterable[TensorSpec]:
        """Of the first part; ``prefix`` is the block's."""
        return self.attention.tensors(f"{prefix}.self_attn", layer)

    def feed_forward_tensors(self, prefix: str, layer: int) -> Iterable[TensorSpec]:
        """Of the second part, which lies under ``prefix`` (``model.layers.3.mlp``)."""
        return self.mlp.tensors(prefix, layer)

    def block(self, ops: StreamedOps, layer: int, x_BTC: Tensor, ctx: ForwardContext) -> Tensor:
        prefix, (first, second) = f"model.layers.{layer}", self.norms
        h_BTC = self.norm(ops, x_BTC, f"{prefix}.{first}")
        x_BTC = x_BTC + self.mixed(ops, prefix, layer, h_BTC, ctx)
        h_BTC = self.norm(ops, x_BTC, f"{prefix}.{second}")
        return self.feed_forward(ops, f"{prefix}.{self.feed_forward_name}", layer, x_BTC, h_BTC, ctx)

    def mixed(self, ops: StreamedOps, prefix: str, layer: int, x_BTC: Tensor, ctx: ForwardContext) -> Tensor:
        """What tokens tell each other."""
        return self.attention(ops, f"{prefix}.self_attn", layer, x_BTC, ctx, self.window(layer))

    def feed_forward(
        self, ops: StreamedOps, prefix: str, layer: int, residual_BTC: Tensor, x_BTC: Tensor, ctx: ForwardContext
    ) -> Tensor:
        """The block's output: ``residual`` and what the second part makes of ``x``."""
        return self.mlp.block_output(ops, prefix, residual_BTC, x_BTC)
