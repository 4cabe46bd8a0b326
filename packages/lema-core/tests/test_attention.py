"""Attention of packed micro-batches against its definition in fp64, and against itself computed apart."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lema_core.ops.attention import TorchAttention, attention
from lema_core.ops.context import ForwardContext, Segment

KERNEL = TorchAttention()


def heads(count: int, n: int, d: int, seed: int) -> Tensor:
    """[1, H, N, D], feature-major."""
    storage = torch.randn(count, d, n, generator=torch.Generator().manual_seed(seed))
    return storage.transpose(1, 2)[None].requires_grad_()


def packed(*sizes: tuple[int, int]) -> tuple[Segment, ...]:
    """Segments of (rows, tokens)."""
    segments, start = [], 0
    for index, (rows, tokens) in enumerate(sizes):
        segments.append(Segment(start, start + rows * tokens, rows, tokens, index))
        start = segments[-1].stop
    return tuple(segments)


def by_definition(q: Tensor, k: Tensor, v: Tensor, segments: tuple[Segment, ...], scale: float) -> Tensor:
    """[1, N, H * D], one row and head after another."""
    q, k, v = (x[0].double() for x in (q, k, v))
    columns = []
    for segment in segments:
        for row in range(segment.rows):
            tokens = slice(segment.start + row * segment.tokens, segment.start + (row + 1) * segment.tokens)
            visible = torch.ones(segment.tokens, segment.tokens, dtype=torch.bool).tril()
            if segment.mask_BTS is not None:
                visible = segment.mask_BTS[row]
            outs = []
            for head in range(len(q)):
                group = head // (len(q) // len(k))
                scores = scale * q[head, tokens] @ k[group, tokens].t()
                outs.append(scores.masked_fill(~visible, -torch.inf).softmax(-1) @ v[group, tokens])
            columns.append(torch.cat(outs, dim=1))
    return torch.cat(columns)[None]


def context(segments: tuple[Segment, ...]) -> ForwardContext:
    return ForwardContext(torch.zeros(1, segments[-1].stop, dtype=torch.long), segments=segments)


SIZES = [((1, 1),), ((2, 7),), ((1, 5), (3, 4), (2, 9))]


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize(("h", "g"), [(1, 1), (4, 2), (6, 2)])
def test_values_and_gradients(sizes: tuple[tuple[int, int], ...], h: int, g: int) -> None:
    segments, n = packed(*sizes), sum(rows * tokens for rows, tokens in sizes)
    given = [heads(count, n, 8, seed) for seed, count in enumerate((h, g, g))]
    out = attention(KERNEL, *given, context(segments), 0.3)
    expected = by_definition(*given, segments, 0.3)
    dy = torch.randn(out.shape, generator=torch.Generator().manual_seed(9))
    assert out.shape == (1, n, h * 8) and out[0].t().is_contiguous()
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-6)
    found_grads = torch.autograd.grad(out, given, dy)
    for found, right in zip(found_grads, torch.autograd.grad(expected, given, dy.double()), strict=True):
        torch.testing.assert_close(found, right, rtol=1e-5, atol=2e-6)


def test_a_masked_micro_batch_beside_a_plain_one() -> None:
    first, second = packed((1, 6), (2, 4))
    mask = torch.ones(2, 4, 4, dtype=torch.bool).tril()
    mask[1, 2:, 0] = False
    segments = (first, Segment(second.start, second.stop, 2, 4, 1, mask))
    given = [heads(count, 14, 8, seed) for seed, count in enumerate((4, 2, 2))]
    out = attention(KERNEL, *given, context(segments), 0.5)
    torch.testing.assert_close(out.double(), by_definition(*given, segments, 0.5), rtol=1e-5, atol=1e-6)


def test_together_equals_apart() -> None:
    """Bit for bit, the gradients too."""
    segments = packed((1, 33), (3, 16), (2, 70))
    given = [heads(count, 221, 16, seed) for seed, count in enumerate((4, 2, 2))]
    dy = torch.randn(1, 221, 64, generator=torch.Generator().manual_seed(9))
    together = attention(KERNEL, *given, context(segments), 0.25)
    grads = torch.autograd.grad(together, given, dy)
    for segment in segments:
        columns = slice(segment.start, segment.stop)
        parts = [x[:, :, columns].transpose(2, 3).contiguous().transpose(2, 3).detach() for x in given]
        parts = [x.requires_grad_() for x in parts]
        alone = attention(KERNEL, *parts, context(packed((segment.rows, segment.tokens))), 0.25)
        assert torch.equal(alone, together[:, columns])
        for found, whole in zip(torch.autograd.grad(alone, parts, dy[:, columns]), grads, strict=True):
            assert torch.equal(found, whole[:, :, columns])


def test_without_segments_as_in_generation() -> None:
    """All rows of a batch; one query for all keys of a cache; a mask."""
    q, k, v = (torch.randn(2, h, 6, 8, generator=torch.Generator().manual_seed(h)) for h in (4, 2, 3))
    v = v[:, :2]

    def expected(mask: Tensor, queries: Tensor) -> Tensor:
        keys, values = (x.double().repeat_interleave(2, dim=1) for x in (k, v))
        scores = (0.3 * queries.double() @ keys.transpose(2, 3)).masked_fill(~mask, -torch.inf)
        return (scores.softmax(-1) @ values).transpose(1, 2).flatten(2)

    causal = torch.ones(6, 6, dtype=torch.bool).tril()
    positions = torch.zeros(2, 6, dtype=torch.long)
    out = attention(KERNEL, q, k, v, ForwardContext(positions), 0.3)
    torch.testing.assert_close(out.double(), expected(causal, q), rtol=1e-5, atol=1e-6)
    out = attention(KERNEL, q[:, :, -1:], k, v, ForwardContext(positions[:, -1:]), 0.3)
    torch.testing.assert_close(out.double(), expected(causal[-1:], q[:, :, -1:]), rtol=1e-5, atol=1e-6)
    mask = causal.repeat(2, 1, 1)
    mask[0, 3:, 1] = False
    out = attention(KERNEL, q, k, v, ForwardContext(positions, mask), 0.3)
    torch.testing.assert_close(out.double(), expected(mask[:, None], q), rtol=1e-5, atol=1e-6)
