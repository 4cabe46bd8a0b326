"""The plain-torch product: low-rank updates against fp64, micro-batches together against micro-batches apart."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lema_core.ops.linear import Columns, LinearKernel

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
#: tokens of each micro-batch; the last of 1200 inputs times 200 rows is widened in several blocks
LENGTHS = [(5,), (1, 2, 3), (4, 5, 6), (7, 8, 9), (9, 1, 9, 1, 33)]


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def segments_of(lengths: tuple[int, ...]) -> tuple[Columns, ...]:
    stops = [sum(lengths[: i + 1]) for i in range(len(lengths))]
    return tuple((stop - length, stop) for stop, length in zip(stops, lengths, strict=True))


def near(found: Tensor, expected: Tensor) -> bool:
    return bool((found - expected).norm() <= 1e-6 * expected.norm())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "k", "n", "r"), [(1, 1, 1, 1), (13, 9, 5, 3), (700, 2049, 17, 16)])
@pytest.mark.parametrize("segmented", [False, True])
def test_update_is_part_of_the_product(rows: int, k: int, n: int, r: int, dtype: torch.dtype, segmented: bool) -> None:
    weight, x, dy = randn(rows, k).to(dtype), randn(k, n, seed=1), randn(rows, n, seed=2)
    # columns of a wider matrix and rows of a taller one: what stacked modules give
    lora_B, lora_A = randn(rows, r + 2, seed=3)[:, 1 : r + 1], randn(r + 2, k, seed=4)[1 : r + 1]
    inner, d_inner = randn(r, n, seed=5), randn(r, n, seed=6)
    segments = segments_of((n - n // 2, n // 2)) if segmented and n > 1 else ()
    kernel, wide = LinearKernel(), weight.double()
    kernel.forward(
        weight, kernel.packed(x, segments), out := torch.full((rows, n), torch.nan), (lora_B, inner, 0.5), segments
    )
    assert near(out, wide @ x.double() + 0.5 * (lora_B.double() @ inner.double()))
    kernel.input_gradient(weight, dy, dx := torch.full((k, n), torch.nan), True, (lora_A, d_inner), segments)
    expected = wide.t() @ dy.double() + lora_A.double().t() @ d_inner.double()
    assert near(dx, expected)
    kernel.input_gradient(weight, dy, dx, False, (lora_A, d_inner), segments)
    assert near(dx, 2 * expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("with_update", [False, True])
def test_micro_batches_together_equal_micro_batches_apart(
    lengths: tuple[int, ...], dtype: torch.dtype, with_update: bool
) -> None:
    rows, k, r, n = 1001, 1200, 3, sum(lengths)
    kernel, segments, weight = LinearKernel(), segments_of(lengths), randn(rows, k).to(dtype)
    x, dy, before = randn(k, n, seed=1), randn(rows, n, seed=2), randn(k, n, seed=3)
    lora_A, lora_B, inner, d_inner = randn(r, k, seed=4), randn(rows, r, seed=5), randn(r, n, seed=6), randn(r, n)

    def products(columns: slice, parts: tuple[Columns, ...]) -> tuple[Tensor, Tensor]:
        each_x, each_dy, dx, a, da = (t[:, columns].contiguous() for t in (x, dy, before, inner, d_inner))
        out = torch.empty_like(each_dy)
        packed = kernel.packed(each_x, parts)
        # two blocks of rows, as the tensor store cuts a matrix; the second at an odd address
        for block in (slice(0, 7), slice(7, rows)):
            update = (lora_B[block], a, 2.0) if with_update else None
            kernel.forward(weight[block], packed, out[block], update, parts)
            update_dx = (lora_A, da) if with_update else None
            kernel.input_gradient(weight[block], each_dy[block], dx, block.start == 0, update_dx, parts)
        return out, dx

    out, dx = products(slice(None), segments)
    for start, stop in segments:
        for whole, apart in zip((out, dx), products(slice(start, stop), ((0, stop - start),)), strict=True):
            assert torch.equal(whole[:, start:stop], apart)
