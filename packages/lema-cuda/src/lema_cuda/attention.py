"""Causal attention in liblema: heads are read and written feature-major, as products leave them and take them.

Shapes: N tokens of packed micro-batches, H heads, G key/value heads, D head size.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from lema_core.ops.attention import TorchAttention
from lema_core.ops.context import Segment
from lema_cuda.library import open_library, raise_for

#: of D: what a register tile is wide, and what fits a thread's scratch
_D_STEP, _MOST_D = 16, 256

_address, _int32, _int64 = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64


class _Segment(ctypes.Structure):
    """struct lema_segment"""

    _fields_ = (("start", _int64), ("rows", _int64), ("tokens", _int64))


class _Attention(ctypes.Structure):
    """struct lema_attention"""

    _fields_ = (
        ("q", _address),
        ("k", _address),
        ("v", _address),
        ("q_stride", _int64),
        ("k_stride", _int64),
        ("v_stride", _int64),
        ("heads", _int64),
        ("groups", _int64),
        ("d", _int64),
        ("n", _int64),
        ("segments", _address),
        ("n_segments", _int64),
        ("out", _address),
        ("largest", _address),
        ("inverse", _address),
        ("d_out", _address),
        ("d_out_stride", _int64),
        ("dq", _address),
        ("dk", _address),
        ("dv", _address),
        ("scratch", _address),
        ("scratch_bytes", _int64),
        ("scale", ctypes.c_float),
        ("threads", _int32),
    )


def serves(q_1HND: Tensor, k_1GND: Tensor, v_1GND: Tensor) -> bool:
    """Whether the library can compute what has no mask: fp32 on the CPU, of feature-major heads."""
    d = q_1HND.shape[3]
    return d % _D_STEP == 0 and 0 < d <= _MOST_D and all(_feature_major(x) for x in (q_1HND, k_1GND, v_1GND))


def _feature_major(x_1HND: Tensor) -> bool:
    """fp32 on the CPU with the rows of [H * D, N] evenly apart."""
    _, heads, n, d = x_1HND.shape
    row = x_1HND.stride(3)
    in_rows = row >= n and (n <= 1 or x_1HND.stride(2) == 1) and (heads == 1 or x_1HND.stride(1) == d * row)
    return in_rows and x_1HND.dtype == torch.float32 and x_1HND.device.type == "cpu"


class NativeAttention(TorchAttention):
    """As :class:`lema_core.ops.attention.TorchAttention`, which computes what is masked or laid out in another way.

    Computes with as many threads as torch; their number changes no bit of the result. Not for several threads at once.
    Raises PluginError where there is no library.
    """

    def __init__(self) -> None:
        self._library = open_library()
        self._scratch = torch.empty(0, dtype=torch.uint8)

    def attend(
        self, q_1HND: Tensor, k_1GND: Tensor, v_1GND: Tensor, segments: tuple[Segment, ...], scale: float
    ) -> Tensor:
        plain = tuple(segment for segment in segments if segment.mask_BTS is None)
        if not plain or not serves(q_1HND, k_1GND, v_1GND):
            return super().attend(q_1HND, k_1GND, v_1GND, segments, scale)
        plain_1NC = _Attend.apply(self, q_1HND, k_1GND, v_1GND, plain, scale)
        if len(plain) == len(segments):
            return plain_1NC
        # A micro-batch beside a masked one is computed as it is alone.
        masked = tuple(segment for segment in segments if segment.mask_BTS is not None)
        sizes = [segment.stop - segment.start for segment in masked]
        masked_1nC = iter(super().attend(q_1HND, k_1GND, v_1GND, masked, scale).split(sizes, dim=1))
        parts_1nC = [
            plain_1NC[:, segment.start : segment.stop] if segment.mask_BTS is None else next(masked_1nC)
            for segment in segments
        ]
        return torch.cat([part[0].t() for part in parts_1nC], dim=1).t()[None]

    def compute(self, given: _Attention) -> None:
        """Hand it to the library, with scratch that is kept between calls."""
        given.threads = torch.get_num_threads()
        needed = self._library.lema_attention_scratch_bytes(ctypes.byref(given))
        if self._scratch.numel() < needed:
            self._scratch = torch.empty(needed, dtype=torch.uint8)
        given.scratch, given.scratch_bytes = self._scratch.data_ptr(), self._scratch.numel()
        raise_for(self._library.lema_attend(ctypes.byref(given)))


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        kernel: NativeAttention,
        q_1HND: Tensor,
        k_1GND: Tensor,
        v_1GND: Tensor,
        segments: tuple[Segment, ...],
        scale: float,
    ) -> Tensor:
        _, heads, n, d = q_1HND.shape
        out_CN = q_1HND.new_empty(heads * d, n)
        softmax_2HN = q_1HND.new_empty(2, heads, n)
        ctx.kernel, ctx.segments, ctx.scale = kernel, segments, scale
        given, _alive = _described(ctx, q_1HND, k_1GND, v_1GND, out_CN, softmax_2HN)
        kernel.compute(given)
        ctx.save_for_backward(q_1HND, k_1GND, v_1GND, out_CN, softmax_2HN)
        return out_CN.t()[None]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_1NC: Tensor) -> tuple[Tensor | None, ...]:
        q_1HND, k_1GND, v_1GND, *_ = ctx.saved_tensors
        dy_CN = dy_1NC[0].t().contiguous()
        given, _alive = _described(ctx, *ctx.saved_tensors)
        covered = sum(segment.stop - segment.start for segment in ctx.segments) == q_1HND.shape[2]
        make = torch.empty if covered else torch.zeros
        grads = [make(x.shape[1], x.shape[3], x.shape[2]) for x in (q_1HND, k_1GND, v_1GND)]
        given.d_out, given.d_out_stride = dy_CN.data_ptr(), dy_CN.shape[1]
        given.dq, given.dk, given.dv = (grad.data_ptr() for grad in grads)
        ctx.kernel.compute(given)
        return None, *(grad_HDN.transpose(1, 2)[None] for grad_HDN in grads), None, None


def _described(
    ctx: Any, q_1HND: Tensor, k_1GND: Tensor, v_1GND: Tensor, out_CN: Tensor, softmax_2HN: Tensor
) -> tuple[_Attention, Any]:
    """The forward pass, and what must live as long as it is used."""
    _, heads, n, d = q_1HND.shape
    segments = (_Segment * len(ctx.segments))(*((s.start, s.rows, s.tokens) for s in ctx.segments))
    largest_HN, inverse_HN = softmax_2HN
    given = _Attention(
        *(x.data_ptr() for x in (q_1HND, k_1GND, v_1GND)),
        *(x.stride(3) for x in (q_1HND, k_1GND, v_1GND)),
        heads,
        k_1GND.shape[1],
        d,
        n,
        ctypes.cast(segments, _address),
        len(segments),
        out_CN.data_ptr(),
        largest_HN.data_ptr(),
        inverse_HN.data_ptr(),
        scale=ctx.scale,
    )
    return given, segments
