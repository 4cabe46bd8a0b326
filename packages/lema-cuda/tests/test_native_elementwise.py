"""The native elementwise operations against plain torch, bit for bit."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

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
