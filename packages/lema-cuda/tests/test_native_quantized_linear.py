"""Native products with quantized weights against fp64 on decoded ones, against plain torch's kernel, and bit for bit
against themselves."""

from __future__ import annotations

import ctypes

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from lema_core.errors import PluginError
from lema_core.ops.linear import Columns, LinearKernel
from lema_core.quantization.block import QuantizedBlock
from lema_core.quantization.formats import Int8Rows
from lema_core.testing.quantized_weights import FORMATS, Inputs, block_of, decoded, inputs_for, placed, rows_of
from lema_cuda.library import open_library
from lema_cuda.linear import NativeLinear, _Product
from lema_cuda.testing import AMX

#: relative, by norm
TOLERANCE = 1e-6
#: more than one block of rows (192), one piece of the inner dimension (256, or 4096 where tokens are few), odd inputs
SHAPES = [(1, 1), (7, 5), (13, 37), (6, 256), (193, 257), (50, 331), (97, 4101), (256, 128), (40, 8193)]
TOKENS = [1, 2, 3, 4, 5, 17]


def columns_of(name: str, k: int) -> int:
    """As many as the format takes."""
    return -(-k // 64) * 64 if name == "nf4" else k


def products(
    kernel: NativeLinear | LinearKernel,
    weight: QuantizedBlock | Tensor,
    of: Inputs,
    low_rank: bool,
    segments: tuple[Columns, ...] = (),
) -> tuple[Tensor, Tensor, Tensor]:
    """out, dx, and dx added to x"""
    out, dx, sum_ = torch.full_like(of.dy, torch.nan), torch.full_like(of.x, torch.nan), of.x.clone()
    update = (of.lora_B, of.inner, 0.5) if low_rank else None
    update_dx = (of.lora_A, of.d_inner) if low_rank else None
    kernel.forward(weight, kernel.packed(of.x, segments), out, update, segments)
    kernel.input_gradient(weight, of.dy, dx, True, update_dx, segments)
    kernel.input_gradient(weight, of.dy, sum_, False, update_dx, segments)
    return out, dx, sum_


def check(kernel: NativeLinear, weight: QuantizedBlock, of: Inputs, low_rank: bool) -> None:
    wide = decoded(weight).double()
    out, dx = wide @ of.x.double(), wide.t() @ of.dy.double()
    # the norm that products of random numbers have: a few of them may happen to cancel
    out_scale = wide.norm() * of.x.norm() / of.x.shape[0] ** 0.5
    dx_scale = wide.norm() * of.dy.norm() / of.dy.shape[0] ** 0.5
    if low_rank:
        out += 0.5 * of.lora_B.double() @ of.inner.double()
        dx += of.lora_A.double().t() @ of.d_inner.double()
    expected = ((out, out_scale), (dx, dx_scale), (of.x + dx, dx_scale + of.x.norm()))
    for found, (right, scale) in zip(products(kernel, weight, of, low_rank), expected, strict=True):
        assert (found - right).norm() <= TOLERANCE * max(right.norm(), scale)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("n", TOKENS)
@pytest.mark.parametrize("low_rank", [False, True])
def test_products(native: NativeLinear, name: str, n: int, low_rank: bool) -> None:
    for rows, k in SHAPES:
        k = columns_of(name, k)
        check(native, block_of(name, rows, k), inputs_for(rows, k, n), low_rank)


@pytest.mark.parametrize("name", FORMATS)
def test_many_tokens_and_a_large_rank(native: NativeLinear, name: str) -> None:
    check(native, block_of(name, 200, 320), inputs_for(200, 320, 256, r=300), True)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.integers(1, 230),
    st.integers(1, 300),
    st.integers(1, 40),
    st.sampled_from(FORMATS),
    st.integers(1, 3),
    st.booleans(),
)
def test_any_shape(native: NativeLinear, rows: int, k: int, n: int, name: str, threads: int, low_rank: bool) -> None:
    torch.set_num_threads(threads)
    k = columns_of(name, k)
    check(native, block_of(name, rows, k), inputs_for(rows, k, n), low_rank)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("n", [1, 4, 20])
