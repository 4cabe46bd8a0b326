"""A short causal convolution along each row, every feature by itself.

Built from products and sums of whole rows, each rounded: a token's result depends on its row alone, bit for bit, not on
what is computed beside it. Shapes: B rows, T tokens, N = B * T tokens of all micro-batches, C features, K taps.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from lema_core.ops.context import ForwardContext


def short_conv(x_BTC: Tensor, taps_CK: Tensor, bias_C: Tensor | None, ctx: ForwardContext, layer: int) -> Tensor:
    """``y[t] = sum_k taps[k] x[t - K + 1 + k] + bias`` inside each row; zeros precede it, or what ``ctx.cache`` holds
    of ``layer``. As in LFM2 (Liquid AI 2025, arXiv:2511.23404).

    ``taps_CK``, ``bias_C``: fp32, frozen. Saves nothing of the tokens.
    """
    taps_CK = taps_CK.to(x_BTC.dtype)
    if ctx.cache is not None:
        y_BTC = _after_cached(x_BTC, taps_CK, ctx, layer)
    else:
        rows = tuple((s.start, s.stop, s.rows) for s in ctx.segments) or ((0, x_BTC[..., 0].numel(), len(x_BTC)),)
        y_BTC = _ShortConv.apply(x_BTC, taps_CK, rows)
    return y_BTC if bias_C is None else y_BTC + bias_C.to(x_BTC.dtype)


def _after_cached(x_BTC: Tensor, taps_CK: Tensor, ctx: ForwardContext, layer: int) -> Tensor:
    x_CBT = x_BTC.permute(2, 0, 1)
    before_CBK = ctx.cache.states.get(layer)
    if before_CBK is None:
        before_CBK = x_CBT.new_zeros(*x_CBT.shape[:2], taps_CK.shape[1] - 1)
    x_CBS = torch.cat((before_CBK, x_CBT), dim=2)
    ctx.cache.states[layer] = x_CBS[:, :, x_CBT.shape[2] :].clone()
    return _convolved(x_CBS, taps_CK)[:, :, before_CBK.shape[2] :].permute(1, 2, 0)


class _ShortConv(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_BTC: Tensor, taps_CK: Tensor, rows: tuple[tuple[int, int, int], ...]) -> Tensor:
        ctx.rows = rows
        ctx.save_for_backward(taps_CK)
        return _along_rows(_convolved, x_BTC, taps_CK, rows)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_BTC: Tensor) -> tuple[Tensor | None, ...]:
        (taps_CK,) = ctx.saved_tensors
        return _along_rows(_input_gradient, dy_BTC, taps_CK, ctx.rows), None, None


def _along_rows(what: Any, x_BTC: Tensor, taps_CK: Tensor, rows: tuple[tuple[int, int, int], ...]) -> Tensor:
    """``what`` of the rows of each micro-batch; feature-major."""
    x_CN = x_BTC.reshape(-1, x_BTC.shape[-1]).t()
    y_CN = torch.empty_like(x_CN, memory_format=torch.contiguous_format)
    for start, stop, n_rows in rows:
        x_CRT = x_CN[:, start:stop].unflatten(1, (n_rows, -1))
        y_CN[:, start:stop].unflatten(1, (n_rows, -1)).copy_(what(x_CRT, taps_CK))
    return y_CN.t().view(x_BTC.shape)


def _convolved(x_CRT: Tensor, taps_CK: Tensor) -> Tensor:
    y_CRT = x_CRT * taps_CK[:, -1, None, None]
    for back, tap_C11 in _earlier(taps_CK, x_CRT.shape[2]):
        y_CRT[:, :, back:] += x_CRT[:, :, :-back] * tap_C11
    return y_CRT


def _input_gradient(dy_CRT: Tensor, taps_CK: Tensor) -> Tensor:
    dx_CRT = dy_CRT * taps_CK[:, -1, None, None]
    for back, tap_C11 in _earlier(taps_CK, dy_CRT.shape[2]):
        dx_CRT[:, :, :-back] += dy_CRT[:, :, back:] * tap_C11
    return dx_CRT


def _earlier(taps_CK: Tensor, tokens: int) -> Iterator[tuple[int, Tensor]]:
    """How many tokens back each tap but the last looks, as far as rows reach."""
    for back in range(1, min(taps_CK.shape[1], tokens)):
        yield back, taps_CK[:, -1 - back, None, None]
