"""The native products against fp64 and the plain-torch kernel, bit for bit against themselves."""

from __future__ import annotations

import os
import signal
import threading

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from lema_core.errors import PluginError
from lema_core.ops.linear import LinearKernel
from lema_cuda.linear import NativeLinear

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
#: relative, by norm
TOLERANCE = 1e-6
#: beyond one block of rows (192), one piece of the inner dimension (256), and sizes that divide nothing
SHAPES = [
    (1, 1, 1),
    (7, 5, 3),
    (6, 256, 16),
    (193, 257, 17),
    (400, 519, 4),
    (97, 4101, 2),
    (50, 300, 70),
    (768, 512, 64),
]


def make(rows: int, k: int, n: int, dtype: torch.dtype, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """weight [R, K], x [K, N], dy [R, N]"""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(rows, k, generator=generator).to(dtype)
    return weight, torch.randn(k, n, generator=generator), torch.randn(rows, n, generator=generator)


def stored_bytes(tensor: Tensor) -> bytes:
    return bytes(tensor.view(torch.uint8).flatten().tolist())


def products(
    kernel: NativeLinear | LinearKernel, weight: Tensor, x: Tensor, dy: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """out, dx, and dx added to x"""
    out, dx, sum_ = torch.full_like(dy, torch.nan), torch.full_like(x, torch.nan), x.clone()
    kernel.forward(weight, x, out)
    kernel.input_gradient(weight, dy, dx, True)
    kernel.input_gradient(weight, dy, sum_, False)
    return out, dx, sum_


def check(kernel: NativeLinear, weight: Tensor, x: Tensor, dy: Tensor) -> None:
    wide = weight.double()
    out, dx = wide @ x.double(), wide.t() @ dy.double()
    # the norm that products of random numbers have: a few of them may happen to cancel
    out_scale = wide.norm() * x.norm() / x.shape[0] ** 0.5
    dx_scale = wide.norm() * dy.norm() / dy.shape[0] ** 0.5
    expected = ((out, out_scale), (dx, dx_scale), (x + dx, dx_scale + x.norm()))
    for found, (right, scale) in zip(products(kernel, weight, x, dy), expected, strict=True):
        assert (found - right).norm() <= TOLERANCE * max(right.norm(), scale)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "k", "n"), SHAPES)
def test_products(native: NativeLinear, rows: int, k: int, n: int, dtype: torch.dtype) -> None:
    check(native, *make(rows, k, n, dtype))


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.integers(1, 230), st.integers(1, 300), st.integers(1, 40), st.sampled_from(DTYPES), st.integers(1, 3))
def test_any_shape(native: NativeLinear, rows: int, k: int, n: int, dtype: torch.dtype, threads: int) -> None:
    torch.set_num_threads(threads)
    check(native, *make(rows, k, n, dtype))


def test_inner_dimensions_that_are_computed_in_parts(native: NativeLinear) -> None:
    """8192 of the inner dimension, and the columns that 8 MB hold, are packed at once."""
    check(native, *make(8200, 9, 3, torch.bfloat16))
    check(native, *make(9, 8200, 300, torch.float16))
    check(native, *make(11, 8500, 2, torch.bfloat16))


