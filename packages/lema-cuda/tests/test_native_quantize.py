"""Native packing of weights: what comes back, what is refused, and nothing beside.

That the bytes are those of the codecs is tested where both are installed.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lema_core.errors import PluginError
from lema_core.quantization.formats import NF4_BLOCK, NF4_VALUES, WireFormat, wire_formats
from lema_core.testing.quantized_weights import FORMATS
from lema_cuda.quantize import NativeQuantize

DTYPES = (torch.float32, torch.float16, torch.bfloat16)


@pytest.fixture(autouse=True)
def _native_library(native: object) -> None:
    """Skips where there is none."""


def empty_parts(form: WireFormat, rows: int, k: int) -> tuple[Tensor, ...]:
    return tuple(torch.full(part.shape, 77, dtype=torch.uint8).to(part.dtype) for part in form.parts((rows, k)))


def packed(name: str, weight: Tensor) -> tuple[Tensor, ...]:
    parts = empty_parts(wire_formats()[name], *weight.shape)
    assert NativeQuantize()(name, weight, parts)
    return parts


def there_and_back(name: str, weight: Tensor) -> Tensor:
    wire_formats()[name].decode(packed(name, weight), out := torch.empty(weight.shape))
    return out


def normal(rows: int, k: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(rows, k, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_int8_is_off_by_half_a_scale(dtype: torch.dtype) -> None:
    for rows, k in ((1, 1), (3, 7), (5, 8), (9, 301)):
        weight = normal(rows, k, dtype)
        codes, scale = packed("int8", weight)
        wide = weight.float()
        step = wide.abs().amax(dim=1) / 127
        assert torch.equal(scale, step)
        assert torch.equal(codes, (wide / step[:, None]).round().to(torch.int8))
        assert (codes.abs().amax(dim=1) == 127).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["int4-32", "int4-64", "int4-128"])
def test_int4_is_off_by_half_a_scale_but_for_what_is_clipped(name: str, dtype: torch.dtype) -> None:
    """Clipped are the group's largest number, a little, and those nearly as large of the other sign."""
    group = int(name.split("-")[1])
    for rows, k in ((1, 1), (2, 2), (4, 31), (3, 33), (5, 256), (2, 301)):
        weight = normal(rows, k, dtype).float()
        back = there_and_back(name, weight.to(dtype))
        for start in range(0, k, group):
            some, found = weight[:, start : start + group], back[:, start : start + group]
            largest = some.abs().amax(dim=1, keepdim=True)
            # in units of a scale, which bf16 rounds
            off = (found - some).abs() / (largest / 8)
            assert (off <= 1.6).all()
            peak = some.gather(1, some.abs().argmax(dim=1, keepdim=True))
            assert (off[(some * peak > 0) & (some.abs() < 0.9 * largest)] <= 0.52).all()
            assert (off[some.abs() < 0.8 * largest] <= 0.52).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_nf4_is_the_nearest_value(dtype: torch.dtype) -> None:
    weight = normal(7, 3 * NF4_BLOCK, dtype).float()
    _, absmax = packed("nf4", weight.to(dtype))
    blocks = weight.unflatten(1, (-1, NF4_BLOCK))
    assert torch.equal(absmax, blocks.abs().amax(dim=2))
    nearest = (blocks[..., None] / absmax[..., None, None] - torch.tensor(NF4_VALUES)).abs().amin(dim=-1)
    back = there_and_back("nf4", weight.to(dtype)).unflatten(1, (-1, NF4_BLOCK))
    torch.testing.assert_close((back - blocks).abs() / absmax[..., None], nearest, rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", FORMATS)
def test_zeros_come_back_as_zeros_and_codes_as_themselves(name: str) -> None:
    weight = normal(4, 128)
    weight[1] = 0
    weight[2] = 1e-39
    weight[3] *= 3e38 / weight[3].abs().max()
    back = there_and_back(name, weight)
    assert torch.equal(back[1], torch.zeros(128))
    assert back.isfinite().all()
    if name != "nf4":  # which gives up below 1e-38
        assert (back[2] > 0).all()
    if not name.startswith("int4"):  # whose scales are tried, and rounded, anew
        again = back[[0, 3]]
        assert torch.equal(there_and_back(name, again), again)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("value", [torch.inf, -torch.inf, torch.nan])
def test_what_is_not_finite_is_reported(name: str, dtype: torch.dtype, value: float) -> None:
    for column in (0, 8, 63, 127):
        weight = normal(3, 128, dtype)
        weight[2, column] = value
        assert not NativeQuantize()(name, weight, empty_parts(wire_formats()[name], 3, 128))


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_apart_and_nothing_beside(name: str, dtype: torch.dtype) -> None:
    """Rows of a larger weight, at any address, into rows of larger parts: the same bytes, and none around them."""
    form = wire_formats()[name]
    for k in (64, 192) if name == "nf4" else (1, 5, 33, 64, 95, 301):
        weight = normal(6, k, dtype)
        whole = packed(name, weight)
        parts = empty_parts(form, 6, k)
        before = tuple(part.clone() for part in parts)
        assert NativeQuantize()(name, weight[1:4], tuple(part[1:4] for part in parts))
        for part, right, old in zip(parts, whole, before, strict=True):
            assert torch.equal(part[1:4], right[1:4])
            assert torch.equal(part[[0, 4, 5]], old[[0, 4, 5]])


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_errors_of_columns(name: str, dtype: torch.dtype) -> None:
    """Added to what is there, in fp64, of numbers of any size."""
    form = wire_formats()[name]
    for rows, k in ((1, 64), (70, 192)) if name == "nf4" else ((1, 1), (5, 7), (63, 8), (130, 301)):
        weight = normal(rows, k, dtype)
        if dtype != torch.float16:
            weight[:, ::3] *= 1e-20
            weight[:, 1::3] *= 1e20
        parts = packed(name, weight)
        form.decode(parts, decoded := torch.empty(rows, k))
        found = [torch.full((k,), 3.0, dtype=torch.float64) for _ in range(2)]
        before = [part.clone() for part in parts]
        NativeQuantize().add_errors(name, weight, parts, *found)
        expected = [3 + numbers.double().square().sum(0) for numbers in (weight, decoded - weight.float())]
        for sums, right in zip(found, expected, strict=True):
            torch.testing.assert_close(sums, right, rtol=1e-12, atol=0)
        assert all(map(torch.equal, parts, before))


def test_sums_that_fit_no_column_are_refused() -> None:
    weight = normal(4, 64)
    sums = torch.zeros(64, dtype=torch.float64)
    for wrong in (sums[:63], sums.float(), torch.zeros(128, dtype=torch.float64)[::2]):
        with pytest.raises(PluginError, match="sums for 64 columns have to be"):
            NativeQuantize().add_errors("int8", weight, packed("int8", weight), sums, wrong)


def test_what_it_would_misread_is_refused() -> None:
    quantize, weight = NativeQuantize(), normal(4, 64)
    codes, scale = empty_parts(wire_formats()["int8"], 4, 64)
    for wrong in (
        ("nf4", normal(4, 65), (codes, scale)),
        ("int8", weight.double(), (codes, scale)),
        ("int8", weight.t(), (codes, scale)),
        ("int8", weight, (codes[:3], scale)),
        ("int8", weight, (codes, scale.double())),
        ("int8", weight, (codes.t().contiguous().t(), scale)),
        ("int4-32", weight, (codes, scale)),
    ):
        with pytest.raises(PluginError, match=r"a weight \[.*\] cannot become .*: "):
            quantize(*wrong)
