"""Attention that leaves out some of its weights in training."""

from __future__ import annotations

import torch
from torch import Tensor

from lema_core.ops.attention import TorchAttention, attention, dropped_attention
from lema_core.ops.context import Dropout, ForwardContext, Segment

SCALE = 0.5


def heads(n_tokens: int) -> tuple[Tensor, Tensor, Tensor]:
    """Feature-major q of four heads, k and v of two."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(n * 8, n_tokens, generator=generator) for n in (4, 2, 2))
    return tuple(x.view(-1, 8, n_tokens).transpose(1, 2)[None] for x in (q, k, v))  # type: ignore[return-value]


def test_its_mean_over_masks_is_attention_without_dropout() -> None:
    masked = torch.ones(1, 5, 5, dtype=torch.bool).tril()
    masked[:, 2:, 0] = False
    segments = Segment(0, 12, 2, 6), Segment(12, 17, 1, 5, 1, masked)
    ctx = ForwardContext(torch.arange(17)[None], segments=segments)
    q, k, v = heads(17)
    expected = attention(TorchAttention(), q, k, v, ctx, SCALE)
    times = 400
    found = [dropped_attention(q, k, v, ctx, SCALE, Dropout(0, step, segments), 0.3, "layer") for step in range(times)]
    assert not torch.equal(found[0], found[1])
    assert (torch.stack(found).mean(0) - expected).norm() < 0.1 * expected.norm()
    rare = dropped_attention(q, k, v, ctx, SCALE, Dropout(0, 0, segments), 1e-9, "layer")
    torch.testing.assert_close(rare, expected, rtol=1e-5, atol=1e-6)


def test_a_micro_batch_is_dropped_alone_as_it_is_among_others() -> None:
    q, k, v = heads(17)
    segments = Segment(0, 12, 2, 6, 4), Segment(12, 17, 1, 5, 7)
    ctx = ForwardContext(torch.arange(17)[None], segments=segments)
    together = dropped_attention(q, k, v, ctx, SCALE, Dropout(3, 5, segments), 0.3, "layer")
    alone = (Segment(0, 5, 1, 5, 7),)
    ctx = ForwardContext(torch.arange(5)[None], segments=alone)
    part = (x[:, :, 12:].contiguous() for x in (q, k, v))
    found = dropped_attention(*part, ctx, SCALE, Dropout(3, 5, alone), 0.3, "layer")
    assert torch.equal(found, together[:, 12:])


def test_weights_are_dropped_head_by_head() -> None:
    """One token sees itself alone: its head is twice the value, or nothing."""
    q, k, v = heads(64)
    segments = (Segment(0, 64, 64, 1),)
    ctx = ForwardContext(torch.zeros(1, 64, dtype=torch.int64), segments=segments)
    found = dropped_attention(q, k, v, ctx, SCALE, Dropout(0, 0, segments), 0.5, "layer").view(64, 4, 8)
    values = v[0].transpose(0, 1).repeat_interleave(2, dim=1)
    kept = found.abs().sum(-1) > 0
    assert torch.equal(found[kept], 2 * values[kept]) and 0.35 < kept.float().mean() < 0.65
