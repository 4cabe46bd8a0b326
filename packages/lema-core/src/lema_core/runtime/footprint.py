"""What a step allocates beside the weights, from shapes alone: one block is run on the meta device and its saved
tensors counted."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from lema_core.adapter import ModelAdapter
from lema_core.ops.context import ForwardContext
from lema_core.ops.linear import LinearKernel
from lema_core.ops.low_rank import LowRankUpdate
from lema_core.ops.streamed import StreamedOps
from lema_core.runtime.head_loss import chunk_tokens
from lema_core.store.store import StreamedModel, TraceRecorder

#: temporaries alive together inside one operation or between two, in multiples of the largest tensor a block saves
_TEMPORARIES = 4


def activation_bytes(
    adapter: ModelAdapter,
    model: StreamedModel,
    updates: Mapping[str, LowRankUpdate],
    dtype: torch.dtype,
    rows: int,
    tokens: int,
    recompute: bool,
) -> int:
    """Peak bytes of activations of one micro-batch [rows, tokens] in training."""
    meta = torch.device("meta")
    on_meta = {name: update.on_meta() for name, update in updates.items()}
    biased = frozenset(name[: -len(".bias")] for name in model.layout.parts if name.endswith(".bias"))
    ops = StreamedOps(TraceRecorder(model), LinearKernel(), meta, dtype, on_meta, biased)
    ctx = ForwardContext(torch.empty(rows, tokens, dtype=torch.int64, device=meta))
    adapter.prepare(ctx)
    x_BTC = torch.empty(rows, tokens, adapter.hidden_size, dtype=dtype, device=meta, requires_grad=True)
    saved: dict[int, Tensor] = {}

    def count(tensor: Tensor) -> Tensor:
        saved[tensor.untyped_storage()._cdata] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
        adapter.block(ops, adapter.n_layers - 1, x_BTC, ctx)
    sizes = [tensor.untyped_storage().nbytes() for tensor in saved.values()]
    boundary = rows * tokens * adapter.hidden_size * dtype.itemsize
    kept = sum(sizes) + boundary * adapter.n_layers if recompute else (sum(sizes) + boundary) * adapter.n_layers
    logits = min(rows * tokens, chunk_tokens(adapter.vocab_size)) * adapter.vocab_size * 4
    return kept + max(_TEMPORARIES * max(sizes), 2 * logits + 3 * boundary)
