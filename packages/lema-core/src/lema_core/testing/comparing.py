"""Comparisons that say which tensor differs, and by how much."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

#: relative, by norm: fp32 rounding of another order of sums, and nothing else
CLOSE = 1e-5


def relative(found: Tensor, expected: Tensor) -> float:
    """Norm of the difference over norm of ``expected``; 0 where both are zero, inf where only ``expected`` is."""
    found, expected = found.detach().double(), expected.detach().double()
    assert found.shape == expected.shape, f"shape {list(expected.shape)} expected, {list(found.shape)} found"
    difference, size = (found - expected).norm().item(), expected.norm().item()
    if difference == 0:
        return 0.0
    return difference / size if size else float("inf")


def assert_close(what: str, found: Tensor, expected: Tensor, most: float = CLOSE) -> None:
    """Raises AssertionError with the relative difference where it is above ``most``, or not a number."""
    error = relative(found, expected)
    assert error <= most, f"{what}: relative difference {error:.2e} by norm, at most {most:.0e} expected"


def assert_all_close(
    what: str, found: Mapping[str, Tensor], expected: Mapping[str, Tensor], most: float = CLOSE
) -> None:
    """Tensor by tensor; names the worst ones."""
    _assert_same_names(what, found, expected)
    errors = {name: relative(found[name], expected[name]) for name in expected}
    wrong = sorted((name for name in errors if not errors[name] <= most), key=lambda name: -errors[name])
    listed = ", ".join(f"{name} {errors[name]:.2e}" for name in wrong[:4])
    assert not wrong, (
        f"{what}: {len(wrong)} of {len(errors)} differ by more than {most:.0e}, relative by norm; the worst: {listed}"
    )


def assert_equal(what: str, found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    """Bit for bit; names what differs."""
    _assert_same_names(what, found, expected)
    wrong = [name for name in expected if not found[name].equal(expected[name])]
    listed = ", ".join(f"{name} {relative(found[name], expected[name]):.1e}" for name in wrong[:4])
    assert not wrong, f"{what}: {len(wrong)} of {len(expected)} differ, relative by norm: {listed}"


def _assert_same_names(what: str, found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    missing, extra = sorted(set(expected) - set(found)), sorted(set(found) - set(expected))
    assert not missing and not extra, f"{what}: {missing[:4] or 'nothing'} missing, {extra[:4] or 'nothing'} too many"