def test_agrees_with_plain_torch(native: NativeLinear, name: str, n: int) -> None:
    weight, of = block_of(name, 150, 192), inputs_for(150, 192, n)
    plain = products(LinearKernel(), weight, of, True)
    for found, expected in zip(products(native, weight, of, True), plain, strict=True):
        assert (found - expected).norm() <= TOLERANCE * expected.norm()


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("n", [3, 16])
def test_every_code_is_decoded_as_the_format_does(native: NativeLinear, name: str, n: int) -> None:
    """Each code beside each scale, by each of the ways in, against the format's own numbers, bit for bit: one input is
    one and the others are zero."""
    rows, k = 256, 64
    weight = block_of(name, rows, k, seed=3)
    codes = torch.arange(256, dtype=torch.int32).to(torch.uint8)[:, None].expand_as(weight.parts[0]).contiguous()
    codes = codes.view(torch.int8).clamp(-127) if name == "int8" else codes
    weight = QuantizedBlock(weight.format, (rows, k), (codes, weight.parts[1]))
    wide = decoded(weight)
    for start in range(0, k, n):
        ones = torch.zeros(k, n)
        last = min(n, k - start)
        ones[start : start + last, :last] = torch.eye(last)
        for segments in ((), ((0, n),)):
            native.forward(weight, ones, out := torch.empty(rows, n), segments=segments)
            assert torch.equal(out[:, :last], wide[:, start : start + last])
    ones = torch.zeros(rows, n)
    ones[:n] = torch.eye(n)
    native.input_gradient(weight, ones, dx := torch.empty(k, n), True)
    assert torch.equal(dx, wide[:n].t())


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("r", [0, 3, 300])
def test_same_bits_with_any_number_of_threads_and_any_neighbours(native: NativeLinear, name: str, r: int) -> None:
    rows, k = 500, columns_of(name, 700)
    weight = block_of(name, rows, k)
    for n in (1, 3, 33):
        of = inputs_for(rows, k, n, max(r, 1))
        torch.set_num_threads(1)
        expected = products(native, weight, of, r > 0)
        for threads in (2, 3, 2):
            torch.set_num_threads(threads)
            for found, right in zip(products(native, weight, of, r > 0), expected, strict=True):
                assert torch.equal(found, right)
        native.forward(weight, of.x, whole := torch.empty(rows, n))
        native.forward(rows_of(weight, slice(123, 301)), of.x, part := torch.empty(178, n))
        assert torch.equal(whole[123:301], part)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("lengths", [(1, 2, 3, 4, 5), (4,), (2, 33, 1)])
@pytest.mark.parametrize("r", [0, 3])
def test_micro_batches_together_equal_micro_batches_apart(
    native: NativeLinear, name: str, lengths: tuple[int, ...], r: int
) -> None:
    rows, k, n = 50, columns_of(name, 301), sum(lengths)
    weight, of = block_of(name, rows, k), inputs_for(rows, k, n)
    stops = [sum(lengths[: i + 1]) for i in range(len(lengths))]
    segments = tuple((stop - length, stop) for stop, length in zip(stops, lengths, strict=True))
    together = products(native, weight, of, r > 0, segments)
    for start, stop in segments:
        some = (each[:, start:stop].contiguous() for each in (of.x, of.dy, of.inner, of.d_inner))
        x, dy, inner, d_inner = some
        alone = products(
            native, weight, Inputs(x, dy, of.lora_B, inner, of.lora_A, d_inner), r > 0, ((0, stop - start),)
        )
        for whole, part in zip(together, alone, strict=True):
            assert torch.equal(whole[:, start:stop], part)


@pytest.mark.parametrize("name", FORMATS)
def test_few_columns_of_an_input_gradient_have_the_order_of_many(native: NativeLinear, level: str, name: str) -> None:
    weight, of = block_of(name, 600, 1088), inputs_for(600, 1088, 20)
    native.input_gradient(weight, of.dy, whole := torch.empty_like(of.x), True)
    for n in (1, 2, 3, 4):
        # AMX's few columns have it where the numbers of columns must not show
        for segments in [((0, n),)] if level == AMX else [(), ((0, n),)]:
            native.input_gradient(weight, of.dy[:, :n], few := torch.empty(1088, n), True, segments=segments)
            assert torch.equal(few, whole[:, :n])


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("n", [1, 4, 5, 40])
@pytest.mark.parametrize("segmented", [False, True])
def test_packing_inputs_changes_no_bit(native: NativeLinear, name: str, n: int, segmented: bool) -> None:
    k = columns_of(name, 333)
    weight, of = block_of(name, 70, k), inputs_for(70, k, n)
    segments = ((0, n),) if segmented else ()
    native.forward(weight, native.packed(of.x, segments), found := torch.empty(70, n), segments=segments)
    native.forward(weight, of.x, expected := torch.empty(70, n), segments=segments)
    assert torch.equal(found, expected)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("offset", [4, 12, 36])
