"""The native products against fp64 and the plain-torch kernel, bit for bit against themselves."""

from __future__ import annotations

import ctypes
import os
import signal
import threading

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from lema_core.errors import PluginError
from lema_core.ops.linear import Columns, LinearKernel
from lema_cuda.library import open_library
from lema_cuda.linear import NativeLinear, _Product
from lema_cuda.testing import AMX

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
    return (
        weight,
        torch.randn(k, n, generator=generator),
        torch.randn(rows, n, generator=generator),
    )


def stored_bytes(tensor: Tensor) -> bytes:
    return bytes(tensor.view(torch.uint8).flatten().tolist())


def products(
    kernel: NativeLinear | LinearKernel, weight: Tensor, x: Tensor, dy: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """out, dx, and dx added to x"""
    out, dx, sum_ = (
        torch.full_like(dy, torch.nan),
        torch.full_like(x, torch.nan),
        x.clone(),
    )
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


@settings(
    max_examples=60,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    st.integers(1, 230),
    st.integers(1, 300),
    st.integers(1, 40),
    st.sampled_from(DTYPES),
    st.integers(1, 3),
)
def test_any_shape(native: NativeLinear, rows: int, k: int, n: int, dtype: torch.dtype, threads: int) -> None:
    torch.set_num_threads(threads)
    check(native, *make(rows, k, n, dtype))


def test_inner_dimensions_that_are_computed_in_parts(native: NativeLinear) -> None:
    """8192 of the inner dimension, and the columns that 8 MB hold, are packed at once."""
    check(native, *make(8200, 9, 3, torch.bfloat16))
    check(native, *make(9, 8200, 300, torch.float16))
    check(native, *make(11, 8500, 2, torch.bfloat16))


def low_rank_of(rows: int, k: int, n: int, r: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """B [R, r], a [r, N], A [r, K], da [r, N]; the factors are parts of larger matrices, as stacked modules give."""
    generator = torch.Generator().manual_seed(7)
    lora_B, lora_A = (
        torch.randn(rows, r + 2, generator=generator),
        torch.randn(r + 2, k, generator=generator),
    )
    inner, d_inner = (
        torch.randn(r, n, generator=generator),
        torch.randn(r, n, generator=generator),
    )
    return lora_B[:, 1 : r + 1], inner, lora_A[1 : r + 1], d_inner


def products_with_update(
    kernel: NativeLinear | LinearKernel,
    weight: Tensor,
    x: Tensor,
    dy: Tensor,
    r: int,
    segments: tuple[Columns, ...] = (),
) -> tuple[Tensor, Tensor, Tensor]:
    """out, dx, and dx added to x"""
    lora_B, inner, lora_A, d_inner = low_rank_of(*weight.shape, x.shape[1], r)
    out, dx, sum_ = (
        torch.full_like(dy, torch.nan),
        torch.full_like(x, torch.nan),
        x.clone(),
    )
    kernel.forward(weight, kernel.packed(x, segments), out, (lora_B, inner, 0.5), segments)
    kernel.input_gradient(weight, dy, dx, True, (lora_A, d_inner), segments)
    kernel.input_gradient(weight, dy, sum_, False, (lora_A, d_inner), segments)
    return out, dx, sum_


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("r", [1, 3, 8, 16, 64, 300])
@pytest.mark.parametrize(
    ("rows", "k", "n"),
    [(1, 1, 1), (13, 257, 3), (200, 131, 4), (193, 517, 21), (400, 300, 64)],
)
def test_the_low_rank_term(native: NativeLinear, rows: int, k: int, n: int, r: int, dtype: torch.dtype) -> None:
    """Beside fp64 and the plain-torch kernel: rows that are no multiple of a tile, odd inputs, ranks beyond a piece."""
    weight, x, dy = make(rows, k, n, dtype)
    lora_B, inner, lora_A, d_inner = (t.double() for t in low_rank_of(rows, k, n, r))
    wide = weight.double()
    out, dx = (
        wide @ x.double() + 0.5 * lora_B @ inner,
        wide.t() @ dy.double() + lora_A.t() @ d_inner,
    )
    scale = (k + r) ** 0.5 * (rows * n) ** 0.5, (rows + r) ** 0.5 * (k * n) ** 0.5
    found = products_with_update(native, weight, x, dy, r)
    plain = products_with_update(LinearKernel(), weight, x, dy, r)
    for each, twin, right, size in zip(found, plain, (out, dx, x + dx), (*scale, scale[1]), strict=True):
        assert (each - right).norm() <= TOLERANCE * max(right.norm(), size)
        assert (each - twin).norm() <= TOLERANCE * max(right.norm(), size)


def test_a_low_rank_term_alone_and_a_factor_stored_by_columns(
    native: NativeLinear,
) -> None:
    lora_B, inner, _, _ = low_rank_of(20, 5, 7, 3)
    native.forward(
        torch.empty(20, 0),
        torch.empty(0, 7),
        out := torch.full((20, 7), torch.nan),
        (lora_B, inner, 2.0),
    )
    torch.testing.assert_close(out, 2 * lora_B @ inner)
    turned = lora_B.t().contiguous().t()
    native.forward(
        torch.empty(20, 0),
        torch.empty(0, 7),
        again := torch.empty(20, 7),
        (turned, inner, 2.0),
    )
    assert torch.equal(again, out)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("lengths", [(1, 2, 3, 4, 5, 6, 7, 8, 9), (4,), (1, 1), (2, 33, 1), (16, 1000, 3)])
@pytest.mark.parametrize("r", [0, 3, 300])
def test_micro_batches_together_equal_micro_batches_apart(
    native: NativeLinear, lengths: tuple[int, ...], r: int, dtype: torch.dtype
) -> None:
    """Forward, input gradient and its sum, by two and by one thread."""
    n = sum(lengths)
    weight, x, dy = make(50, 300, n, dtype)
    lora_B, inner, lora_A, d_inner = low_rank_of(50, 300, n, max(r, 1))
    torch.set_num_threads(2)

    def compute(columns: slice, segments: tuple[Columns, ...], pack: bool) -> tuple[Tensor, Tensor, Tensor]:
        each_x, each_dy, a, da = (t[:, columns].contiguous() for t in (x, dy, inner, d_inner))
        given = native.packed(each_x, segments) if pack else each_x
        out, dx, sum_ = (
            torch.empty_like(each_dy),
            torch.empty_like(each_x),
            each_x.clone(),
        )
        update_dx = (lora_A, da) if r else None
        native.forward(weight, given, out, (lora_B, a, 0.5) if r else None, segments)
        native.input_gradient(weight, each_dy, dx, True, update_dx, segments)
        native.input_gradient(weight, each_dy, sum_, False, update_dx, segments)
        return out, dx, sum_

    stops = [sum(lengths[: i + 1]) for i in range(len(lengths))]
    segments = tuple((stop - length, stop) for stop, length in zip(stops, lengths, strict=True))
    together = compute(slice(None), segments, pack=True)
    torch.set_num_threads(1)
    for start, stop in segments:
        for pack in (True, False):
            apart = compute(slice(start, stop), ((0, stop - start),), pack)
            for whole, part in zip(together, apart, strict=True):
                assert torch.equal(whole[:, start:stop], part)


@pytest.mark.parametrize("n", [1, 4, 5, 40])
@pytest.mark.parametrize("segmented", [False, True])
def test_packing_changes_no_bit_and_serves_several_products(native: NativeLinear, n: int, segmented: bool) -> None:
    weight, x, _ = make(120, 700, n, torch.bfloat16)
    segments = ((0, n),) if segmented else ()
    first, second = native.packed(x, segments), native.packed(-x, segments)
    for packed, sign in ((first, 1), (second, -1), (first, 1)):
        for rows in (slice(0, 50), slice(50, 120)):
            native.forward(
                weight[rows],
                packed,
                found := torch.empty(len(weight[rows]), n),
                segments=segments,
            )
            native.forward(
                weight[rows],
                sign * x,
                expected := torch.empty_like(found),
                segments=segments,
            )
            assert torch.equal(found, expected)
    if n <= 4 and not segmented:
        assert first is x, "few columns are taken as they are"
        return
    held = {first.address, second.address}
    del first, second, packed
    free = {piece.data_ptr() for piece in native._free._pieces}
    again = native.packed(x, segments), native.packed(x, segments)
    assert held < free and {each.address for each in again} < free, "memory is used again once nobody holds it"


def test_inputs_too_large_to_pack_at_once_give_the_same_bits(
    native: NativeLinear, monkeypatch: pytest.MonkeyPatch
) -> None:
    weight, x, _ = make(30, 300, 40, torch.bfloat16)
    native.forward(weight, native.packed(x), expected := torch.empty(30, 40))
    monkeypatch.setattr("lema_cuda.linear._MOST_PACKED_BYTES", 1000)
    assert native.packed(x) is x
    native.forward(weight, x, found := torch.empty(30, 40))
    assert torch.equal(found, expected)


@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_few_columns_of_an_input_gradient_have_the_order_of_many(native: NativeLinear, level: str, n: int) -> None:
    weight, x, dy = make(600, 1100, 20, torch.bfloat16)
    native.input_gradient(weight, dy, whole := torch.empty_like(x), True)
    # AMX's few columns have it where the numbers of columns must not show
    for segments in [((0, n),)] if level == AMX else [(), ((0, n),)]:
        native.input_gradient(weight, dy[:, :n], few := torch.empty(1100, n), True, segments=segments)
        assert torch.equal(few, whole[:, :n])


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
        for found, expected in zip(
            products(native, placed, x, dy),
            products(native, weight, x, dy),
            strict=True,
        ):
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


@pytest.mark.parametrize(
    ("rows", "k", "n"),
    [(1300, 300, 33), (700, 600, 3), (600, 600, 1), (64, 2000, 160), (16, 300, 200)],
)
@pytest.mark.parametrize("r", [0, 16])
def test_same_bits_every_time_and_with_any_number_of_threads(
    native: NativeLinear, rows: int, k: int, n: int, r: int
) -> None:
    given = make(rows, k, n, torch.bfloat16)

    def compute() -> tuple[Tensor, ...]:
        return products_with_update(native, *given, r) if r else products(native, *given)

    torch.set_num_threads(1)
    expected = compute()
    for threads in (1, 2, 3, 2, 8):
        torch.set_num_threads(threads)
        for found, right in zip(compute(), expected, strict=True):
            assert torch.equal(found, right)


def test_rows_of_a_product_do_not_depend_on_the_other_rows(
    native: NativeLinear,
) -> None:
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
def test_infinities_and_nan_stay_in_their_row_and_column(native: NativeLinear, level: str, dtype: torch.dtype) -> None:
    weight, x, dy = make(20, 30, 18, dtype)
    weight[3, 4] = torch.inf
    x[7, 2] = torch.nan
    for found, expected in zip(
        products(native, weight, x, dy),
        products(LinearKernel(), weight, x, dy),
        strict=True,
    ):
        assert torch.equal(found.isfinite(), expected.isfinite())
        # an infinity has terms that are not
        assert level == AMX or torch.equal(found.isnan(), expected.isnan())


@pytest.mark.parametrize("dtype", (torch.float16, torch.bfloat16))
def test_every_stored_number_is_widened_exactly(native: NativeLinear, level: str, dtype: torch.dtype) -> None:
    """All 65536 patterns times one, subnormals included, by each of the ways in."""
    weight = torch.arange(1 << 16, dtype=torch.int32).to(torch.uint16).view(dtype)
    if level == AMX:  # which knows neither infinity nor fp32's subnormal numbers
        weight = weight[weight.isnan() | (weight.isfinite() & ((weight == 0) | (weight.float().abs() >= 2.0**-126)))]
    for n in (1, 16):
        one = torch.ones(1, n)
        native.forward(weight.view(-1, 1), one, out := torch.empty(len(weight), n))
        native.input_gradient(weight.view(1, -1), one, dx := torch.empty(len(weight), n), True)
        for found in (out, dx):
            assert torch.equal(
                found.nan_to_num(7.0),
                weight.float().nan_to_num(7.0).view(-1, 1).expand(-1, n),
            )


def test_empty_products(native: NativeLinear) -> None:
    native.forward(torch.empty(0, 3), torch.randn(3, 4), torch.empty(0, 4))
    native.forward(torch.randn(2, 3), torch.empty(3, 0), torch.empty(2, 0))
    native.forward(torch.empty(2, 0), torch.empty(0, 4), out := torch.full((2, 4), torch.nan))
    assert not out.any()


def test_what_it_would_misread_is_refused(native: NativeLinear) -> None:
    weight, x, dy = make(5, 6, 7, torch.bfloat16)
    with pytest.raises(
        PluginError,
        match=r"the weight is torch.int8 .*, expected contiguous fp32, fp16 or bf16",
    ):
        native.forward(weight.to(torch.int8), x, dy)
    with pytest.raises(PluginError, match="contiguous"):
        native.forward(weight.t(), dy[:5], torch.empty(6, 7))
    for wrong in (x.bfloat16(), x[:5], torch.randn(7, 6).t(), x[:1].expand(6, 7)):
        with pytest.raises(PluginError, match=r"expected fp32 \[6, 7\] with contiguous rows"):
            native.forward(weight, wrong, dy)
    inner = torch.randn(2, 7)
    with pytest.raises(
        PluginError,
        match=r"a low-rank factor is torch.float32 \[5, 3\] .*, expected fp32 \[5, 2\]",
    ):
        native.forward(weight, x, dy, (torch.randn(5, 3), inner, 1.0))
    with pytest.raises(PluginError, match=r"expected fp32 \[2, 7\] with contiguous rows"):
        native.forward(weight, x, dy, (torch.randn(5, 2), inner[:, :6], 1.0))
    with pytest.raises(
        PluginError,
        match=r"packed as \[6, 7\] in segments, expected \[6, 7\] without segments",
    ):
        native.forward(weight, native.packed(x, ((0, 7),)), dy)


def test_the_library_refuses_what_is_wrong_before_it_computes(
    native: NativeLinear,
) -> None:
    library = open_library()
    numbers, scratch = (ctypes.c_float * 64)(), (ctypes.c_char * 1_000_000)()

    def forward(**wrong: int) -> int:
        product = _Product(
            rows=2,
            k=3,
            n=4,
            right_stride=4,
            out_stride=4,
            inner_stride=4,
            rank=1,
            threads=1,
        )
        for name in ("weight", "right", "out", "factor", "inner"):
            setattr(product, name, ctypes.addressof(numbers))
        product.scratch, product.scratch_bytes = ctypes.addressof(scratch), len(scratch)
        for name, value in wrong.items():
            setattr(product, name, value)
        product.scratch_bytes = wrong.get("spare", 0) + library.lema_linear_scratch_bytes(ctypes.byref(product))
        return library.lema_linear(ctypes.byref(product))

    assert [forward(), forward(spare=-1), forward(transposed=1)] == [0, 2, 0]
    for wrong in (
        {"dtype": 8},
        {"rows": -1},
        {"right_stride": 3},
        {"out_stride": 3},
        {"inner_stride": 3},
        {"rank": -1},
    ):
        assert forward(**wrong) == 1, wrong
    assert forward(right_stride=0, transposed=1) == 1, "packed inputs serve the forward product alone"
    assert forward(right_stride=0, right=ctypes.addressof(numbers) + 4, apart=1) == 1, "packed memory is aligned"
    assert forward(right_stride=0) == 1, "few columns are taken as they are"
    assert library.lema_linear_packed_bytes(3, 4, 0) == 0 < library.lema_linear_packed_bytes(3, 4, 1)
    assert library.lema_linear_pack(numbers, 4, 3, 4, numbers, 0, 1) == 1
    assert library.lema_linear_pack(numbers, 3, 3, 4, numbers, 0, 1) == 1
