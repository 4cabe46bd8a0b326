"""The native elementwise operations and AdamW against plain torch, bit for bit."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from lema_core.ops.adamw import AdamWKernel, AdamWRates, TorchAdamW
from lema_core.ops.elementwise import ElementwiseKernel, TorchElementwise
from lema_cuda.library import refusals

pytestmark = pytest.mark.skipif(bool(refusals()), reason="; ".join(refusals()) or "native")
#: torch's exponential has the same bits on registers of this width only
SAME_SILU = torch.backends.cpu.get_cpu_capability() == "AVX2"


@pytest.fixture
def kernel() -> ElementwiseKernel:
    from lema_cuda.elementwise import NativeElementwise

    return NativeElementwise()


def numbers(*shape: int, seed: int, spread: float = 3.0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * spread


def results(kernel: ElementwiseKernel, c: int, n: int, heads: int = 3) -> dict[str, Tensor]:
    """Every operation on inputs that [c, n] and ``heads`` make, c even for the rotation's."""
    x, dy, up = (numbers(c, n, seed=seed) for seed in range(3))
    weight, half = numbers(c, seed=3), (c + 1) // 2
    turned, angle = numbers(heads, 2 * half, n, seed=4), numbers(half, n, seed=5)
    y, rstd = kernel.rms_norm(x, weight, 1e-5)
    d_gate, d_up = kernel.silu_product_gradient(dy, x, up)
    return {
        "rms_norm": y,
        "rstd": rstd,
        "rms_norm_gradient": kernel.rms_norm_gradient(dy, x, weight, rstd),
        "silu_product": kernel.silu_product(x, up),
        "d_gate": d_gate,
        "d_up": d_up,
        "rotate": kernel.rotate(turned, angle.cos(), angle.sin(), False),
        "rotate_back": kernel.rotate(turned, angle.cos(), angle.sin(), True),
    }


def check(kernel: ElementwiseKernel, c: int, n: int) -> None:
    expected = results(TorchElementwise(), c, n)
    for name, found in results(kernel, c, n).items():
        if SAME_SILU or name not in ("silu_product", "d_gate", "d_up"):
            assert torch.equal(found, expected[name]), name
        else:
            torch.testing.assert_close(found, expected[name], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(("c", "n"), [(1, 1), (2, 16), (576, 33), (2048, 1), (130, 257), (5, 40), (300, 512)])
@pytest.mark.parametrize("threads", [1, 2])
def test_as_plain_torch(kernel: ElementwiseKernel, c: int, n: int, threads: int) -> None:
    torch.set_num_threads(threads)
    check(kernel, c, n)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.integers(1, 80), st.integers(0, 50), st.integers(1, 3))
def test_any_shape(kernel: ElementwiseKernel, c: int, n: int, threads: int) -> None:
    torch.set_num_threads(threads)
    check(kernel, c, n)


def test_a_token_does_not_depend_on_the_others(kernel: ElementwiseKernel) -> None:
    x, dy, up = (numbers(70, 300, seed=seed) for seed in range(3))
    weight = numbers(70, seed=3)

    def tokens(start: int, stop: int) -> list[Tensor]:
        part, part_dy, part_up = (each[:, start:stop].contiguous() for each in (x, dy, up))
        y, rstd = kernel.rms_norm(part, weight, 1e-5)
        dx = kernel.rms_norm_gradient(part_dy, part, weight, rstd)
        return [y, dx, kernel.silu_product(part, part_up), *kernel.silu_product_gradient(part_dy, part, part_up)]

    torch.set_num_threads(2)
    whole = tokens(0, 300)
    for start, stop in ((0, 1), (3, 20), (107, 231), (299, 300)):
        for alone, among in zip(tokens(start, stop), whole, strict=True):
            assert torch.equal(alone, among[:, start:stop])