def test_weights_at_any_address(native: NativeLinear, name: str, offset: int) -> None:
    """The bytes around codes and scales are all ones, of which scales are NaN: reading them would show."""
    for rows, k, n in ((13, 37, 17), (5, 19, 1), (3, 101, 2)):
        k = columns_of(name, k)
        weight, of = block_of(name, rows, k), inputs_for(rows, k, n)
        moved = products(native, placed(weight, offset), of, False)
        for found, expected in zip(moved, products(native, weight, of, False), strict=True):
            assert torch.equal(found, expected)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("n", [2, 5])
def test_writes_only_where_it_should_and_reads_rows_apart(native: NativeLinear, name: str, n: int) -> None:
    k = columns_of(name, 45)
    weight, of = block_of(name, 13, k), inputs_for(13, k, n)
    native.forward(weight, of.x, out := torch.empty(13, n))
    around, expected = torch.full((15, 9), 7.0), torch.full((15, 9), 7.0)
    native.forward(weight, of.x, around[1:14, 2 : 2 + n])
    expected[1:14, 2 : 2 + n] = out
    assert torch.equal(around, expected)
    wide = torch.randn(k, 9)
    wide[:, 2 : 2 + n] = of.x
    native.forward(weight, wide[:, 2 : 2 + n], again := torch.empty(13, n))
    assert torch.equal(again, out)
    native.input_gradient(weight, of.dy, dx := torch.empty(k, n), True)
    around, expected = torch.full((k + 2, 9), 7.0), torch.full((k + 2, 9), 7.0)
    native.input_gradient(weight, of.dy, around[1 : k + 1, 2 : 2 + n], True)
    expected[1 : k + 1, 2 : 2 + n] = dx
    assert torch.equal(around, expected)


class _Foreign(Int8Rows):
    name = "somebody's"


@pytest.mark.parametrize("n", [1, 20])
def test_a_format_that_the_library_does_not_know_is_decoded(
    native: NativeLinear, n: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lema_cuda.linear._DECODED_NUMBERS", 1)
    known, of = block_of("int8", 250, 70), inputs_for(250, 70, n)
    check(native, QuantizedBlock(_Foreign(), known.shape, known.parts), of, True)


def test_what_it_would_misread_is_refused(native: NativeLinear) -> None:
    weight, of = block_of("int4-32", 5, 6), inputs_for(5, 6, 7)
    codes, scales = weight.parts
    for parts in (
        (codes[:, :2], scales),
        (codes, scales.float()),
        (codes.t().contiguous().t(), scales),
        (codes[:4], scales),
    ):
        wrong = QuantizedBlock(weight.format, weight.shape, parts)
        with pytest.raises(PluginError, match=r"of a weight in int4-32 there is .*, expected contiguous torch\."):
            native.forward(wrong, of.x, torch.empty(5, 7))
        with pytest.raises(PluginError, match="of a weight in int4-32"):
            native.input_gradient(wrong, of.dy, torch.empty(6, 7), True)


def test_the_library_refuses_what_is_wrong_before_it_computes(native: NativeLinear) -> None:
    library = open_library()
    numbers, scratch = (ctypes.c_float * 64)(), (ctypes.c_char * 1_000_000)()

    def forward(**wrong: int) -> int:
        product = _Product(rows=2, k=3, n=4, right_stride=4, out_stride=4, threads=1, dtype=3)
        for name in ("weight", "scales", "right", "out"):
            setattr(product, name, ctypes.addressof(numbers))
        product.scratch, product.scratch_bytes = ctypes.addressof(scratch), len(scratch)
        for name, value in wrong.items():
            setattr(product, name, value)
        product.scratch_bytes = wrong.get("spare", 0) + library.lema_linear_scratch_bytes(ctypes.byref(product))
        return library.lema_linear(ctypes.byref(product))

    for dtype in range(3, 8):
        for n in (1, 4):
            assert [forward(dtype=dtype, n=n), forward(dtype=dtype, n=n, spare=-1)] == [0, 2]
    assert [
        forward(compute=1),
        forward(compute=1, spare=-1),
        forward(compute=1, n=9, out_stride=9, right_stride=9),
    ] == [0, 2, 0]
    for wrong in (
        {"dtype": 8},
        {"dtype": -1},
        {"compute": 2},
        {"compute": 1, "dtype": 4},
        {"compute": 1, "dtype": 0},
        {"compute": 1, "transposed": 1},
        {"compute": 1, "accumulate": 1},
        {"compute": 1, "k": (1 << 17) + 1},
    ):
        assert forward(**wrong) == 1, wrong
