"""The native AdamW against plain torch's, bit for bit."""

from __future__ import annotations

import threading
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lema_core.ops.adamw import AdamWKernel, AdamWRates, TorchAdamW
from lema_cuda.library import refusals

pytestmark = pytest.mark.skipif(bool(refusals()), reason="; ".join(refusals()) or "native")
RATES = AdamWRates(1e-3, 0.9, 0.999, 1e-8, 1e-2, 3)


def native() -> AdamWKernel:
    from lema_cuda.elementwise import NativeAdamW

    return NativeAdamW()


def numbers(*shape: int, seed: int, spread: float = 1.0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * spread


def gradient(size: int, seed: int) -> Tensor:
    """Of many magnitudes, some of them zero."""
    return numbers(size, seed=seed) * numbers(size, seed=-seed, spread=3).exp() * (numbers(size, seed=seed + 99) > -1)


def trained(kernel: AdamWKernel, size: int, rates: AdamWRates, steps: int, threads: int | None = None) -> list[Tensor]:
    param, exp_avg, exp_avg_sq = numbers(size, seed=0, spread=0.1), torch.zeros(size), torch.zeros(size)
    for step in range(1, steps + 1):
        kernel.update(param, gradient(size, step), exp_avg, exp_avg_sq, replace(rates, step=step), threads)
    return [param.nan_to_num(), exp_avg, exp_avg_sq]


@pytest.mark.parametrize(
    "rates",
    [
        AdamWRates(1e-3, 0.9, 0.999, 1e-8, 1e-2, 1),
        AdamWRates(3e-4, 0.8, 0.95, 1e-6, 0.0, 1),
        AdamWRates(0.1, 0.3, 0.4, 0.0, 0.5, 1),
        AdamWRates(1e-3, 0.0, 0.0, 1e-8, 0.1, 1),
        AdamWRates(1e-3, 0.5, 0.5, 1e-8, 0.1, 1, grad_scale=0.123),
        AdamWRates(1e-3, 0.9, 0.999, 1e-8, 0.1, 1, grad_scale=1 / 65536),
    ],
)
def test_it_rounds_as_plain_torch(rates: AdamWRates) -> None:
    torch.set_num_threads(2)
    for size, steps in ((1, 30), (37, 200), (40_001, 4)):
        made = [trained(kernel, size, rates, steps) for kernel in (native(), TorchAdamW())]
        assert all(torch.equal(*pair) for pair in zip(*made, strict=True))


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 70), st.integers(0, 7), st.integers(1, 3), st.floats(1e-6, 10))
def test_any_length_at_any_address_by_any_threads(size: int, start: int, threads: int, grad_scale: float) -> None:
    rates = replace(RATES, grad_scale=grad_scale)
    made = []
    for kernel in (native(), TorchAdamW()):
        whole = [numbers(100, seed=seed) for seed in range(3)] + [numbers(100, seed=3).square()]
        kernel.update(*(each[start : start + size] for each in whole), rates, threads)
        made.append(whole)
    assert all(torch.equal(*pair) for pair in zip(*made, strict=True))


@pytest.mark.parametrize("kernel", [TorchAdamW, native])
def test_a_scaled_gradient_is_one_that_was_multiplied_before(kernel: object) -> None:
    size, made = 50_000, []
    grad = gradient(size, 1)
    for given_, scale in ((grad.clone(), 0.3217), (grad * 0.3217, 1.0)):
        states = numbers(size, seed=0), numbers(size, seed=1), numbers(size, seed=2).square()
        before = given_.clone()
        kernel().update(states[0], given_, states[1], states[2], replace(RATES, grad_scale=scale))
        assert torch.equal(given_, before)  # a gradient is read only
        made.append(states)
    assert all(torch.equal(*pair) for pair in zip(*made, strict=True))


@pytest.mark.parametrize("kernel", [TorchAdamW, native])
def test_how_a_tensor_is_cut_and_who_computes_changes_no_bit(kernel: object) -> None:
    size, made = 70_000, []
    for cuts, threads in (((), 1), ((), 2), ((1, 8, 33_333, 65_536), 1)):
        states = [numbers(size, seed=seed) for seed in range(3)] + [numbers(size, seed=3).square()]
        for pieces in zip(*(each.tensor_split(cuts) for each in states), strict=True):
            kernel().update(*pieces, RATES, threads)
        made.append(states)
    assert all(torch.equal(first, other) for others in made[1:] for first, other in zip(made[0], others, strict=True))


def test_roots_are_the_nearest_numbers() -> None:
    """Without gradients, with beta1 = 1/2, lr = 1, exp_avg = 1, a parameter falls from 0 by 1 / the corrected root."""
    squares = torch.cat((numbers(5000, seed=0).square(), torch.tensor([1e-45, 1e-38, 1e-20, 3e38, 0.25])))
    rates = AdamWRates(1.0, 0.5, 0.25, 0.0, 0.0, 1)
    for kernel in (native(), TorchAdamW()):
        param, exp_avg_sq = torch.zeros_like(squares), squares.clone()
        kernel.update(param, torch.zeros_like(squares), torch.ones_like(squares), exp_avg_sq, rates)
        assert torch.equal(exp_avg_sq, squares * 0.25)
        assert torch.equal(param, -1 / (exp_avg_sq.double().sqrt().float() / rates.root_correction))


def test_infinite_and_nan_numbers_stay_what_they_are() -> None:
    special = torch.tensor([torch.inf, -torch.inf, torch.nan, 0.0, -0.0, 1e-45, 3e38, 1.0] * 5)
    made = []
    for kernel in (native(), TorchAdamW()):
        states = numbers(40, seed=0), special.clone(), numbers(40, seed=1), numbers(40, seed=2).square()
        kernel.update(*states, RATES)
        made.append(states)
    for found, expected in zip(*made, strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)


def test_beside_a_thread_that_computes() -> None:
    """An update by one thread of its own, while another uses the library's threads."""
    expected, found = trained(TorchAdamW(), 40_000, RATES, 5), []

    def background() -> None:
        found.append(trained(native(), 40_000, RATES, 5, threads=1))

    torch.set_num_threads(2)
    thread = threading.Thread(target=background)
    thread.start()
    while thread.is_alive():
        trained(native(), 40_000, RATES, 1)
    thread.join()
    assert all(torch.equal(*pair) for pair in zip(found[0], expected, strict=True))


def test_other_tensors_are_left_to_plain_torch() -> None:
    made = []
    for kernel in (native(), TorchAdamW()):
        param, state = numbers(5, 4, seed=0), (torch.zeros(5, 4), torch.zeros(5, 4))
        kernel.update(param.t(), numbers(4, 5, seed=1), state[0].t(), state[1].t(), RATES)
        made.append(param)
    assert torch.equal(*made)
