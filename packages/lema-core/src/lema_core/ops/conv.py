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
from lema_core.ops.gradients import ANCHOR, Sink, by_micro_batch


def short_conv(
    x_BTC: Tensor,
    taps_CK: Tensor,
    bias_C: Tensor | None,
    ctx: ForwardContext,
    layer: int,
    taps_to: Sink | None = None,
    bias_to: Sink | None = None,
) -> Tensor:
    """``y[t] = sum_k taps[k] x[t - K + 1 + k] + bias`` inside each row; zeros precede it, or what ``ctx.cache`` holds
    of ``layer``. As in LFM2 (Liquid AI 2025, arXiv:2511.23404).

    ``taps_CK``, ``bias_C``: fp32; their gradients go to ``taps_to`` and ``bias_to``, None where they are frozen. Saves
    ``x`` where the taps train, else nothing of the tokens.
    """
    taps_CK = taps_CK.to(x_BTC.dtype)
    if ctx.cache is not None:
        y_BTC = _after_cached(x_BTC, taps_CK, ctx, layer)
    else:
        rows = tuple((s.start, s.stop, s.rows) for s in ctx.segments) or ((0, x_BTC[..., 0].numel(), len(x_BTC)),)
        sinks = taps_to, bias_to
        y_BTC = _ShortConv.apply(x_BTC, taps_CK, rows, sinks, None if sinks == (None, None) else ANCHOR)
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
    """Without the bias, whose gradient is that of the taps' sum."""

    @staticmethod
    def forward(
        ctx: Any,
        x_BTC: Tensor,
        taps_CK: Tensor,
        rows: tuple[tuple[int, int, int], ...],
        sinks: tuple[Sink | None, Sink | None],
        anchor: Tensor | None,
    ) -> Tensor:
        ctx.rows, ctx.sinks = rows, sinks
        ctx.save_for_backward(taps_CK, None if sinks[0] is None else x_BTC)
        return _along_rows(_convolved, x_BTC, taps_CK, rows)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_BTC: Tensor) -> tuple[Tensor | None, ...]:
        taps_CK, x_BTC = ctx.saved_tensors
        taps_to, bias_to = ctx.sinks
        if taps_to is not None:
            taps_to.add(_taps_gradients(dy_BTC, x_BTC, taps_CK.shape[1], ctx.rows))
        if bias_to is not None:
            bias_to.add_sums(_matrix(dy_BTC))
        if not ctx.needs_input_grad[0]:
            return (None,) * 5
        return _along_rows(_input_gradient, dy_BTC, taps_CK, ctx.rows), *(None,) * 4


def _taps_gradients(
    dy_BTC: Tensor, x_BTC: Tensor, n_taps: int, rows: tuple[tuple[int, int, int], ...]
) -> Iterator[Tensor]:
    """[C, K] of each micro-batch."""
    columns = [(start, stop) for start, stop, _ in rows]
    of_each = (by_micro_batch(_matrix(each), columns) for each in (dy_BTC, x_BTC))
    for dy_C1n, x_C1n, (_, _, n_rows) in zip(*of_each, rows, strict=True):
        dy_CRT, x_CRT = (each.view(len(each), n_rows, -1) for each in (dy_C1n, x_C1n))
        d_taps_CK = dy_CRT.new_zeros(len(dy_CRT), n_taps)
        for back in range(min(n_taps, dy_CRT.shape[2])):
            seen_CRT = x_CRT[:, :, : x_CRT.shape[2] - back]
            d_taps_CK[:, n_taps - 1 - back] = (dy_CRT[:, :, back:] * seen_CRT).sum(dim=(1, 2))
        yield d_taps_CK


def _along_rows(what: Any, x_BTC: Tensor, taps_CK: Tensor, rows: tuple[tuple[int, int, int], ...]) -> Tensor:
    """``what`` of the rows of each micro-batch; feature-major."""
    x_CN = _matrix(x_BTC)
    y_CN = torch.empty_like(x_CN, memory_format=torch.contiguous_format)
    for start, stop, n_rows in rows:
        x_CRT = x_CN[:, start:stop].unflatten(1, (n_rows, -1))
        y_CN[:, start:stop].unflatten(1, (n_rows, -1)).copy_(what(x_CRT, taps_CK))
    return y_CN.t().view(x_BTC.shape)


def _matrix(x_BTC: Tensor) -> Tensor:
    """[C, N]"""
    return x_BTC.reshape(-1, x_BTC.shape[-1]).t()


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
