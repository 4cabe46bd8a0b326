"""Native W8A8 products against plain torch's, bit for bit where nothing but codes is summed."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from lema_core.errors import PluginError
from lema_core.ops.w8a8 import multiply_codes, round_inputs
from lema_core.quantization.block import QuantizedBlock
from lema_core.testing.quantized_weights import Inputs, block_of, decoded, inputs_for, placed, rows_of
from lema_cuda.linear import NativeLinear

SHAPES = [(1, 1), (7, 5), (13, 37), (6, 512), (193, 513), (50, 1331), (97, 4101)]


@pytest.fixture
def w8a8(native: NativeLinear) -> NativeLinear:
    return NativeLinear(weights_compute="w8a8")


def expected_of(weight: QuantizedBlock, x: Tensor) -> Tensor:
    return multiply_codes(weight, *round_inputs(x))


def forward(
    kernel: NativeLinear, weight: QuantizedBlock, x: Tensor, packed: bool = False, segmented: bool = False
) -> Tensor:
    segments = ((0, x.shape[1]),) if segmented else ()
    out = torch.full((weight.shape[0], x.shape[1]), torch.nan)
    kernel.forward(weight, kernel.packed(x, segments) if packed else x, out, segments=segments)
    return out


@pytest.mark.parametrize("n", [1, 2, 3, 4, 5, 17, 70])
def test_the_bits_of_plain_torch(w8a8: NativeLinear, n: int) -> None:
    """Packed or not, few columns by dot products or by tiles, by one thread or by two: sums of codes are exact."""
    for rows, k in SHAPES:
        weight, x = block_of("int8", rows, k), inputs_for(rows, k, n).x
        right = expected_of(weight, x)
        for threads in (1, 2):
            torch.set_num_threads(threads)
            for packed in (False, True):
                for segmented in (False, True):
                    assert torch.equal(forward(w8a8, weight, x, packed, segmented), right)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.integers(1, 230), st.integers(1, 1200), st.integers(1, 40), st.floats(-30, 30), st.booleans())
def test_any_shape_and_size(w8a8: NativeLinear, rows: int, k: int, n: int, power: float, packed: bool) -> None:
    weight, x = block_of("int8", rows, k), inputs_for(rows, k, n).x * 10**power
    assert torch.equal(forward(w8a8, weight, x, packed), expected_of(weight, x))


def test_plain_torch_is_what_the_words_say() -> None:
    """An oracle without shortcuts: integers in 64 bits."""
    weight, x = block_of("int8", 20, 3000), inputs_for(20, 3000, 6).x
    codes, scale = weight.parts
    step = x.abs().amax(dim=0) / 127
    rounded = (x / step).round()
    sums = codes.long() @ rounded.long()
    assert torch.equal(expected_of(weight, x), sums.float() * scale[:, None] * step)
    exact = decoded(weight).double() @ x.double()
    assert (expected_of(weight, x) - exact).norm() < 0.02 * exact.norm()


@pytest.mark.parametrize("n", [1, 17])
def test_the_largest_sums(w8a8: NativeLinear, n: int) -> None:
    """131072 products of 127 and 127, or -127: the most that is served."""
    k = 1 << 17
    codes = torch.full((3, k), 127, dtype=torch.int8)
    codes[1] = -127
    codes[2, ::2] = -127
    weight = QuantizedBlock(block_of("int8", 3, 1).format, (3, k), (codes, torch.ones(3)))
    out = forward(w8a8, weight, torch.full((k, n), 127.0))
    assert torch.equal(out, torch.tensor([127.0 * 127 * k, -127.0 * 127 * k, 0.0])[:, None].expand(3, n))
    wider = QuantizedBlock(weight.format, (1, k + 1), (torch.zeros(1, k + 1, dtype=torch.int8), torch.ones(1)))
    with pytest.raises(PluginError, match="sums 131072 products at most, and a weight has 131073 inputs"):
        forward(w8a8, wider, torch.zeros(k + 1, n))


@pytest.mark.parametrize("n", [1, 4, 5, 20])
def test_columns_of_zeros_tiny_and_huge_ones_and_what_is_not_finite(w8a8: NativeLinear, n: int) -> None:
    weight = block_of("int8", 30, 45)
    for value in (0.0, -0.0, 1e-45, 1e-42, 1e38, -3.4e38, torch.inf, -torch.inf, torch.nan):
        x = inputs_for(30, 45, n).x
        x[:, n - 1] = 0.0
        x[7, n - 1] = value
        found, right = forward(w8a8, weight, x), expected_of(weight, x)
        assert torch.equal(found.nan_to_num(7.0), right.nan_to_num(7.0))
        assert found[:, n - 1].isnan().all() == (not torch.tensor(value).isfinite())
        assert found[:, : n - 1].isfinite().all()


@pytest.mark.parametrize("n", [1, 3, 5, 40])
@pytest.mark.parametrize("r", [1, 16, 300])
def test_the_low_rank_term_is_of_the_inputs_as_they_were(w8a8: NativeLinear, n: int, r: int) -> None:
    weight, of = block_of("int8", 200, 131), inputs_for(200, 131, n, r)
    w8a8.forward(weight, of.x, out := torch.empty(200, n), (of.lora_B, of.inner, 0.5))
    right = expected_of(weight, of.x) + 0.5 * of.lora_B.double() @ of.inner.double()
    assert (out - right).norm() <= 1e-6 * right.norm()
    w8a8.forward(rows_of(weight, slice(50, 120)), of.x, part := torch.empty(70, n), (of.lora_B[50:120], of.inner, 0.5))
    assert torch.equal(part, out[50:120])


def test_micro_batches_together_equal_micro_batches_apart(w8a8: NativeLinear) -> None:
    weight, of = block_of("int8", 50, 301), inputs_for(50, 301, 24, 5)
    segments = ((0, 1), (1, 4), (4, 24))
    w8a8.forward(weight, of.x, whole := torch.empty(50, 24), (of.lora_B, of.inner, 0.5), segments)
    for start, stop in segments:
        x, inner = of.x[:, start:stop].contiguous(), of.inner[:, start:stop].contiguous()
        out = torch.empty(50, stop - start)
        w8a8.forward(weight, x, out, (of.lora_B, inner, 0.5), ((0, stop - start),))
        assert torch.equal(out, whole[:, start:stop])


@pytest.mark.parametrize("n", [1, 17])
def test_any_address_and_nothing_beside(w8a8: NativeLinear, n: int) -> None:
    weight, of = block_of("int8", 13, 601), inputs_for(13, 601, n)
    right = expected_of(weight, of.x)
    around, expected = torch.full((15, n + 4), 7.0), torch.full((15, n + 4), 7.0)
    w8a8.forward(placed(weight, 4), of.x, around[1:14, 2 : 2 + n])
    expected[1:14, 2 : 2 + n] = right
    assert torch.equal(around, expected)


def test_input_gradients_and_other_formats_round_nothing(native: NativeLinear, w8a8: NativeLinear) -> None:
    for name in ("int8", "int4-64", "nf4"):
        weight, of = block_of(name, 40, 128), inputs_for(40, 128, 6)
        native.input_gradient(weight, of.dy, expected := torch.empty_like(of.x), True)
        w8a8.input_gradient(weight, of.dy, found := torch.empty_like(of.x), True)
        assert torch.equal(found, expected)
        if name != "int8":
            assert torch.equal(forward(w8a8, weight, of.x), forward(native, weight, of.x))
    wide = torch.randn(40, 128)
    of = inputs_for(40, 128, 6)
    assert torch.equal(*(_dense(kernel, wide, of) for kernel in (native, w8a8)))


def _dense(kernel: NativeLinear, wide: Tensor, of: Inputs) -> Tensor:
    kernel.forward(wide, of.x, out := torch.empty(40, 6))
    return out
