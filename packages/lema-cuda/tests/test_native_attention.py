"""Native attention against torch's in fp64 and fp32, and bit for bit against itself: any threads, any company."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from lema_core.ops.attention import AttentionKernel, TorchAttention
from lema_core.ops.context import Segment
from lema_cuda.library import refusals

pytestmark = pytest.mark.skipif(bool(refusals()), reason="; ".join(refusals()) or "native")
#: relative, by norm
TOLERANCE = 1e-6


@pytest.fixture
def kernel(level: str) -> AttentionKernel:
    from lema_cuda.attention import NativeAttention

    return NativeAttention()


def packed(*sizes: tuple[int, int]) -> tuple[Segment, ...]:
    """Segments of (rows, tokens)."""
    segments, start = [], 0
    for index, (rows, tokens) in enumerate(sizes):
        segments.append(Segment(start, start + rows * tokens, rows, tokens, index))
        start = segments[-1].stop
    return tuple(segments)


def heads(count: int, n: int, d: int, seed: int) -> Tensor:
    """[1, H, N, D], feature-major."""
    storage = torch.randn(count, d, n, generator=torch.Generator().manual_seed(seed))
    return storage.transpose(1, 2)[None]


def computed(
    kernel: AttentionKernel, inputs: list[Tensor], dy: Tensor, segments: tuple[Segment, ...], scale: float
) -> list[Tensor]:
    """out, dq, dk, dv"""
    leaves = [x.detach().requires_grad_() for x in inputs]
    out = kernel.attend(*leaves, segments, scale)
    return [out.detach(), *torch.autograd.grad(out, leaves, dy)]


def check(kernel: AttentionKernel, h: int, g: int, d: int, *sizes: tuple[int, int]) -> None:
    segments, n = packed(*sizes), sum(rows * tokens for rows, tokens in sizes)
    inputs = [heads(count, n, d, seed) for seed, count in enumerate((h, g, g))]
    dy = heads(h, n, d, 3)[0].permute(1, 0, 2).flatten(1)[None]
    found = computed(kernel, inputs, dy, segments, d**-0.5)
    expected = computed(TorchAttention(), [x.double() for x in inputs], dy.double(), segments, d**-0.5)
    # a single key has no gradient through the softmax, and that of a few is a difference of what may be far larger:
    # what is left is rounding of the whole
    few = any(segment.tokens <= 3 for segment in segments)
    scale = max(each.norm() for each in expected[1:])
    for mine, right in zip(found, expected, strict=True):
        assert (mine - right).norm() <= TOLERANCE * max(right.norm(), scale if few else 1e-3 * scale)
    assert found[0][0].t().is_contiguous()
    assert all(grad[0].transpose(1, 2).is_contiguous() for grad in found[1:])


@pytest.mark.parametrize(
    ("h", "g", "d", "sizes"),
    [
        (1, 1, 16, [(1, 1)]),
        (4, 2, 64, [(1, 64), (2, 65)]),
        (9, 3, 64, [(1, 300)]),
        (6, 1, 32, [(3, 17), (1, 129), (2, 16), (1, 5)]),
        (2, 2, 80, [(2, 100)]),
        (3, 3, 256, [(1, 70)]),
    ],
)
@pytest.mark.parametrize("threads", [1, 2])
def test_values_and_gradients(
    kernel: AttentionKernel, h: int, g: int, d: int, sizes: list[tuple[int, int]], threads: int
) -> None:
    torch.set_num_threads(threads)
    check(kernel, h, g, d, *sizes)


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.integers(1, 3),
    st.integers(1, 3),
    st.sampled_from((16, 48, 64)),
    st.lists(st.tuples(st.integers(1, 3), st.integers(1, 140)), min_size=1, max_size=3),
    st.integers(1, 3),
)
def test_any_shape(
    kernel: AttentionKernel, g: int, per_group: int, d: int, sizes: list[tuple[int, int]], threads: int
) -> None:
    torch.set_num_threads(threads)
    check(kernel, g * per_group, g, d, *sizes)


@pytest.mark.parametrize("threads", [1, 2, 3, 8])
def test_together_equals_apart_on_any_number_of_threads(kernel: AttentionKernel, threads: int) -> None:
    segments = packed((1, 133), (3, 16), (2, 70))
    inputs = [heads(count, 321, 32, seed) for seed, count in enumerate((8, 4, 4))]
    dy = torch.randn(1, 321, 256, generator=torch.Generator().manual_seed(9))
    torch.set_num_threads(threads)
    together = computed(kernel, inputs, dy, segments, 0.2)
    torch.set_num_threads(1)
    for segment in segments:
        columns = slice(segment.start, segment.stop)
        parts = [x[:, :, columns].transpose(2, 3).contiguous().transpose(2, 3) for x in inputs]
        alone = computed(kernel, parts, dy[:, columns], packed((segment.rows, segment.tokens)), 0.2)
        assert torch.equal(alone[0], together[0][:, columns])
        for found, whole in zip(alone[1:], together[1:], strict=True):
            assert torch.equal(found, whole[:, :, columns])


def test_beside_a_masked_micro_batch_as_alone(kernel: AttentionKernel) -> None:
    """What needs a mask is torch's; what does not stays the library's."""
    mask = torch.ones(2, 20, 20, dtype=torch.bool).tril()
    mask[1, 4:, :3] = False
    segments = tuple(
        replace(s, mask_BTS=mask) if s.rows == 2 else s for s in packed((1, 33), (2, 20), (1, 50), (2, 20))
    )
    inputs = [heads(count, 163, 32, seed) for seed, count in enumerate((4, 2, 2))]
    dy = torch.randn(1, 163, 128, generator=torch.Generator().manual_seed(9))
    together = computed(kernel, inputs, dy, segments, 0.2)
    assert together[0][0].t().is_contiguous()
    for segment in segments:
        columns = slice(segment.start, segment.stop)
        parts = [x[:, :, columns].transpose(2, 3).contiguous().transpose(2, 3) for x in inputs]
        alone = replace(segment, start=0, stop=segment.stop - segment.start)
        found = computed(kernel, parts, dy[:, columns], (alone,), 0.2)
        assert torch.equal(found[0], together[0][:, columns])
        for mine, whole in zip(found[1:], together[1:], strict=True):
            assert torch.equal(mine, whole[:, :, columns])


def test_as_close_to_the_truth_as_torch(kernel: AttentionKernel) -> None:
    """Large scores too, where the softmax is nearly a choice."""
    segments = packed((2, 200))
    for spread in (1.0, 6.0):
        inputs = [heads(count, 400, 64, seed) * spread for seed, count in enumerate((4, 2, 2))]
        dy = torch.randn(1, 400, 256, generator=torch.Generator().manual_seed(9))
        truth = computed(TorchAttention(), [x.double() for x in inputs], dy.double(), segments, 0.125)
        theirs = computed(TorchAttention(), inputs, dy, segments, 0.125)
        for mine, fp32, right in zip(computed(kernel, inputs, dy, segments, 0.125), theirs, truth, strict=True):
            assert (mine - right).norm() <= 2 * (fp32 - right).norm() + 1e-7 * right.norm()


def test_parts_of_wider_matrices(kernel: AttentionKernel) -> None:
    """q, k and v as rows of one product, with more columns than are attended to."""
    both = torch.randn(4 * 16, 40, generator=torch.Generator().manual_seed(0))
    q, k, v = (x[:, 5:38].unflatten(0, (-1, 16)).transpose(1, 2)[None] for x in both.split((32, 16, 16)))
    dy, segments = torch.randn(1, 33, 32), packed((1, 33))
    alone = [x.transpose(2, 3).contiguous().transpose(2, 3) for x in (q, k, v)]
    for found, expected in zip(
        computed(kernel, [q, k, v], dy, segments, 0.3), computed(kernel, alone, dy, segments, 0.3), strict=True
    ):
        assert torch.equal(found, expected)


def test_not_a_number_is_not_hidden(kernel: AttentionKernel) -> None:
    segments = packed((1, 100))
    for which in range(3):
        inputs = [heads(2, 100, 16, seed) for seed in range(3)]
        inputs[which][0, 1, 70, 3] = torch.nan
        out = kernel.attend(*inputs, segments, 0.3)[0].unflatten(1, (2, 16))
        assert not out[:, 0].isnan().any()
        seeing = out[70:, 1].isnan().any(dim=1)
        assert seeing[0] and (which == 0 or seeing.all())


def test_what_it_does_not_serve_is_left_to_plain_torch(kernel: AttentionKernel) -> None:
    plain, twin = packed((2, 9)), TorchAttention()
    mask = torch.ones(2, 9, 9, dtype=torch.bool).tril()
    mask[1, 3:, 0] = False
    masked = (Segment(0, 18, 2, 9, 0, mask),)
    good = [heads(2, 18, 16, seed) for seed in range(3)]
    for inputs, segments in (
        (good, masked),
        ([x.bfloat16() for x in good], plain),
        ([x.contiguous() for x in good], plain),
        ([heads(2, 18, 24, seed) for seed in range(3)], plain),
    ):
        assert torch.equal(kernel.attend(*inputs, segments, 0.3), twin.attend(*inputs, segments, 0.3))