def test_silu_of_every_magnitude(kernel: ElementwiseKernel) -> None:
    """Large and small exponents, both zeros, infinities and NaN; 1e-45 is the least number above zero."""
    special = torch.tensor([0.0, -0.0, 1e-45, -1e-38, 87.0, -87.5, 88.7, -88.8, 103.0, -103.9, -104.5, 200.0, -1e30])
    gate = torch.cat((special, torch.tensor([torch.inf, -torch.inf, torch.nan]), torch.linspace(-110, 110, 4000)))[None]
    up, dy, twin = torch.ones_like(gate), torch.full_like(gate, 2.0), TorchElementwise()
    pairs = [(kernel.silu_product(gate, up), twin.silu_product(gate, up))]
    pairs += zip(kernel.silu_product_gradient(dy, gate, up), twin.silu_product_gradient(dy, gate, up), strict=True)
    for found, expected in pairs:
        torch.testing.assert_close(found, expected, equal_nan=True, rtol=0 if SAME_SILU else 1e-6, atol=0)


def test_other_tensors_are_left_to_plain_torch(kernel: ElementwiseKernel) -> None:
    twin, weight = TorchElementwise(), numbers(8, seed=1)
    half, token_major = numbers(8, 6, seed=0).bfloat16(), numbers(6, 8, seed=0).t()
    for x in (half, token_major):
        assert torch.equal(kernel.rms_norm(x, weight, 1e-5)[0], twin.rms_norm(x, weight, 1e-5)[0])
        assert torch.equal(kernel.silu_product(x, x), twin.silu_product(x, x))
        heads, table = x.view(2, 4, 6) if x is half else x.unflatten(0, (2, 4)), numbers(2, 6, seed=2)
        assert torch.equal(kernel.rotate(heads, table, table, False), twin.rotate(heads, table, table, False))
    assert kernel.silu_product(token_major.to("meta"), token_major.to("meta")).is_meta


def adamw_states(kernel: AdamWKernel, size: int, rates: dict[str, float], steps: int) -> list[Tensor]:
    param, exp_avg, exp_avg_sq = numbers(size, seed=0, spread=0.1), torch.zeros(size), torch.zeros(size)
    for step in range(1, steps + 1):
        # gradients of many magnitudes, some of them zero
        grad = numbers(size, seed=step) * numbers(size, seed=-step).exp() * (numbers(size, seed=step + steps) > -3)
        kernel.update(param, grad, exp_avg, exp_avg_sq, AdamWRates(step=step, **rates))
    return [param, exp_avg, exp_avg_sq]


@pytest.mark.parametrize(
    "rates",
    [
        {"lr": 1e-3, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 1e-2},
        {"lr": 3e-4, "beta1": 0.8, "beta2": 0.95, "eps": 1e-6, "weight_decay": 0.0},
        {"lr": 0.1, "beta1": 0.3, "beta2": 0.4, "eps": 0.0, "weight_decay": 0.5},
        {"lr": 1e-3, "beta1": 0.0, "beta2": 0.0, "eps": 1e-8, "weight_decay": 0.1},
        {"lr": 1e-3, "beta1": 0.5, "beta2": 0.5, "eps": 1e-8, "weight_decay": 0.1},
    ],
)
def test_adamw_rounds_as_torch(rates: dict[str, float]) -> None:
    from lema_cuda.elementwise import NativeAdamW

    torch.set_num_threads(2)
    for size, steps in ((1, 30), (37, 300), (40_001, 4)):
        expected = adamw_states(TorchAdamW(), size, rates, steps)
        for found, right in zip(adamw_states(NativeAdamW(), size, rates, steps), expected, strict=True):
            assert torch.equal(found.nan_to_num(), right.nan_to_num())


def test_adamw_of_other_tensors_is_left_to_plain_torch() -> None:
    from lema_cuda.elementwise import NativeAdamW

    rates = AdamWRates(1e-2, 0.9, 0.99, 1e-8, 0.1, 1)
    made = []
    for kernel in (NativeAdamW(), TorchAdamW()):
        param, state = numbers(5, 4, seed=0), (torch.zeros(5, 4), torch.zeros(5, 4))
        kernel.update(param.t(), numbers(4, 5, seed=1), state[0].t(), state[1].t(), rates)
        made.append(param)
    assert torch.equal(*made)
