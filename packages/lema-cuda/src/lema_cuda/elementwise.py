"""Norms, the SiLU product, rotary embeddings and AdamW in liblema, without temporaries of their size.

Bit for bit what the plain-torch kernels compute, by as many threads as torch has; where the tensors are of another kind
than fp32 and contiguous on the CPU, it is the plain-torch kernel that computes. Shapes as in
:mod:`lema_core.ops.elementwise`.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from lema_core.ops.adamw import AdamWRates, TorchAdamW
from lema_core.ops.elementwise import TorchElementwise
from lema_cuda.library import open_library, raise_for


def serves(*tensors: Tensor) -> bool:
    """Whether the library can compute with these: it sees addresses only."""
    return all(each.dtype == torch.float32 and each.device.type == "cpu" and each.is_contiguous() for each in tensors)


class NativeElementwise(TorchElementwise):
    """As :class:`lema_core.ops.elementwise.TorchElementwise`. Raises PluginError where there is no library."""

    def __init__(self) -> None:
        self._library = open_library()

    def rms_norm(self, x_CN: Tensor, weight_C: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        if not serves(x_CN, weight_C):
            return super().rms_norm(x_CN, weight_C, eps)
        y_CN, rstd_N = torch.empty_like(x_CN), x_CN.new_empty(x_CN.shape[1])
        raise_for(
            self._library.lema_rms_norm(
                x_CN.data_ptr(),
                weight_C.data_ptr(),
                *x_CN.shape,
                eps,
                y_CN.data_ptr(),
                rstd_N.data_ptr(),
                torch.get_num_threads(),
            )
        )
        return y_CN, rstd_N

    def rms_norm_gradient(self, dy_CN: Tensor, x_CN: Tensor, weight_C: Tensor, rstd_N: Tensor) -> Tensor:
        if not serves(dy_CN, x_CN, weight_C, rstd_N):
            return super().rms_norm_gradient(dy_CN, x_CN, weight_C, rstd_N)
        dx_CN = torch.empty_like(x_CN)
        given = (each.data_ptr() for each in (dy_CN, x_CN, weight_C, rstd_N))
        raise_for(self._library.lema_rms_norm_gradient(*given, *x_CN.shape, dx_CN.data_ptr(), torch.get_num_threads()))
        return dx_CN

    def silu_product(self, gate_FN: Tensor, up_FN: Tensor) -> Tensor:
        if not serves(gate_FN, up_FN):
            return super().silu_product(gate_FN, up_FN)
        out_FN = torch.empty_like(gate_FN)
        raise_for(
            self._library.lema_silu_product(
                gate_FN.data_ptr(), up_FN.data_ptr(), out_FN.numel(), out_FN.data_ptr(), torch.get_num_threads()
            )
        )
        return out_FN

    def silu_product_gradient(self, dy_FN: Tensor, gate_FN: Tensor, up_FN: Tensor) -> tuple[Tensor, Tensor]:
        if not serves(dy_FN, gate_FN, up_FN):
            return super().silu_product_gradient(dy_FN, gate_FN, up_FN)
        d_gate, d_up = torch.empty_like(gate_FN), torch.empty_like(up_FN)
        given = (each.data_ptr() for each in (dy_FN, gate_FN, up_FN))
        raise_for(
            self._library.lema_silu_product_gradient(
                *given, dy_FN.numel(), d_gate.data_ptr(), d_up.data_ptr(), torch.get_num_threads()
            )
        )
        return d_gate, d_up

    def rotate(self, x_HDN: Tensor, cos_DN: Tensor, sin_DN: Tensor, inverse: bool) -> Tensor:
        if not serves(x_HDN, cos_DN, sin_DN):
            return super().rotate(x_HDN, cos_DN, sin_DN, inverse)
        heads, d, n = x_HDN.shape
        y_HDN = torch.empty_like(x_HDN)
        given = (each.data_ptr() for each in (x_HDN, cos_DN, sin_DN))
        raise_for(
            self._library.lema_rotate(*given, heads, d // 2, n, inverse, y_HDN.data_ptr(), torch.get_num_threads())
        )
        return y_HDN


class _Rates(ctypes.Structure):
    """lema_adamw_rates."""

    _fields_ = tuple(
        (name, ctypes.c_float)
        for name in ("grad_scale", "rate1", "beta2", "rate2", "keep", "correction", "eps", "step")
    )


class NativeAdamW(TorchAdamW):
    """As :class:`lema_core.ops.adamw.TorchAdamW`, bit for bit, in one pass over the four tensors and without the
    interpreter's lock. Raises PluginError where there is no library."""

    def __init__(self) -> None:
        self._library = open_library()

    def update(
        self,
        param: Tensor,
        grad: Tensor,
        exp_avg: Tensor,
        exp_avg_sq: Tensor,
        rates: AdamWRates,
        threads: int | None = None,
    ) -> None:
        if not serves(param, grad, exp_avg, exp_avg_sq):
            super().update(param, grad, exp_avg, exp_avg_sq, rates, threads)
            return
        native = _Rates(
            rates.grad_scale,
            1 - rates.beta1,
            rates.beta2,
            1 - rates.beta2,
            rates.kept,
            rates.root_correction,
            rates.eps,
            -rates.corrected_lr,
        )
        given = (each.data_ptr() for each in (param, grad, exp_avg, exp_avg_sq))
        raise_for(
            self._library.lema_adamw(*given, param.numel(), ctypes.byref(native), threads or torch.get_num_threads())
        )
