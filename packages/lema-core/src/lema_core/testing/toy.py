"""A tiny language model for tests of the engine: an adapter, its files, and the same math in plain torch.

Token and position embeddings, blocks of grouped-query attention and a feed-forward part of two matrices with ``x *
silu(x)`` between them, some biases, a head that may be tied. Shapes: B rows, T tokens, C hidden size, F feed-forward
size, H heads, G key/value heads, D head size.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lema_core.adapter import ModelAdapter, TensorSpec
from lema_core.checkpoint import TensorInfo, read_manifest, write_safetensors
from lema_core.device import Device
from lema_core.ops.context import ForwardContext
from lema_core.ops.gradients import Gradients
from lema_core.ops.kernels import Kernels
from lema_core.ops.low_rank import LowRankUpdate
from lema_core.ops.streamed import StreamedOps
from lema_core.runtime.runner import ModelRunner
from lema_core.store.granules import MAX_GRANULE_BYTES
from lema_core.store.model import StreamedModel, cut_model
from lema_core.store.store import DEFAULT_PREFETCH_DISTANCE, TensorStore

_EPS = 1e-5


@dataclass(frozen=True)
class ToyConfig:
    """``dropout`` falls between the two matrices of a block's feed-forward part."""

    vocab_size: int = 37
    hidden_size: int = 16
    feed_forward: int = 40
    n_layers: int = 3
    n_heads: int = 4
    n_kv_heads: int = 2
    max_positions: int = 32
    tied: bool = False
    biased: bool = True
    dropout: float = 0.0

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.n_heads


class ToyAdapter(ModelAdapter):
    """The model of a ToyConfig."""

    hard_max_positions = True

    def __init__(self, config: ToyConfig) -> None:
        self.config = config
        self.n_layers = config.n_layers
        self.hidden_size = config.hidden_size
        self.vocab_size = config.vocab_size
        self.max_positions = config.max_positions

    @classmethod
    def from_hf_config(cls, hf_config: Mapping[str, Any]) -> ToyAdapter:
        return cls(ToyConfig(**hf_config))

    def tensors(self) -> Sequence[TensorSpec]:
        c = self.config
        kv_size = c.n_kv_heads * c.head_dim
        specs = [
            TensorSpec("model.tokens.weight", (c.vocab_size, c.hidden_size), "embedding"),
            TensorSpec("model.positions.weight", (c.max_positions, c.hidden_size), "embedding"),
        ]
        for layer in range(c.n_layers):
            root = f"model.layers.{layer}"
            specs.append(TensorSpec(f"{root}.norm_1.weight", (c.hidden_size,), "norm", layer))
            for name, rows in (("q", c.hidden_size), ("k", kv_size), ("v", kv_size), ("o", c.hidden_size)):
                specs.append(TensorSpec(f"{root}.{name}.weight", (rows, c.hidden_size), "linear", layer))
                if c.biased and name == "q":
                    specs.append(TensorSpec(f"{root}.{name}.bias", (rows,), "bias", layer))
            specs.append(TensorSpec(f"{root}.norm_2.weight", (c.hidden_size,), "norm", layer))
            specs.append(TensorSpec(f"{root}.up.weight", (c.feed_forward, c.hidden_size), "linear", layer))
            specs.append(TensorSpec(f"{root}.down.weight", (c.hidden_size, c.feed_forward), "linear", layer))
            if c.biased:
                specs.append(TensorSpec(f"{root}.down.bias", (c.hidden_size,), "bias", layer))
        tied_to = "model.tokens.weight" if c.tied else None
        specs.append(TensorSpec("model.norm.weight", (c.hidden_size,), "norm"))
        specs.append(TensorSpec("head.weight", (c.vocab_size, c.hidden_size), "head", tied_to=tied_to))
        return specs

    def cache_shape(self) -> tuple[int, int]:
        return self.config.n_kv_heads, self.config.head_dim

    def prepare(self, ctx: ForwardContext) -> None:
        return None

    def embed(self, ops: StreamedOps, ids_BT: Tensor, ctx: ForwardContext) -> Tensor:
        return ops.embedding(ids_BT, "model.tokens.weight") + ops.embedding(ctx.positions_BT, "model.positions.weight")

    def block(self, ops: StreamedOps, layer: int, x_BTC: Tensor, ctx: ForwardContext) -> Tensor:
        c, root = self.config, f"model.layers.{layer}"
        h_BTC = ops.rms_norm(x_BTC, f"{root}.norm_1.weight", _EPS)
        modules = [f"{root}.q", f"{root}.k", f"{root}.v"]
        q, k, v = (y.unflatten(-1, (-1, c.head_dim)).transpose(1, 2).contiguous() for y in ops.linears(h_BTC, modules))
        if ctx.cache is not None:
            k, v = ctx.cache.append(layer, k, v)
        attended_BTC = ops.attention(q, k, v, ctx, c.head_dim**-0.5)
        x_BTC = x_BTC + ops.linear(attended_BTC, f"{root}.o")
        h_BTC = ops.rms_norm(x_BTC, f"{root}.norm_2.weight", _EPS)
        up_BTF = ops.linear(h_BTC, f"{root}.up")
        up_BTF = ops.dropout(ops.silu_product(up_BTF, up_BTF), c.dropout, f"{root}.up")
        return ops.block_output(x_BTC, up_BTF, f"{root}.down")

    def head(self, ops: StreamedOps, x_NC: Tensor) -> Tensor:
        return ops.linear(ops.rms_norm(x_NC, "model.norm.weight", _EPS), "head")


