"""The codecs of ``custom`` against formulas written down once more, against theory, and on hostile numbers."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lema_core.quantization.codec import WeightCodec
from lema_core.quantization.formats import NF4_VALUES
from lema_core.quantization.report import ErrorMeter, TensorReport
from lema_core.testing.comparing import relative
from lema_quant.custom.int4 import DIVISORS, Int4Codec
from lema_quant.custom.int8 import Int8Codec
from lema_quant.custom.nf4 import NF4Codec

CODECS = {
    "int8": Int8Codec,
    "int4-32": partial(Int4Codec, 32),
    "int4-64": partial(Int4Codec, 64),
    "int4-128": partial(Int4Codec, 128),
    "nf4": NF4Codec,
}


def encode(codec: WeightCodec, weight: Tensor) -> tuple[Tensor, ...]:
    parts = tuple(torch.zeros(part.shape, dtype=part.dtype) for part in codec.format.parts(tuple(weight.shape)))
    codec.encode(weight, parts)
    return parts


def back(codec: WeightCodec, weight: Tensor) -> Tensor:
    out = torch.empty(weight.shape)
    codec.format.decode(encode(codec, weight), out)
    return out


def normal(rows: int, columns: int, seed: int = 0) -> Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))


def expected_error_of_int8(columns: int) -> float:
    """A step is absmax / 127, the error's variance step^2 / 12; E[absmax^2] of so many normal numbers, by their
    distribution function."""
    sizes = torch.linspace(0, 8, 80_001, dtype=torch.float64)
    below = torch.erf(sizes / math.sqrt(2)) ** columns
    mean_square = torch.trapezoid(2 * sizes * (1 - below), sizes).item()
    return math.sqrt(mean_square / 127**2 / 12)


def test_int8_loses_what_theory_says() -> None:
    for columns in (64, 1024):
        weight = normal(512, columns)
        assert relative(back(Int8Codec(), weight), weight) == pytest.approx(expected_error_of_int8(columns), rel=0.02)


def expected_error_of_nf4() -> float:
    """Numbers that are standard normal, 64 to a block: each is absmax times a number in [-1, 1], which goes to the
    nearest value. Drawn anew, and rounded by argmin."""
    drawn = torch.randn(20_000, 64, generator=torch.Generator().manual_seed(99), dtype=torch.float64)
    absmax = drawn.abs().amax(1, keepdim=True)
    values = torch.tensor(NF4_VALUES, dtype=torch.float64)
    rounded = values[(drawn / absmax)[..., None].sub(values).abs().argmin(-1)] * absmax
    return relative(rounded, drawn)


def test_four_bits_lose_what_theory_says() -> None:
    weight = normal(512, 1024)
    errors = {name: relative(back(make(), weight), weight) for name, make in CODECS.items()}
    assert errors["nf4"] == pytest.approx(expected_error_of_nf4(), rel=0.01)
    # The least that any 16 even steps can lose of normal numbers is 0.1074 (Max 1960, table II: 0.01154 of their
    # variance) with one scale for all; one for each group adapts to its largest number.
    assert errors["int4-32"] < errors["int4-64"] < errors["int4-128"] < 0.1074
    assert errors["int4-32"] == pytest.approx(0.0834, rel=0.02)
    assert errors["int4-128"] == pytest.approx(0.0990, rel=0.02)


def test_the_search_for_a_scale_is_worth_it() -> None:
    """Against the one scale with which the largest number is -8 exactly, and against the best of a fine grid."""
    numbers = normal(4000, 32)
    found = (back(Int4Codec(32), numbers) - numbers).square().sum(1)
    at_8 = _error_of_groups(numbers, -8.0)
    assert (found <= at_8 * 1.0001).all() and found.sum() < 0.95 * at_8.sum()
    grid = torch.stack([_error_of_groups(numbers, divisor) for divisor in torch.linspace(-10, -6, 81).tolist()])
    assert found.sum() < 1.07 * grid.amin(0).sum()


def _error_of_groups(numbers: Tensor, divisor: float) -> Tensor:
    return (_decoded_with(numbers, divisor) - numbers).square().sum(1)


def _decoded_with(numbers: Tensor, divisor: float) -> Tensor:
    largest = numbers.gather(1, numbers.abs().argmax(1, keepdim=True))
    scale = (largest / divisor).bfloat16().float()
    return (numbers / scale).round().clamp(-8, 7) * scale


def test_int4_is_one_of_its_two_formulas() -> None:
    numbers = normal(500, 64)
    found = back(Int4Codec(64), numbers)
    candidates = [_decoded_with(numbers, divisor) for divisor in DIVISORS]
    equal = torch.stack([(found == each).all(1) for each in candidates])
    assert equal.any(0).all()
    assert equal.all(1).logical_not().all(), "one divisor would do"


def test_the_largest_number_of_a_group_is_minus_eight_of_either_sign() -> None:
    weight = torch.zeros(2, 32)
    weight[0, 5], weight[1, 5] = 4.0, -4.0
    packed, scale = encode(Int4Codec(32), weight)
    assert scale.flatten().tolist() == [-0.5, 0.5] and packed[:, 2].tolist() == [0x08, 0x08]
    assert back(Int4Codec(32), weight).equal(weight)


def test_nibbles_lie_where_the_formats_say() -> None:
    weight = torch.zeros(1, 33)
    weight[0, :4] = torch.tensor([-8.0, 3.0, 7.0, -1.0])
    weight[0, 32] = -2.0
    packed, scale = encode(Int4Codec(32), weight)
    assert packed[0, :2].tolist() == [0 | 11 << 4, 15 | 7 << 4], "the even column's code in the lower half"
    assert packed.shape == (1, 17) and packed[0, 16].item() == 0, "the last code, -8 of a scale of 0.25, and a zero"
    assert scale[0].tolist() == [1.0, 0.25]
    absmax_first = torch.zeros(1, 64)
    absmax_first[0, 0], absmax_first[0, 1] = -2.0, 2.0
    packed, absmax = encode(NF4Codec(), absmax_first)
    assert packed[0, 0].item() == 0x0F and absmax.item() == 2.0, "the even column's code in the upper half"


def test_a_tie_goes_to_the_even_code() -> None:
    weight = torch.tensor([[127.0, 0.5, 1.5, 2.5, -0.5, -1.5]])
    codes, scale = encode(Int8Codec(), weight)
    assert codes.tolist() == [[127, 0, 2, 2, 0, -2]] and scale.item() == 1.0


def test_zeros_have_a_scale_of_zero() -> None:
    for name, make in CODECS.items():
        weight = torch.zeros(3, 128)
        assert not encode(make(), weight)[1].any(), name
        assert not back(make(), weight).any(), name


def test_an_outlier_column_is_reported() -> None:
    """One column at 200 among normal ones: its groups' other columns become zeros, which the norm of all hides."""
    weight = normal(64, 256)
    for name, make in CODECS.items():
        usual, spoilt = _report(make(), weight), weight.clone()
        spoilt[:, 100] = 200.0
        found = _report(make(), spoilt)
        assert usual.warning is None, name
        assert found.warning is not None and found.name in found.warning, name
        assert found.worst_column // 128 == 0 and found.worst_column_error > 0.4, name


