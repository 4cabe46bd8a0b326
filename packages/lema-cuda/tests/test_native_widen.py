"""Native widening against torch's: every bit pattern, every length and address, and what is refused."""

from __future__ import annotations

import pytest
import torch

from lema_core.errors import PluginError
from lema_cuda.library import open_library
from lema_cuda.widen import NativeWiden

FORMATS = [torch.float16, torch.bfloat16]


@pytest.fixture(autouse=True)
def _native_library(native: object) -> None:
    """Skips where there is none."""


def widen(source: torch.Tensor, target: torch.Tensor) -> None:
    NativeWiden()(source, target)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.int32)


@pytest.mark.parametrize("dtype", FORMATS)
def test_every_bit_pattern_is_widened_as_torch_does(dtype: torch.dtype) -> None:
    """NaN payloads included."""
    source = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16).view(dtype)
    target, expected = torch.empty(1 << 16), torch.empty(1 << 16)
    widen(source, target)
    expected.copy_(source)
    assert torch.equal(bits(target), bits(expected))


@pytest.mark.parametrize("dtype", FORMATS)
def test_every_number_survives_the_way_back(dtype: torch.dtype) -> None:
    """An oracle that is not torch's widening: fp32 holds every fp16 and bf16, so narrowing gives the same bits."""
    source = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16).view(dtype)
    source = source[source.isfinite() | source.isinf()]
    target = torch.empty(len(source))
    widen(source, target)
    assert torch.equal(target.to(dtype).view(torch.int16), source.view(torch.int16))


@pytest.mark.parametrize("dtype", FORMATS)
def test_any_length_and_address_and_nothing_beside(dtype: torch.dtype) -> None:
    source = torch.randn(100).to(dtype)
    for start in (0, 1, 3):
        for count in range(40):
            target = torch.full((60,), 7.0)
            widen(source[start : start + count], target[start : start + count])
            expected = torch.full((60,), 7.0)
            expected[start : start + count] = source[start : start + count].float()
            assert torch.equal(target, expected)


def test_an_odd_address() -> None:
    """A checkpoint aligns nothing; torch makes no such tensor, the library is asked itself."""
    raw = torch.randint(0, 256, (2 * 21 + 1,), dtype=torch.uint8)
    expected = raw[1:].clone().view(torch.bfloat16).float()
    target = torch.empty(21)
    assert open_library().lema_widen(raw.data_ptr() + 1, 2, 21, target.data_ptr()) == 0
    assert torch.equal(bits(target), bits(expected))


@pytest.mark.parametrize(
    ("source", "target"),
    [
        (torch.zeros(3), torch.zeros(3)),
        (torch.zeros(3, dtype=torch.bfloat16), torch.zeros(3, dtype=torch.float64)),
        (torch.zeros(3, dtype=torch.bfloat16), torch.zeros(4)),
        (torch.zeros(4, 2, dtype=torch.bfloat16)[:, 0], torch.zeros(4)),
        (torch.zeros(4, dtype=torch.bfloat16), torch.zeros(4, 2)[:, 0]),
        (torch.zeros(4, dtype=torch.bfloat16), torch.zeros(4, device="meta")),
    ],
)
def test_what_it_does_not_serve_is_refused(source: torch.Tensor, target: torch.Tensor) -> None:
    with pytest.raises(PluginError, match="expected contiguous fp16 or bf16 to fp32"):
        widen(source, target)


def test_the_library_refuses_what_makes_no_sense() -> None:
    numbers = torch.zeros(4)
    library = open_library()
    assert library.lema_widen(numbers.data_ptr(), 9, 1, numbers.data_ptr()) == 1
    assert library.lema_widen(numbers.data_ptr(), 2, -1, numbers.data_ptr()) == 1
