"""What support for one architecture declares: its tensors, and its math written once against ``ops``.

Shapes: B rows, T tokens, C hidden size, H heads, D head size, V vocabulary.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    from torch import Tensor

    from lema_core.checkpoint.segments import TensorInfo
    from lema_core.ops.context import ForwardContext
    from lema_core.ops.streamed import StreamedOps


@dataclass(frozen=True)
class TensorSpec:
    """One tensor of the model.

    ``name`` is the canonical checkpoint name, which is also transformers' parameter path
    (``model.layers.3.self_attn.q_proj.weight``); ``module`` is that path without the last part, as in PEFT keys.
    ``role``: ``embedding``, ``linear``, ``bias``, ``norm``, ``conv``, ``router``, ``expert``, ``head``, or ``buffer``
    for what no gradient changes. ``layer`` is the block's number, None outside blocks. ``tied_to`` names the tensor
    this one shares storage with (a tied head); a tied tensor is never stored twice. ``transposed``: a linear's weight
    that lies as [in, out] in the files, which ``shape`` says too. ``expert``: the number of the one it belongs to, of
    those that a router picks from.
    """

    name: str
    shape: tuple[int, ...]
    role: str
    layer: int | None = None
    tied_to: str | None = None
    transposed: bool = False
    expert: int | None = None

    @property
    def linear_shape(self) -> tuple[int, int]:
        """Outputs and inputs of a linear's weight, however it lies."""
        rows, columns = self.shape
        return (columns, rows) if self.transposed else (rows, columns)

    @property
    def module(self) -> str:
        return self.name.rpartition(".")[0]

    @property
    def stack(self) -> str:
        """The module's path as PEFT's patterns know it: of an expert's, the parameter of all experts that transformers
        has, of which it is a slice."""
        return self.module.replace(f".experts.{self.expert}.", ".experts.")


class ModelAdapter(ABC):
    """Support for one architecture (``LlamaAdapter``). Knows no streaming: every parameterised operation goes through
    ``ops``."""

    #: prefixes under which the Hub's files spell the canonical names; the first is the canonical one
    prefixes: ClassVar[tuple[str, ...]] = ("model.",)
    #: regular expressions of file tensors that carry no weights (buffers that older files have)
    ignored: ClassVar[tuple[str, ...]] = ()

    n_layers: int
    hidden_size: int
    vocab_size: int
    #: longest sequence the positions were trained for, None without such a bound
    max_positions: int | None
    #: True when longer sequences cannot be computed at all (learned positions)
    hard_max_positions: ClassVar[bool] = False
    #: whether PEFT's ``all-linear`` takes routers and experts too
    all_linear_routes: ClassVar[bool] = False
    #: heads of a layer's attention, where training drops some of its weights
    dropped_heads: int = 0
    #: sliding windows that its layers give to ``ops.attention``
    windows: tuple[int, ...] = ()

    @classmethod
    @abstractmethod
    def from_hf_config(cls, hf_config: Mapping[str, Any]) -> ModelAdapter:
        """Build from a parsed ``config.json``. Raises ConfigError naming the fields that contradict each other."""

    @abstractmethod
    def tensors(self) -> Sequence[TensorSpec]:
        """Every tensor of the model, in the order of the forward pass."""

    @abstractmethod
    def cache_shape(self) -> tuple[int, int]:
        """Key/value heads and head size: what one token of one layer puts into a KV cache, twice."""

    @property
    def cached_layers(self) -> int:
        """Layers that put keys and values into a cache."""
        return self.n_layers

    @abstractmethod
    def prepare(self, ctx: ForwardContext) -> None:
        """Compute what all blocks share (rotary tables) into ``ctx.shared``."""

    @abstractmethod
    def embed(self, ops: StreamedOps, ids_BT: Tensor, ctx: ForwardContext) -> Tensor:
        """ids -> x_BTC."""

    @abstractmethod
    def block(self, ops: StreamedOps, layer: int, x_BTC: Tensor, ctx: ForwardContext) -> Tensor:
        """One transformer block, x_BTC -> x_BTC."""

    @abstractmethod
    def head(self, ops: StreamedOps, x_NC: Tensor) -> Tensor:
        """Final norm and output projection over N tokens, x_NC -> logits_NV."""

    def extra_loss(self, ctx: ForwardContext) -> float:
        """What a training step's loss has beside the head's, once all blocks were passed; its gradient is the blocks'
        own affair."""
        return 0.0

    def masks(self, tokens: int) -> int:
        """How many masks attention in rows of so many tokens needs for sliding windows."""
        return sum(tokens > window for window in self.windows)

    def linear_modules(self) -> Iterable[TensorSpec]:
        """The weights of all linear layers, in forward order; what LoRA can be put on. Those of experts are what
        transformers stacks: ``mlp.experts.3.gate_up_proj`` is two linears with one ``lora_A``."""
        roles = ("linear", "router", "head")
        return (spec for spec in self.tensors() if spec.role in roles and spec.name.endswith(".weight"))

    def all_linear(self) -> Iterable[TensorSpec]:
        """What PEFT's ``all-linear`` means (0.21): all linear layers but the head."""
        for spec in self.linear_modules():
            routing = spec.expert is not None or spec.role == "router"
            if spec.role != "head" and (self.all_linear_routes or not routing):
                yield spec

    def unfolded(self, found: Mapping[str, TensorInfo]) -> Mapping[str, TensorInfo]:
        """The tensors of files as this adapter names them, where files group or spell them in other ways; rows are cut
        out of a joined one by :meth:`TensorInfo.rows`, which quantized ones need."""
        return found
