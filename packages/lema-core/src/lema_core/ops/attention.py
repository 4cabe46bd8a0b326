"""Causal softmax attention, inside each row of each micro-batch, so that packing changes no bit.

Shapes: B rows, T query tokens, S key tokens, N tokens of packed micro-batches, H heads, G key/value heads (H is a
multiple of G), D head size. Head h reads key/value head h // (H / G).
"""

from __future__ import annotations

import math
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from lema_core.ops.context import Dropout, ForwardContext, Segment


class AttentionKernel(Protocol):
    """Differentiable in all of q, k, v."""

    def attend(
        self, q_1HND: Tensor, k_1GND: Tensor, v_1GND: Tensor, segments: tuple[Segment, ...], scale: float
    ) -> Tensor:
        """Attention inside each row of each segment, -> feature-major [1, N, H * D]. A token's bits depend on its
        segment alone."""
        ...


class TorchAttention:
    """The plain-torch kernel, for every device, dtype and layout."""

    def attend(
        self, q_1HND: Tensor, k_1GND: Tensor, v_1GND: Tensor, segments: tuple[Segment, ...], scale: float
    ) -> Tensor:
        parts_HDn = []
        for segment in segments:
            q, k, v = (_rows(x, segment) for x in (q_1HND, k_1GND, v_1GND))
            out_BHTD = scaled_dot_product(q, k, v, segment.mask_BTS, scale)
            parts_HDn.append(out_BHTD.permute(1, 3, 0, 2).flatten(2))
        return torch.cat(parts_HDn, dim=2).flatten(0, 1).t()[None]


def attention(
    kernel: AttentionKernel,
    q_BHTD: Tensor,
    k_BHSD: Tensor,
    v_BHSD: Tensor,
    ctx: ForwardContext,
    scale: float,
    window: int | None = None,
) -> Tensor:
    """``softmax(scale * q k^T) v`` over the keys that ``ctx`` lets a query see (Vaswani et al. 2017,
    arXiv:1706.03762) -> [B, T, H * D].

    ``ctx.segments`` given: [1, H, N, D] of packed micro-batches, each with its own mask. Else ``ctx.mask_BTS``; None
    means causal, with as many queries as keys, or one query for all keys. There the keys may come from a cache.
    ``window``: a query sees so many keys at most, itself included (Beltagy et al. 2020, arXiv:2004.05150).
    """
    ctx = ctx.seen(window)
    if ctx.segments:
        return kernel.attend(q_BHTD, k_BHSD, v_BHSD, ctx.segments, scale)
    return scaled_dot_product(q_BHTD, k_BHSD, v_BHSD, ctx.mask_BTS, scale).transpose(1, 2).flatten(2)


def dropped_attention(
    q_1HND: Tensor,
    k_1GND: Tensor,
    v_1GND: Tensor,
    ctx: ForwardContext,
    scale: float,
    dropout: Dropout,
    p: float,
    name: str,
) -> Tensor:
    """:func:`attention` of packed micro-batches that leaves out each of its weights with probability ``p`` (as
    transformers' eager attention in training); every weight is held. Masks are drawn by ``name``."""
    parts_HDn = []
    for segment in ctx.segments:
        q, k, v = (_rows(x, segment).contiguous() for x in (q_1HND, k_1GND, v_1GND))
        shared = q.shape[1] // k.shape[1]
        k, v = (x if shared == 1 else x.repeat_interleave(shared, dim=1) for x in (k, v))
        seen_BTS = segment.mask_BTS
        if seen_BTS is None:
            seen_BTS = torch.ones(1, segment.tokens, segment.tokens, dtype=torch.bool, device=q.device).tril()
        scores_BHTS = (q @ k.transpose(2, 3)).mul(scale).masked_fill(~seen_BTS[:, None], -math.inf)
        weights_BHTS = torch.softmax(scores_BHTS, dim=-1)
        weights_BHTS = weights_BHTS * dropout.mask_of(name, segment, torch.empty_like(weights_BHTS), p)
        parts_HDn.append((weights_BHTS @ v).permute(1, 3, 0, 2).flatten(2))
    return torch.cat(parts_HDn, dim=2).flatten(0, 1).t()[None]


def scaled_dot_product(q_BHTD: Tensor, k_BGSD: Tensor, v_BGSD: Tensor, mask_BTS: Tensor | None, scale: float) -> Tensor:
    """torch's fused attention -> [B, H, T, D]; it reads heads of contiguous tokens."""
    mask = None if mask_BTS is None else mask_BTS[:, None]
    causal = mask is None and q_BHTD.shape[2] > 1
    q, k, v = (x.contiguous() for x in (q_BHTD, k_BGSD, v_BGSD))
    grouped = q.shape[1] != k.shape[1]
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal, scale=scale, enable_gqa=grouped)


def _rows(x_1HND: Tensor, segment: Segment) -> Tensor:
    """[1, H, N, D] -> [B, H, T, D] of one micro-batch."""
    x_HnD = x_1HND[0, :, segment.start : segment.stop]
    return x_HnD.unflatten(1, (segment.rows, segment.tokens)).transpose(0, 1)
