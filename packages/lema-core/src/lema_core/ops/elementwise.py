"""What a block computes beside its products: norms, GELU, the SiLU product, rotary embeddings. Each saves for its
gradient only what cannot be had again.

A token's result depends on that token alone, not on how many others there are nor on its place among them, bit for bit:
micro-batches that are computed together equal those that are computed apart. Torch's own reductions and its SiLU do not
have that property on a CPU, where the elements that fill no vector register are computed in another way.

Kernels compute on feature-major matrices: an activation [B, T, C] is the transpose of a contiguous [C, N] matrix.
Shapes: B rows, T tokens of a row, N = B * T tokens, C features, F feed-forward features, H heads, D head size.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from lema_core.ops.gradients import ANCHOR, Sink

#: elements of a block are a multiple of this, and so are those of all vector registers that torch fills at once
_LANES = 64
#: elements of a block: so many torch computes on one thread, and they stay in cache between two operations
_BLOCK_ELEMENTS = 1 << 15


class ElementwiseKernel(Protocol):
    """Forward and gradient of each operation, on [features, tokens]; feature-major results of the dtype of ``x``."""

    def rms_norm(self, x_CN: Tensor, weight_C: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """``x / rms(x) * weight`` and the factors ``1 / rms(x)``, fp32 [N]. ``weight_C`` is fp32."""
        ...

    def rms_norm_gradient(self, dy_CN: Tensor, x_CN: Tensor, weight_C: Tensor, rstd_N: Tensor) -> Tensor:
        """The gradient of ``x``."""
        ...

    def layer_norm(self, x_CN: Tensor, weight_C: Tensor, bias_C: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
        """``(x - mean) / std * weight + bias``, and mean and ``1 / std``, fp32 [N]. Weight and bias are fp32."""
        ...

    def layer_norm_gradient(
        self, dy_CN: Tensor, x_CN: Tensor, weight_C: Tensor, mean_N: Tensor, rstd_N: Tensor
    ) -> Tensor:
        """The gradient of ``x``."""
        ...

    def gelu(self, x_FN: Tensor, approximate: str) -> Tensor:
        """As torch's ``gelu``."""
        ...

    def gelu_gradient(self, dy_FN: Tensor, x_FN: Tensor, approximate: str) -> Tensor:
        """The gradient of ``x``."""
        ...

    def silu_product(self, gate_FN: Tensor, up_FN: Tensor) -> Tensor:
        """``silu(gate) * up``."""
        ...

    def silu_product_gradient(self, dy_FN: Tensor, gate_FN: Tensor, up_FN: Tensor) -> tuple[Tensor, Tensor]:
        """The gradients of ``gate`` and ``up``."""
        ...

    def rotate(self, x_HDN: Tensor, cos_DN: Tensor, sin_DN: Tensor, inverse: bool) -> Tensor:
        """The halves of each head, turned as pairs by the angle whose fp32 cosine and sine [D / 2, N] are given.

        ``first * cos - second * sin, second * cos + first * sin``, products rounded before they are added.
        """
        ...


