"""Weights into fewer bits, in liblema: as fast as a disk brings them, with the bytes of the codecs in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor

from lema_core.errors import PluginError
from lema_core.quantization.formats import wire_formats
from lema_cuda.library import open_library, raise_for
from lema_cuda.linear import DTYPES, FORMATS

#: of enum lema_error
_NOT_FINITE = 4


class NativeQuantize:
    """As :class:`lema_core.ops.quantize.Quantize`. Raises PluginError for tensors that it does not serve."""

    formats = frozenset(FORMATS)

    def __init__(self) -> None:
        self._library = open_library()

    def __call__(self, format_name: str, weight_rK: Tensor, parts: tuple[Tensor, ...]) -> bool:
        error = self._library.lema_quantize(*_arguments(format_name, weight_rK, parts))
        if error == _NOT_FINITE:
            return False
        raise_for(error)
        return True

    def add_errors(
        self, format_name: str, weight_rK: Tensor, parts: tuple[Tensor, ...], squares_K: Tensor, errors_K: Tensor
    ) -> None:
        for sums_K in (squares_K, errors_K):
            if sums_K.dtype != torch.float64 or sums_K.shape != weight_rK.shape[1:] or not sums_K.is_contiguous():
                raise PluginError(
                    f"cpp kernel: sums for {weight_rK.shape[1]} columns have to be as many contiguous fp64 numbers, "
                    f"found {sums_K.dtype} {list(sums_K.shape)}"
                )
        arguments = _arguments(format_name, weight_rK, parts)
        raise_for(self._library.lema_quantize_errors(*arguments, squares_K.data_ptr(), errors_K.data_ptr()))


def _arguments(format_name: str, weight_rK: Tensor, parts: tuple[Tensor, ...]) -> tuple[int, ...]:
    """Those that both functions begin with. Raises PluginError for tensors that cannot be served."""
    form = wire_formats()[format_name]
    reason = None if weight_rK.dtype in DTYPES else f"{weight_rK.dtype} is neither fp32, fp16 nor bf16"
    reason = reason or form.refuses(tuple(weight_rK.shape))
    expected = [(each.dtype, each.shape) for each in form.parts(weight_rK.shape)] if reason is None else []
    if reason is None and [(each.dtype, each.shape) for each in parts] != expected:
        found = [(each.dtype, tuple(each.shape)) for each in parts]
        reason = f"its parts are {found}, expected {expected}"
    if not all(each.is_contiguous() and each.device.type == "cpu" for each in (weight_rK, *parts)):
        reason = reason or "it and its parts have to be contiguous and on the CPU"
    if reason is not None:
        raise PluginError(f"cpp kernel: a weight {list(weight_rK.shape)} cannot become {format_name}: {reason}")
    codes, scales = parts
    return (
        weight_rK.data_ptr(),
        DTYPES[weight_rK.dtype],
        *weight_rK.shape,
        FORMATS[format_name],
        codes.data_ptr(),
        scales.data_ptr(),
    )