@pytest.mark.parametrize("dtype", DTYPES)
def test_agrees_with_plain_torch(native: NativeLinear, dtype: torch.dtype) -> None:
    given = make(300, 200, 24, dtype)
    for found, expected in zip(products(native, *given), products(LinearKernel(), *given), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("offset", [2, 6, 14, 30])
def test_weights_at_any_address(native: NativeLinear, dtype: torch.dtype, offset: int) -> None:
    """A safetensors file aligns nothing. The bytes around the weight are NaN: reading them would show."""
    for rows, k, n in ((13, 37, 17), (5, 19, 1)):
        weight, x, dy = make(rows, k, n, dtype)
        size = weight.numel() * weight.element_size()
        memory = bytearray(b"\xff" * (offset + size + 64))
        memory[offset : offset + size] = stored_bytes(weight)
        placed = torch.frombuffer(memory, dtype=dtype, count=weight.numel(), offset=offset).view(rows, k)
        assert placed.data_ptr() % 4 == (torch.frombuffer(memory, dtype=torch.uint8).data_ptr() + offset) % 4
        for found, expected in zip(products(native, placed, x, dy), products(native, weight, x, dy), strict=True):
            assert torch.equal(found, expected)


def test_writes_only_where_it_should(native: NativeLinear) -> None:
    weight, x, _ = make(13, 20, 5, torch.bfloat16)
    around = torch.full((15, 9), 7.0)
    native.forward(weight, x, around[1:14, 2:7])
    expected = torch.full((15, 9), 7.0)
    native.forward(weight, x, out := torch.empty(13, 5))
    expected[1:14, 2:7] = out
    assert torch.equal(around, expected)
    wide = torch.randn(20, 9)
    wide[:, 2:7] = x
    native.forward(weight, wide[:, 2:7], again := torch.empty(13, 5))
    assert torch.equal(again, out)


@pytest.mark.parametrize(("rows", "k", "n"), [(1300, 300, 33), (700, 600, 3), (600, 600, 1), (64, 2000, 160)])
def test_same_bits_every_time_and_with_any_number_of_threads(native: NativeLinear, rows: int, k: int, n: int) -> None:
    given = make(rows, k, n, torch.bfloat16)
    torch.set_num_threads(1)
    expected = products(native, *given)
    for threads in (1, 2, 3, 2, 8):
        torch.set_num_threads(threads)
        for found, right in zip(products(native, *given), expected, strict=True):
            assert torch.equal(found, right)


def test_rows_of_a_product_do_not_depend_on_the_other_rows(native: NativeLinear) -> None:
    weight, x, _ = make(500, 300, 20, torch.bfloat16)
    native.forward(weight, x, whole := torch.empty(500, 20))
    native.forward(weight[123:301], x, part := torch.empty(178, 20))
    assert torch.equal(whole[123:301], part)


def test_several_callers_at_once(native: NativeLinear) -> None:
    torch.set_num_threads(2)
    given = [make(400, 300, 20, torch.bfloat16, seed) for seed in range(4)]
    expected = [products(native, *each) for each in given]
    wrong: list[int] = []

    def work(number: int) -> None:
        kernel = NativeLinear()
        for _ in range(20):
            found = products(kernel, *given[number])
            if not all(map(torch.equal, found, expected[number])):
                wrong.append(number)

    callers = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert not wrong


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_child_has_threads_of_its_own(native: NativeLinear) -> None:
    """The library alone: torch's own threads do not survive a fork."""
    torch.set_num_threads(2)
    weight, x, dy = make(400, 300, 20, torch.bfloat16)
    expected = products(native, weight, x, dy)[0]
    out = torch.empty_like(expected)
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            signal.alarm(30)
            native.forward(weight, x, out)
            os.write(writing, stored_bytes(out))
            os._exit(0)
        finally:
            os._exit(1)
    os.close(writing)
    with os.fdopen(reading, "rb") as answer:
        found = answer.read()
    assert os.waitpid(child, 0)[1] == 0
    assert found == stored_bytes(expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_infinities_and_nan_stay_in_their_row_and_column(native: NativeLinear, dtype: torch.dtype) -> None:
    weight, x, dy = make(20, 30, 18, dtype)
    weight[3, 4] = torch.inf
    x[7, 2] = torch.nan
    for found, expected in zip(products(native, weight, x, dy), products(LinearKernel(), weight, x, dy), strict=True):
        assert torch.equal(found.isnan(), expected.isnan()) and torch.equal(found.isinf(), expected.isinf())


@pytest.mark.parametrize("dtype", (torch.float16, torch.bfloat16))
def test_every_stored_number_is_widened_exactly(native: NativeLinear, dtype: torch.dtype) -> None:
    """All 65536 patterns times one, subnormals included, by each of the ways in."""
    weight = torch.arange(1 << 16, dtype=torch.int32).to(torch.uint16).view(dtype)
    for n in (1, 16):
        one = torch.ones(1, n)
        native.forward(weight.view(-1, 1), one, out := torch.empty(1 << 16, n))
        native.input_gradient(weight.view(1, -1), one, dx := torch.empty(1 << 16, n), True)
        for found in (out, dx):
            assert torch.equal(found.nan_to_num(7.0), weight.float().nan_to_num(7.0).view(-1, 1).expand(-1, n))


def test_empty_products(native: NativeLinear) -> None:
    native.forward(torch.empty(0, 3), torch.randn(3, 4), torch.empty(0, 4))
    native.forward(torch.randn(2, 3), torch.empty(3, 0), torch.empty(2, 0))
    native.forward(torch.empty(2, 0), torch.empty(0, 4), out := torch.full((2, 4), torch.nan))
    assert not out.any()


def test_on_meta_nothing_is_computed(native: NativeLinear) -> None:
    weight, x, dy = (tensor.to("meta") for tensor in make(5, 6, 7, torch.bfloat16))
    products(native, weight, x, dy)


def test_what_it_would_misread_is_refused(native: NativeLinear) -> None:
    weight, x, dy = make(5, 6, 7, torch.bfloat16)
    with pytest.raises(PluginError, match=r"the weight is torch.int8 .*, expected contiguous fp32, fp16 or bf16"):
        native.forward(weight.to(torch.int8), x, dy)
    with pytest.raises(PluginError, match="contiguous"):
        native.forward(weight.t(), dy[:5], torch.empty(6, 7))
    for wrong in (x.bfloat16(), x[:5], torch.randn(7, 6).t(), x[:1].expand(6, 7)):
        with pytest.raises(PluginError, match=r"expected fp32 \[6, 7\] with contiguous rows"):
            native.forward(weight, wrong, dy)