class TorchElementwise:
    """The plain-torch kernel, for every device, dtype and layout."""

    def rms_norm(self, x_CN: Tensor, weight_C: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        x = x_CN.float()
        rstd_N = sum_of_features(x.square()).div_(len(x)).add_(eps).rsqrt_()
        y = (x * rstd_N).mul_(weight_C.unsqueeze(1))
        return y.to(x_CN.dtype), rstd_N

    def rms_norm_gradient(self, dy_CN: Tensor, x_CN: Tensor, weight_C: Tensor, rstd_N: Tensor) -> Tensor:
        # with g = dy * weight and the normed z = x * rstd: dx = (g - z * mean(g * z)) * rstd
        x, g = x_CN.float(), dy_CN.float() * weight_C.unsqueeze(1)
        mean_N = sum_of_features(g * x).mul_(rstd_N).div_(len(x))
        return g.sub_((x * rstd_N).mul_(mean_N)).mul_(rstd_N).to(x_CN.dtype)

    def layer_norm(self, x_CN: Tensor, weight_C: Tensor, bias_C: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
        mean_N = sum_of_features(x_CN.to(torch.float32, copy=True)).div(len(x_CN))
        centred = x_CN.float() - mean_N
        rstd_N = sum_of_features(centred.square()).div(len(x_CN)).add_(eps).rsqrt_()
        y = centred.mul_(rstd_N).mul_(weight_C.unsqueeze(1)).add_(bias_C.unsqueeze(1))
        return y.to(x_CN.dtype), mean_N, rstd_N

    def layer_norm_gradient(
        self, dy_CN: Tensor, x_CN: Tensor, weight_C: Tensor, mean_N: Tensor, rstd_N: Tensor
    ) -> Tensor:
        # with g = dy * weight and the normed z = (x - mean) * rstd: dx = (g - mean(g) - z * mean(g * z)) * rstd
        z, g = (x_CN.float() - mean_N).mul_(rstd_N), dy_CN.float() * weight_C.unsqueeze(1)
        along_N = sum_of_features(g * z).div(len(z))
        level_N = sum_of_features(g.clone()).div(len(g))
        return g.sub_(level_N).sub_(z.mul_(along_N)).mul_(rstd_N).to(x_CN.dtype)

    def gelu(self, x_FN: Tensor, approximate: str) -> Tensor:
        def block(out: tuple[Tensor, ...], x: Tensor) -> None:
            torch.ops.aten.gelu.out(x, approximate=approximate, out=out[0])

        return _in_blocks(block, 1, x_FN)[0]

    def gelu_gradient(self, dy_FN: Tensor, x_FN: Tensor, approximate: str) -> Tensor:
        def block(out: tuple[Tensor, ...], dy: Tensor, x: Tensor) -> None:
            torch.ops.aten.gelu_backward.grad_input(dy, x, approximate=approximate, grad_input=out[0])

        return _in_blocks(block, 1, dy_FN, x_FN)[0]

    def silu_product(self, gate_FN: Tensor, up_FN: Tensor) -> Tensor:
        def block(out: tuple[Tensor, ...], gate: Tensor, up: Tensor) -> None:
            torch.ops.aten.silu.out(gate, out=out[0])
            out[0].mul_(up)

        return _in_blocks(block, 1, gate_FN, up_FN)[0]

    def silu_product_gradient(self, dy_FN: Tensor, gate_FN: Tensor, up_FN: Tensor) -> tuple[Tensor, Tensor]:
        def block(out: tuple[Tensor, ...], dy: Tensor, gate: Tensor, up: Tensor) -> None:
            d_gate, d_up = out
            torch.ops.aten.silu.out(gate, out=d_up)
            d_up.mul_(dy)
            torch.mul(dy, up, out=d_gate)
            torch.ops.aten.silu_backward.grad_input(d_gate, gate, grad_input=d_gate)

        d_gate, d_up = _in_blocks(block, 2, dy_FN, gate_FN, up_FN)
        return d_gate, d_up

    def rotate(self, x_HDN: Tensor, cos_DN: Tensor, sin_DN: Tensor, inverse: bool) -> Tensor:
        first, second = x_HDN.float().chunk(2, dim=1)
        y = torch.empty(x_HDN.shape, dtype=torch.float32, device=x_HDN.device)
        turned_first, turned_second = y.chunk(2, dim=1)
        sign = -1 if inverse else 1
        product = second * sin_DN
        torch.mul(first, cos_DN, out=turned_first).sub_(product, alpha=sign)
        torch.mul(first, sin_DN, out=product)
        torch.mul(second, cos_DN, out=turned_second).add_(product, alpha=sign)
        return y.to(x_HDN.dtype)


def rms_norm(
    kernel: ElementwiseKernel, x_BTC: Tensor, weight_C: Tensor, eps: float, weight_to: Sink | None = None
) -> Tensor:
    """``x / sqrt(mean(x^2) + eps) * weight``, statistics in fp32 (Zhang and Sennrich 2019, arXiv:1910.07467).

    ``weight_C``: fp32; its gradient goes to ``weight_to``, None where it is frozen. Saves ``x`` and one number a token.
    """
    return _RmsNorm.apply(kernel, x_BTC, weight_C, eps, weight_to, None if weight_to is None else ANCHOR)


def layer_norm(
    kernel: ElementwiseKernel,
    x_BTC: Tensor,
    weight_C: Tensor,
    bias_C: Tensor,
    eps: float,
    weight_to: Sink | None = None,
    bias_to: Sink | None = None,
) -> Tensor:
    """``(x - mean(x)) / sqrt(var(x) + eps) * weight + bias``, statistics in fp32 (Ba et al. 2016, arXiv:1607.06450).

    Weight and bias: fp32; their gradients go to ``weight_to`` and ``bias_to``, None where they are frozen. Saves ``x``
    and two numbers a token.
    """
    sinks = weight_to, bias_to
    return _LayerNorm.apply(kernel, x_BTC, weight_C, bias_C, eps, sinks, None if sinks == (None, None) else ANCHOR)


def gelu(kernel: ElementwiseKernel, x_BTF: Tensor, approximate: str) -> Tensor:
    """``x * Phi(x)`` (Hendrycks and Gimpel 2016, arXiv:1606.08415); ``approximate``: ``none`` or ``tanh``. Saves
    ``x``."""
    return _Gelu.apply(kernel, x_BTF, approximate)


def silu_product(kernel: ElementwiseKernel, gate_BTF: Tensor, up_BTF: Tensor) -> Tensor:
    """``silu(gate) * up`` (Shazeer 2020, "GLU Variants Improve Transformer", arXiv:2002.05202). Saves ``gate`` and
    ``up``."""
    return _SiluProduct.apply(kernel, gate_BTF, up_BTF)


def rotary(kernel: ElementwiseKernel, x_BHTD: Tensor, tables: tuple[Tensor, Tensor]) -> Tensor:
    """Rotary position embedding in the half-split layout (Su et al. 2021, arXiv:2104.09864); feature-major.

    ``tables``: cosine and sine of each token's angles, fp32 [B, 1, T, D / 2]; nothing else is saved.
    """
    return _Rotary.apply(kernel, x_BHTD, *tables)


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        kernel: ElementwiseKernel,
        x_BTC: Tensor,
        weight_C: Tensor,
        eps: float,
        weight_to: Sink | None,
        anchor: Tensor | None,
    ) -> Tensor:
        y_CN, rstd_N = kernel.rms_norm(_matrix(x_BTC), weight_C, eps)
        ctx.kernel, ctx.weight_to = kernel, weight_to
        ctx.save_for_backward(x_BTC, weight_C, rstd_N)
        return y_CN.t().view(x_BTC.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_BTC: Tensor) -> tuple[Tensor | None, ...]:
        x_BTC, weight_C, rstd_N = ctx.saved_tensors
        dy_CN, x_CN, dx_BTC = _matrix(dy_BTC), _matrix(x_BTC), None
        if ctx.weight_to is not None:
            ctx.weight_to.add_sums((x_CN.float() * rstd_N).mul_(dy_CN))
        if ctx.needs_input_grad[1]:
            dx_BTC = ctx.kernel.rms_norm_gradient(dy_CN, x_CN, weight_C, rstd_N).t().view(x_BTC.shape)
        return None, dx_BTC, None, None, None, None


class _LayerNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        kernel: ElementwiseKernel,
        x_BTC: Tensor,
        weight_C: Tensor,
        bias_C: Tensor,
        eps: float,
        sinks: tuple[Sink | None, Sink | None],
        anchor: Tensor | None,
    ) -> Tensor:
        y_CN, mean_N, rstd_N = kernel.layer_norm(_matrix(x_BTC), weight_C, bias_C, eps)
        ctx.kernel, ctx.sinks = kernel, sinks
        ctx.save_for_backward(x_BTC, weight_C, mean_N, rstd_N)
        return y_CN.t().view(x_BTC.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_BTC: Tensor) -> tuple[Tensor | None, ...]:
        x_BTC, weight_C, mean_N, rstd_N = ctx.saved_tensors
        dy_CN, x_CN, dx_BTC = _matrix(dy_BTC), _matrix(x_BTC), None
        weight_to, bias_to = ctx.sinks
        if weight_to is not None:
            weight_to.add_sums((x_CN.float() - mean_N).mul_(rstd_N).mul_(dy_CN))
        if bias_to is not None:
            bias_to.add_sums(dy_CN)
        if ctx.needs_input_grad[1]:
            dx_BTC = ctx.kernel.layer_norm_gradient(dy_CN, x_CN, weight_C, mean_N, rstd_N).t().view(x_BTC.shape)
        return None, dx_BTC, *(None,) * 6


