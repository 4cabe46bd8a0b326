"""backward_from against torch.autograd.backward."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from torch import Tensor

from lema_core.ops.gradient import backward_from


def _graph(dtype: torch.dtype) -> tuple[list[Tensor], Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x, w = (torch.randn(3, 3, generator=generator).to(dtype).requires_grad_() for _ in range(2))
    dy = torch.randn(3, 3, generator=generator).to(dtype)
    return [x, w], torch.tanh(x @ w) + x, dy


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_are_torchs_to_the_bit(dtype: torch.dtype) -> None:
    leaves, y, dy = _graph(dtype)
    torch.autograd.backward(y, dy)
    expected = [leaf.grad for leaf in leaves]
    leaves, y, dy = _graph(dtype)
    given = dy.clone()
    backward_from(y, dy)
    assert all(torch.equal(leaf.grad, grad) for leaf, grad in zip(leaves, expected, strict=True))
    assert torch.equal(dy, given)
    backward_from(_graph(dtype)[1], dy)  # a graph of its own: nothing is added to these leaves
    assert torch.equal(leaves[0].grad, expected[0])


def test_a_transposed_gradient_arrives_as_it_is() -> None:
    x = torch.zeros(4, 2, requires_grad=True)
    backward_from(x * 1.0, torch.arange(8.0).view(2, 4).t())
    assert torch.equal(x.grad, torch.arange(8.0).view(2, 4).t())


def test_another_shape_is_refused() -> None:
    x = torch.zeros(2, 3, requires_grad=True)
    with pytest.raises(ValueError, match=r"gradient of \[2, 3\] has the shape \[3\]"):
        backward_from(x * 1.0, torch.ones(3))


def test_sympy_stays_out() -> None:
    code = (
        "import sys, torch\nfrom lema_core.ops.gradient import backward_from\n"
        "x = torch.ones(2, requires_grad=True)\nbackward_from(x * 2, torch.ones(2))\n"
        "sys.exit('sympy' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