def _report(codec: WeightCodec, weight: Tensor) -> TensorReport:
    meter = ErrorMeter(weight.shape[1])
    meter.add(codec.format, weight, encode(codec, weight))
    shape = tuple(weight.shape)
    return TensorReport.quantized("layers.0.weight", shape, 4 * weight.numel(), codec.format, "custom", meter)


finite = st.floats(width=32, allow_nan=False, allow_infinity=False)


@settings(max_examples=60, deadline=None)
@given(st.lists(finite, min_size=1, max_size=70), st.sampled_from(sorted(CODECS)))
def test_any_numbers(values: list[float], name: str) -> None:
    """A number is off by a share of the largest in its row, and no more than the smallest scale where all are tiny."""
    codec = CODECS[name]()
    if name == "nf4":
        values = (values * 64)[:64]
    weight = torch.tensor([values])
    found = back(codec, weight)
    assert found.isfinite().all()
    # of int4: -8 scales are the largest number, as bf16, and 7 are what is as large and of the other sign
    int4 = 1 / 8 + 7 / 8 * 2.0**-9, 2.0**-133
    share, smallest = {"int8": (0.5 / 127 * 1.001, 2.0**-149), "nf4": (0.153, 1.1e-38)}.get(name, int4)
    error = (found.double() - weight.double()).abs().max().item()
    assert error <= share * weight.double().abs().max().item() + smallest


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 9), st.integers(1, 200), st.sampled_from(sorted(CODECS)), st.integers(0, 5))
def test_any_shape(rows: int, columns: int, name: str, seed: int) -> None:
    """Each row comes back as it does alone."""
    codec = CODECS[name]()
    if codec.refuses((rows, columns)) is not None:
        assert name == "nf4" and columns % 64
        return
    weight = normal(rows, columns, seed)
    found = back(codec, weight)
    for row in range(rows):
        assert back(codec, weight[row : row + 1]).equal(found[row : row + 1])