class _Gelu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, kernel: ElementwiseKernel, x_BTF: Tensor, approximate: str) -> Tensor:
        ctx.kernel, ctx.approximate = kernel, approximate
        ctx.save_for_backward(x_BTF)
        return kernel.gelu(_matrix(x_BTF), approximate).t().view(x_BTF.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_BTF: Tensor) -> tuple[Tensor | None, ...]:
        (x_BTF,) = ctx.saved_tensors
        dx_FN = ctx.kernel.gelu_gradient(_matrix(dy_BTF), _matrix(x_BTF), ctx.approximate)
        return None, dx_FN.t().view(x_BTF.shape), None


class _SiluProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, kernel: ElementwiseKernel, gate_BTF: Tensor, up_BTF: Tensor) -> Tensor:
        ctx.kernel = kernel
        ctx.save_for_backward(gate_BTF, up_BTF)
        return kernel.silu_product(_matrix(gate_BTF), _matrix(up_BTF)).t().view(gate_BTF.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_BTF: Tensor) -> tuple[Tensor | None, ...]:
        gate_BTF, up_BTF = ctx.saved_tensors
        d_gate, d_up = ctx.kernel.silu_product_gradient(_matrix(dy_BTF), _matrix(gate_BTF), _matrix(up_BTF))
        return None, d_gate.t().view(gate_BTF.shape), d_up.t().view(up_BTF.shape)


