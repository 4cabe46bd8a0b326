"""Signed 8-bit codes against their definition, in fp64."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lema_quant.blockwise import BLOCK, BlockwiseCodec

CODEC = BlockwiseCodec("exp_avg")
#: what the codes of one block stand for, of an absmax of 1: [0, 1/127^4 ... 1]
GRID = (torch.arange(128, dtype=torch.float64) / 127) ** 4


def back(values: Tensor) -> Tensor:
    encoded, found = torch.empty(CODEC.nbytes(len(values)), dtype=torch.uint8), torch.empty_like(values)
    CODEC.encode(values, encoded)
    CODEC.decode(encoded, found)
    return found


def neighbours(values: Tensor) -> tuple[Tensor, Tensor]:
    """The codes' values below and above each size, of one block."""
    share = values.double().abs() / values.double().abs().max()
    upper = torch.searchsorted(GRID, share * (1 - 1e-6)).clamp(min=1)
    return GRID[upper - 1] * values.abs().max(), GRID[upper] * values.abs().max()


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.floats(-(2.0**100), 2.0**100, width=32), min_size=1, max_size=BLOCK),
    st.integers(-60, 0),
)
def test_a_number_goes_to_one_of_its_two_neighbours(numbers: list[float], exponent: int) -> None:
    values = torch.tensor(numbers) * 2.0**exponent
    if values.abs().max() < 1e-28:
        return
    below, above = neighbours(values)
    found = back(values)
    slack = 1e-5 * values.abs().max() * (values.abs() / values.abs().max()).double() + 1e-300
    size = found.double().abs()
    assert (((size - below).abs() <= slack + 1e-6 * below) | ((size - above).abs() <= slack + 1e-6 * above)).all()
    assert (found.sign() * values.sign() >= 0).all()
    assert not found[values == 0].any()


def test_all_codes_come_back() -> None:
    """Each code's value is encoded as that code: 127 on both sides, and zero."""
    values = torch.cat([-GRID.flip(0)[:-1], GRID]).float()[1:]
    encoded = torch.empty(CODEC.nbytes(len(values)), dtype=torch.uint8)
    CODEC.encode(values, encoded)
    assert encoded.view(torch.int8)[: len(values)].tolist() == list(range(-126, 128))


@pytest.mark.parametrize("size", [1e-25, 1e-8, 1.0, 1e30])
def test_the_largest_of_a_block_is_exact(size: float) -> None:
    values = size * torch.randn(BLOCK * 5, generator=torch.Generator().manual_seed(0))
    largest = values.view(5, BLOCK).abs().argmax(1, keepdim=True)
    found = back(values).view(5, BLOCK).gather(1, largest)
    assert found.equal(values.view(5, BLOCK).gather(1, largest))


def test_rounding_is_right_on_average() -> None:
    """A thousand blocks, each with other neighbours, hold the same numbers."""
    random = torch.Generator().manual_seed(1)
    blocks = torch.randn(1000, BLOCK, generator=random)
    probes = torch.tensor([0.9, 0.5, 0.11, 0.013, 1e-3, 1e-4, 1e-5, 1e-6])
    blocks[:, : len(probes)], blocks[:, len(probes)] = probes, 6.0
    found = back(blocks.view(-1)).view(1000, BLOCK)[:, : len(probes)].double()
    shares = neighbours(torch.cat([probes, torch.tensor([6.0])]))
    steps = (shares[1] - shares[0])[: len(probes)]
    assert ((found.mean(0) - probes).abs() < 0.08 * steps).all()  # five standard errors
    assert (found.std(0) > 0).all()


def test_it_is_as_precise_as_it_says() -> None:
    """Of numbers as spread as a bell curve: under 2 % of their root mean square, at worst 3.2 % of the largest."""
    values = torch.randn(BLOCK * 100, generator=torch.Generator().manual_seed(2))
    error = (back(values) - values).view(-1, BLOCK)
    assert error.square().mean().sqrt() < 0.02
    assert (error.abs() <= 0.032 * values.view(-1, BLOCK).abs().amax(1, keepdim=True)).all()


def test_tiny_numbers_come_back_tiny() -> None:
    assert back(torch.tensor([1e-40, -1e-44, 0.0])).abs().max() < 1e-37
