"""What a step allocates beside the weights, from shapes alone: one block is run on the meta device and its saved
tensors counted.

Shapes: B rows, T tokens, S keys, H heads, G key/value heads, D head size.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from lema_core.adapter import ModelAdapter
from lema_core.ops.context import DropoutKey, ForwardContext
from lema_core.ops.linear import LinearKernel
from lema_core.ops.low_rank import LowRankUpdate
from lema_core.ops.streamed import StreamedOps
from lema_core.runtime.head_loss import chunk_tokens
from lema_core.store.model import StreamedModel
from lema_core.store.trace import TraceRecorder

#: temporaries alive together inside one operation or between two, in multiples of the largest tensor a block saves
_TEMPORARIES = 4
#: more of them where LoRA's branch has dropout: its mask and the masked input
_DROPOUT_TEMPORARIES = 2


class _FusedAttention(torch.autograd.Function):
    """What fused attention keeps for its gradient: operands, result, and a statistic per query and head."""

    @staticmethod
    def forward(ctx: Any, q_BHTD: Tensor, k_BGSD: Tensor, v_BGSD: Tensor) -> Tensor:
        out_BHTD = torch.empty_like(q_BHTD)
        ctx.save_for_backward(q_BHTD, k_BGSD, v_BGSD, out_BHTD, q_BHTD.new_empty(q_BHTD.shape[:-1]))
        return out_BHTD


class _FusedOps(StreamedOps):
    """On the meta device torch takes the unfused path, whose [T, S] matrices are not made where the fused one runs."""

    def attention(self, q_BHTD: Tensor, k_BHSD: Tensor, v_BHSD: Tensor, ctx: ForwardContext, scale: float) -> Tensor:
        return _FusedAttention.apply(q_BHTD, k_BHSD, v_BHSD).transpose(1, 2).flatten(2)


def activation_bytes(
    adapter: ModelAdapter,
    model: StreamedModel,
    updates: Mapping[str, LowRankUpdate],
    dtype: torch.dtype,
    rows: int,
    tokens: int,
    recompute: bool,
    fused_attention: bool = True,
) -> int:
    """Peak bytes of activations of one micro-batch [rows, tokens] in training.

    ``fused_attention``: the device has such a kernel for ``dtype``. With left padding each kept layer takes a mask of
    rows * tokens * tokens floats more, of which one is counted.
    """
    meta = torch.device("meta")
    on_meta = {name: update.on_meta() for name, update in updates.items()}
    ops_type = _FusedOps if fused_attention else StreamedOps
    ops = ops_type(TraceRecorder(model), LinearKernel(), meta, dtype, on_meta, model.biased_modules)
    positions = torch.empty(rows, tokens, dtype=torch.int64, device=meta)
    ctx = ForwardContext(positions, dropout=DropoutKey(0, 0, 0))
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
    temporaries = _TEMPORARIES + _DROPOUT_TEMPORARIES * any(update.dropout for update in updates.values())
    mask = rows * tokens * tokens * (1 + dtype.itemsize)
    return kept + mask + max(temporaries * max(sizes), 2 * logits + 3 * boundary)