class _Rotary(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, kernel: ElementwiseKernel, x_BHTD: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.kernel = kernel
        ctx.save_for_backward(cos, sin)
        return _turned(kernel, x_BHTD, cos, sin, inverse=False)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_BHTD: Tensor) -> tuple[Tensor | None, ...]:
        return None, _turned(ctx.kernel, dy_BHTD, *ctx.saved_tensors, inverse=True), None, None


def _turned(kernel: ElementwiseKernel, x_BHTD: Tensor, cos: Tensor, sin: Tensor, inverse: bool) -> Tensor:
    b, h, t, d = x_BHTD.shape
    x_HDN = x_BHTD.permute(1, 3, 0, 2).reshape(h, d, b * t)
    cos_DN, sin_DN = (table.expand(b, 1, t, d // 2).permute(1, 3, 0, 2).reshape(d // 2, b * t) for table in (cos, sin))
    return kernel.rotate(x_HDN, cos_DN, sin_DN, inverse).view(h, d, b, t).permute(2, 0, 3, 1)


def _matrix(x_BTC: Tensor) -> Tensor:
    """[C, N]; a view where x is feature-major."""
    return x_BTC.reshape(-1, x_BTC.shape[-1]).t()


def sum_of_features(x_CN: Tensor) -> Tensor:
    """[N], by adding halves to halves, in place: the additions of one token do not depend on the others."""
    n = len(x_CN)
    while n > 1:
        half = n // 2
        x_CN[:half].add_(x_CN[n - half : n])
        n -= half
    return x_CN[0]


def _in_blocks(function: Callable[..., None], n_results: int, *given_FN: Tensor) -> tuple[Tensor, ...]:
    """``n_results`` feature-major matrices that ``function(results, *given)`` fills, from whole vector registers only.

    A CPU computes SiLU of what fills no register, at the end of the part that each thread takes, by another formula.
    """
    if given_FN[0].device.type != "cpu":
        results = tuple(torch.empty_like(given_FN[0]) for _ in range(n_results))
        function(results, *given_FN)
        return results
    given = [each.contiguous() for each in given_FN]
    results = tuple(torch.empty_like(given[0]) for _ in range(n_results))
    flat = [each.view(-1) for each in (*results, *given)]
    n_rest = len(flat[0]) % _LANES
    whole = len(flat[0]) - n_rest
    for block in zip(*(each[:whole].split(_BLOCK_ELEMENTS) for each in flat), strict=True):
        function(block[:n_results], *block[n_results:])
    if n_rest:
        rest = [F.pad(each[whole:], (0, _LANES - n_rest)) for each in flat]
        function(tuple(rest[:n_results]), *rest[n_results:])
        for result, padded in zip(flat[:n_results], rest, strict=False):
            result[whole:] = padded[:n_rest]
    return results