def write_toy(
    folder: Path,
    config: ToyConfig,
    seed: int = 0,
    dtypes: Sequence[torch.dtype] = (torch.float32,),
    n_files: int = 1,
    padding_bytes: int = 0,
    fill: Mapping[str, float] | None = None,
) -> dict[str, TensorInfo]:
    """Write random weights of ``config`` into ``folder``; returns canonical name -> where the tensor is.

    Tensors take turns in ``dtypes`` and in the files. ``padding_bytes``: of a useless tensor before each, to shift
    offsets. ``fill`` gives tensors of a constant value instead.
    """
    specs = [spec for spec in ToyAdapter(config).tensors() if spec.tied_to is None]
    generator = torch.Generator().manual_seed(seed)
    files: list[list] = [[] for _ in range(n_files)]
    for i, spec in enumerate(specs):
        scale, shift = (0.1, 1.0) if spec.role == "norm" else (0.3, 0.0)
        tensor = torch.randn(spec.shape, generator=generator) * scale + shift
        if fill is not None and spec.name in fill:
            tensor.fill_(fill[spec.name])
        tensor = tensor.to(dtypes[i % len(dtypes)])
        target = files[i % n_files]
        if padding_bytes:
            pad = torch.zeros(padding_bytes, dtype=torch.uint8)
            target.append((f"padding.{i}", torch.uint8, (padding_bytes,), lambda pad=pad: pad))
        target.append((spec.name, tensor.dtype, spec.shape, lambda tensor=tensor: tensor))
    for i, tensors in enumerate(files):
        write_safetensors(folder / f"toy-{i}.safetensors", tensors, fsync=False)
    return toy_tensors(folder, config)


def toy_tensors(folder: Path, config: ToyConfig) -> dict[str, TensorInfo]:
    """Canonical name -> where the tensor is; a tied head is where the embedding is."""
    found = read_manifest(folder).tensors
    return {spec.name: found[spec.tied_to or spec.name] for spec in ToyAdapter(config).tensors()}


def toy_updates(
    config: ToyConfig,
    modules: Sequence[str],
    rank: int = 2,
    dropout: float = 0.0,
    seed: int = 0,
    device: torch.device | str = "cpu",
) -> dict[str, LowRankUpdate]:
    """Random LoRA weights, neither of them zero, on ``modules`` (``model.layers.1.q``)."""
    generator = torch.Generator().manual_seed(seed)
    shapes = {spec.module: spec.shape for spec in ToyAdapter(config).linear_modules()}
    updates = {}
    for module in modules:
        out_size, in_size = shapes[module]
        lora_A = (torch.randn(rank, in_size, generator=generator) * 0.3).to(device)
        lora_B = (torch.randn(out_size, rank, generator=generator) * 0.3).to(device)
        updates[module] = LowRankUpdate(lora_A.requires_grad_(), lora_B.requires_grad_(), 2.0, dropout)
    return updates


def linear_names(config: ToyConfig) -> list[str]:
    """Every module that LoRA can be put on, in forward order."""
    return [spec.module for spec in ToyAdapter(config).linear_modules()]


