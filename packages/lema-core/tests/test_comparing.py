"""Comparisons that name what differs."""

from __future__ import annotations

import math

import pytest
import torch

from lema_core.testing.comparing import assert_all_close, assert_close, assert_equal, relative

ONE = torch.tensor([3.0, 4.0])
NEAR = torch.tensor([3.0, 4.0 + 5e-4])


def test_relative_differences() -> None:
    assert relative(ONE, ONE) == 0 and relative(NEAR, ONE) == pytest.approx(1e-4, rel=1e-2)
    assert relative(torch.zeros(2), torch.zeros(2)) == 0
    assert relative(ONE, torch.zeros(2)) == math.inf and relative(torch.zeros(2), ONE) == 1
    with pytest.raises(AssertionError, match=r"shape \[2\] expected, \[1\] found"):
        relative(ONE[:1], ONE)


def test_what_differs_is_named() -> None:
    assert_close("a", NEAR, ONE, 2e-4)
    with pytest.raises(AssertionError, match=r"a: relative difference 1\.00e-04 by norm, at most 1e-05 expected"):
        assert_close("a", NEAR, ONE)
    with pytest.raises(AssertionError, match="a: relative difference nan"):
        assert_close("a", ONE * math.nan, ONE)
    assert_all_close("step", {"a": NEAR, "b": ONE}, {"a": ONE, "b": ONE}, 2e-4)
    with pytest.raises(AssertionError, match=r"step: 2 of 3 differ .* the worst: c 1\.00e\+00, a 1\.00e-04$"):
        assert_all_close("step", {"a": NEAR, "b": ONE, "c": -ONE + ONE}, {"a": ONE, "b": ONE, "c": ONE})
    assert_equal("step", {"a": ONE}, {"a": ONE.clone()})
    with pytest.raises(AssertionError, match=r"step: 1 of 1 differ, relative by norm: a 1\.0e-04"):
        assert_equal("step", {"a": NEAR}, {"a": ONE})


@pytest.mark.parametrize("compare", [assert_all_close, assert_equal])
def test_names_must_be_the_same(compare) -> None:
    with pytest.raises(AssertionError, match=r"step: \['b'\] missing, \['c'\] too many"):
        compare("step", {"a": ONE, "c": ONE}, {"a": ONE, "b": ONE})


def test_a_tensor_that_is_not_a_number_differs_from_itself() -> None:
    with pytest.raises(AssertionError, match="1 of 1 differ"):
        assert_equal("step", {"a": ONE * math.nan}, {"a": ONE * math.nan})
