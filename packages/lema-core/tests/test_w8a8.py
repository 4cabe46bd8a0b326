"""W8A8 in plain torch: exact integers, and what the kernel rounds and what it leaves alone."""

from __future__ import annotations

import torch

from lema_core import builtin
from lema_core.ops.kernels import choose_kernels
from lema_core.ops.linear import LinearKernel
from lema_core.ops.w8a8 import multiply_codes, round_inputs
from lema_core.plugins import PluginManager
from lema_core.quantization.block import QuantizedBlock
from lema_core.quantization.formats import Int4Groups, Int8Rows


def int8_block(rows: int, k: int) -> QuantizedBlock:
    generator = torch.Generator().manual_seed(rows)
    codes = torch.randint(-127, 128, (rows, k), generator=generator, dtype=torch.int8)
    return QuantizedBlock(Int8Rows(), (rows, k), (codes, torch.rand(rows, generator=generator)))


def inputs(k: int, n: int) -> torch.Tensor:
    return torch.randn(k, n, generator=torch.Generator().manual_seed(k))


def test_codes_are_nearest_and_use_the_range_of_a_token() -> None:
    x = inputs(50, 4) * torch.tensor([1.0, 1e-30, 1e30, 0.0])
    codes, scale = round_inputs(x)
    assert torch.equal(codes, codes.round()) and codes.abs().amax(dim=0).tolist() == [127, 127, 127, 0]
    assert ((codes * scale - x).abs() <= 0.5001 * scale).all()
    assert scale[3] == 0
    for value in (torch.inf, torch.nan):
        x[3, 1] = value
        codes, scale = round_inputs(x)
        assert scale[1].isnan() and codes.isfinite().all()


def test_sums_are_exact() -> None:
    """64-bit integers beside it; more rows and inputs than are widened at once."""
    block, x = int8_block(1100, 3000), inputs(3000, 3)
    codes, scale = round_inputs(x)
    sums = block.parts[0].long() @ codes.long()
    assert torch.equal(multiply_codes(block, codes, scale), sums.float() * block.parts[1][:, None] * scale)


def test_the_kernel_rounds_int8_forward_and_nothing_else() -> None:
    plain, w8a8 = LinearKernel(), LinearKernel(weights_compute="w8a8")
    block, x, dy = int8_block(20, 64), inputs(64, 6), inputs(20, 6)
    segments = ((0, 2), (2, 6))
    update = (torch.randn(20, 3), torch.randn(3, 6), 0.5)
    w8a8.forward(block, w8a8.packed(x, segments), out := torch.empty(20, 6), update, segments)
    expected = multiply_codes(block, *round_inputs(x)) + 0.5 * update[0] @ update[1]
    torch.testing.assert_close(out, expected)
    w8a8.forward(block, x[:, 2:], alone := torch.empty(20, 4))
    assert torch.equal(alone, multiply_codes(block, *round_inputs(x[:, 2:])))
    assert not torch.equal(alone, _forward(plain, block, x[:, 2:]))
    form = Int4Groups(32)
    codes = torch.randint(0, 256, (20, 32), dtype=torch.uint8)
    int4 = QuantizedBlock(form, (20, 64), (codes, torch.rand(20, 2).bfloat16()))
    for other in (int4, torch.randn(20, 64)):
        assert torch.equal(_forward(w8a8, other, x), _forward(plain, other, x))
    gradients = []
    for kernel in (plain, w8a8):
        kernel.input_gradient(block, dy, dx := torch.empty(64, 6), True)
        gradients.append(dx)
    assert torch.equal(*gradients)


def _forward(kernel: LinearKernel, weight: QuantizedBlock | torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    kernel.forward(weight, x, out := torch.empty(20, x.shape[1]))
    return out


def test_a_run_that_asks_for_it_gets_it() -> None:
    plugins = PluginManager()
    plugins.admit("lema-core", "core", lambda: builtin)
    block, x = int8_block(20, 64), inputs(64, 6)
    plain, w8a8 = (choose_kernels("python", "cpu", plugins, each).linear for each in ("dequant", "w8a8"))
    assert torch.equal(_forward(w8a8, block, x), multiply_codes(block, *round_inputs(x)))
    assert torch.equal(_forward(plain, block, x), _forward(LinearKernel(), block, x))