def open_toy(
    config: ToyConfig,
    tensors: Mapping[str, TensorInfo],
    device: Device,
    updates: Mapping[str, LowRankUpdate] | None = None,
    ram_bytes: int | None = None,
    device_bytes: int | None = None,
    max_granule_bytes: int = MAX_GRANULE_BYTES,
    prefetch_distance: int = DEFAULT_PREFETCH_DISTANCE,
    make_store: Callable[..., TensorStore] = TensorStore,
    gradients: Gradients | None = None,
) -> ModelRunner:
    """A runner over a store of its own (``runner.store``; close it). ``ram_bytes``, ``device_bytes``: None holds
    everything. ``gradients``: of trained weights."""
    adapter = ToyAdapter(config)
    model = cut_model(adapter, tensors, max_granule_bytes)
    sizes = model.sizes(ram_bytes, device_bytes, device.shares_ram)
    store = make_store(model, device, sizes, prefetch_distance)
    return ModelRunner(adapter, model, store, updates or {}, Kernels(), gradients=gradients)


def granules_of(config: ToyConfig, tensors: Mapping[str, TensorInfo], max_granule_bytes: int) -> StreamedModel:
    """The cut that ``open_toy`` makes, to choose budgets by."""
    return cut_model(ToyAdapter(config), tensors, max_granule_bytes)


class PlainToy:
    """The oracle: the same model as ordinary fp32 tensors under autograd, written without lema's operations."""

    def __init__(
        self, config: ToyConfig, weights: Mapping[str, Tensor], updates: Mapping[str, LowRankUpdate] | None = None
    ) -> None:
        self.config = config
        self.weights = {name: weight.float() for name, weight in weights.items()}
        self.updates = updates or {}

    def _linear(self, x: Tensor, module: str) -> Tensor:
        y = F.linear(x, self.weights[f"{module}.weight"], self.weights.get(f"{module}.bias"))
        update = self.updates.get(module)
        if update is not None:
            y = y + update.scale * (x @ update.lora_A.t()) @ update.lora_B.t()
        return y

    def _norm(self, x: Tensor, name: str) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], self.weights[name], _EPS)

    def logits(self, ids_BT: Tensor, valid_BT: Tensor | None = None) -> Tensor:
        """fp32 [B, T, V], without dropout."""
        c = self.config
        b, t = ids_BT.shape
        valid_BT = torch.ones_like(ids_BT, dtype=torch.bool) if valid_BT is None else valid_BT
        positions_BT = (valid_BT.long().cumsum(1) - 1).clamp(min=0)
        x = self.weights["model.tokens.weight"][ids_BT] + self.weights["model.positions.weight"][positions_BT]
        seen = torch.ones(t, t, dtype=torch.bool).tril() & valid_BT[:, None, :] | torch.eye(t, dtype=torch.bool)
        for layer in range(c.n_layers):
            root = f"model.layers.{layer}"
            h = self._norm(x, f"{root}.norm_1.weight")
            q, k, v = (
                self._linear(h, f"{root}.{name}").view(b, t, -1, c.head_dim).transpose(1, 2) for name in ("q", "k", "v")
            )
            k, v = (y.repeat_interleave(c.n_heads // c.n_kv_heads, dim=1) for y in (k, v))
            scores = (q @ k.transpose(2, 3)) * c.head_dim**-0.5
            weights = scores.masked_fill(~seen[:, None], float("-inf")).softmax(-1)
            x = x + self._linear((weights @ v).transpose(1, 2).reshape(b, t, -1), f"{root}.o")
            h = self._norm(x, f"{root}.norm_2.weight")
            up = self._linear(h, f"{root}.up")
            x = x + self._linear(up * F.silu(up), f"{root}.down")
        return self._linear(self._norm(x, "model.norm.weight"), "head")

    def loss_sum(self, ids_BT: Tensor, labels_BT: Tensor, valid_BT: Tensor | None = None) -> Tensor:
        """Summed negative log-likelihood of the shifted labels; padding and -100 are left out."""
        targets = labels_BT[:, 1:]
        if valid_BT is not None:
            targets = targets.masked_fill(~valid_BT[:, 1:], -100)
        logits = self.logits(ids_BT, valid_BT)[:, :-1]
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-100, reduction="sum")
