"""Codes of exp_avg_sq against their definition, and at the ends of fp32."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lema_quant.blockwise import BLOCK, BlockwiseCodec

CODEC = BlockwiseCodec("exp_avg_sq")
#: of a block's range in powers of two: the largest error of a number, relative, where steps are a quarter too long
ERROR = 1.25 / 252


def back(values: Tensor) -> Tensor:
    encoded, found = torch.empty(CODEC.nbytes(len(values)), dtype=torch.uint8), torch.empty_like(values)
    CODEC.encode(values, encoded)
    CODEC.decode(encoded, found)
    return found


@pytest.mark.parametrize("powers", [0.01, 1, 3.9, 10, 20, 39.9])
def test_the_error_follows_from_the_range(powers: float) -> None:
    random = torch.Generator().manual_seed(0)
    values = torch.pow(2.0, -powers * torch.rand(BLOCK * 100, generator=random, dtype=torch.float64)).float()
    error = ((back(values).double() - values) / values).abs().max()
    assert 0.5 * ERROR * powers < error <= 1.01 * ERROR * powers


@settings(max_examples=100, deadline=None)
@given(st.lists(st.floats(0, 2.0**126, width=32), min_size=1, max_size=2 * BLOCK))
def test_nothing_above_zero_is_lost(numbers: list[float]) -> None:
    values = torch.tensor(numbers)
    found = back(values)
    assert found[values == 0].eq(0).all() and found[values > 0].gt(0).all() and found.isfinite().all()
    assert (found >= 0.8 * values).all()
    blocks = torch.nn.functional.pad(values, (0, -len(values) % BLOCK)).view(-1, BLOCK)
    floor = (blocks.amax(1, keepdim=True) * 2.0**-39).expand_as(blocks).reshape(-1)[: len(values)]
    assert (found <= torch.maximum(1.2 * values, floor).clamp(min=2e-42)).all()


def test_a_block_of_one_number_is_nearly_exact() -> None:
    values = torch.full((BLOCK,), 0.123456)
    assert ((back(values) - values).abs() <= 1e-4 * values).all()


def test_one_outlier_of_every_size_among_small_numbers() -> None:
    small = 1e-12 * (1 + torch.rand(BLOCK, generator=torch.Generator().manual_seed(1)))
    for power in range(-11, 38):
        values = small.clone()
        values[77] = 10.0**power
        found = back(values)
        assert (found >= 0.8 * values).all() and found[77] <= 1.2 * values[77]
        if power < 0:
            assert (found <= 1.2 * values).all()


def test_rounding_is_right_on_average() -> None:
    """A thousand blocks with other neighbours hold the same numbers, far less than a step from a code."""
    random = torch.Generator().manual_seed(2)
    blocks = torch.rand(1000, BLOCK, generator=random) + 1e-3
    probes = torch.tensor([0.9, 0.777, 0.1003, 0.0123, 0.002])
    blocks[:, : len(probes)] = probes
    blocks[:, len(probes)], blocks[:, len(probes) + 1] = 1e-3, 1.0
    found = back(blocks.view(-1)).view(1000, BLOCK)[:, : len(probes)].double()
    steps = found.amax(0) - found.amin(0)
    assert (steps < 0.05 * probes).all() and (steps > 0).all()
    assert ((found.mean(0) - probes).abs() < 0.08 * steps).all()  # five standard errors


@pytest.mark.parametrize("number", [-1.0, -1e-45, 2.0**127, float("inf"), float("nan"), -float("nan")])
def test_what_has_no_root_spoils_its_block_and_no_other(number: float) -> None:
    values = torch.rand(3 * BLOCK)
    values[BLOCK + 5] = number
    found = back(values).view(3, BLOCK)
    assert found[1].isnan().all() and found[0].isfinite().all() and found[2].isfinite().all()


def test_negative_zero_is_zero() -> None:
    assert back(torch.tensor([-0.0, 1.0])).tolist() == [0.0, 1.0]
