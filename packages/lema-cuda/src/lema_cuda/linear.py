"""Products with a borrowed weight, in liblema: the weight is read in its storage format.

Shapes: N tokens, K inputs, R rows of one block.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lema_core.errors import PluginError
from lema_cuda.library import open_library

#: enum lema_dtype
_DTYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
#: enum lema_error
_ERRORS = {1: "a bad argument", 2: "too little scratch", 3: "a CPU feature that is missing"}


class NativeLinear:
    """As :class:`lema_core.ops.linear.LinearKernel`, for fp32 activations on the CPU.

    Computes with as many threads as torch; their number changes no bit of the result. On the meta device nothing is
    computed. Raises PluginError for tensors that it does not serve.
    """

    def __init__(self) -> None:
        self._library = open_library()
        self._scratch = torch.empty(0, dtype=torch.uint8)

    def forward(self, weight_RK: Tensor, x_KN: Tensor, out_RN: Tensor) -> None:
        """out = W x."""
        if out_RN.is_meta:
            return
        (rows, k), n = weight_RK.shape, x_KN.shape[1]
        weight = _address_of_weight(weight_RK)
        x, out = _address_and_stride(x_KN, k, n), _address_and_stride(out_RN, rows, n)
        scratch = self._scratch_for(k, n)
        _raise_for(self._library.lema_linear_forward(*weight, rows, k, *x, n, *out, *scratch))

    def input_gradient(self, weight_RK: Tensor, dy_RN: Tensor, dx_KN: Tensor, first: bool) -> None:
        """dx = W^T dy, or dx += W^T dy when not ``first``."""
        if dx_KN.is_meta:
            return
        (rows, k), n = weight_RK.shape, dy_RN.shape[1]
        weight = _address_of_weight(weight_RK)
        dy, dx = _address_and_stride(dy_RN, rows, n), _address_and_stride(dx_KN, k, n)
        scratch = self._scratch_for(rows, n)
        _raise_for(self._library.lema_linear_input_gradient(*weight, rows, k, *dy, n, *dx, not first, *scratch))

    def _scratch_for(self, inner: int, n: int) -> tuple[int, int, int]:
        """Address, bytes, and the threads that they are enough for."""
        threads = torch.get_num_threads()
        needed = self._library.lema_linear_scratch_bytes(inner, n, threads)
        if self._scratch.numel() < needed:
            self._scratch = torch.empty(needed, dtype=torch.uint8)
        return self._scratch.data_ptr(), self._scratch.numel(), threads


def _address_of_weight(weight_RK: Tensor) -> tuple[int, int]:
    """Address and enum lema_dtype. The library sees addresses only: what it would misread stops here."""
    if weight_RK.dtype not in _DTYPES or weight_RK.device.type != "cpu" or not weight_RK.is_contiguous():
        raise PluginError(
            f"cpp kernel: the weight is {_told(weight_RK)}, expected contiguous fp32, fp16 or bf16 on the CPU"
        )
    return weight_RK.data_ptr(), _DTYPES[weight_RK.dtype]


def _address_and_stride(tensor: Tensor, rows: int, n: int) -> tuple[int, int]:
    """Address of a matrix in rows, and the elements from one row to the next."""
    # torch may give a dimension of one any stride
    stride = tensor.stride(0) if rows > 1 else n
    in_rows = tensor.shape == (rows, n) and (n <= 1 or tensor.stride(1) == 1) and stride >= n
    if not in_rows or tensor.dtype != torch.float32 or tensor.device.type != "cpu":
        raise PluginError(
            f"cpp kernel: an activation is {_told(tensor)}, expected fp32 {[rows, n]} with contiguous rows on the CPU"
        )
    return tensor.data_ptr(), stride


def _told(tensor: Tensor) -> str:
    return f"{tensor.dtype} {list(tensor.shape)} with strides {list(tensor.stride())} on {tensor.device}"


def _raise_for(error: int) -> None:
    if error:
        raise PluginError(f"cpp kernel: liblema refused a product: {_ERRORS.get(error, error)}")
