"""Products with a borrowed weight on a CUDA device: liblema_cuda reads quantized blocks as they lie.

Shapes: N tokens, K inputs, R rows of one block, r rank of a low-rank update.
"""

from __future__ import annotations

import ctypes
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from lema_core.errors import PluginError
from lema_core.ops.linear import Columns, LinearKernel, apart
from lema_core.quantization.block import QuantizedBlock, WeightBlock
from lema_cuda.library import open_cuda_library, raise_for_cuda
from lema_cuda.linear import DTYPES, FORMATS, check_inputs, told

#: numbers that are decoded together: enough rows to keep a device busy, in 8 MB of bf16
_SCRATCH_ELEMENTS = 1 << 22

_address, _int32, _int64 = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64


class _Weight(ctypes.Structure):
    """struct lema_device_weight"""

    _fields_ = (("codes", _address), ("scales", _address), ("rows", _int64), ("k", _int64), ("format", _int32))


class _Inputs:
    """What several products share: the columns of each segment, and their int8 codes once a product asks for them."""

    def __init__(self, x_KN: Tensor, segments: Sequence[Columns]) -> None:
        self.x_KN = x_KN
        self.shares = apart(x_KN, segments)
        self.codes: tuple[Tensor, Tensor] | None = None


class DeviceLinear(LinearKernel):
    """As :class:`lema_core.ops.linear.LinearKernel`, for CUDA devices.

    Weights that are not quantized are torch's to multiply. Quantized ones are decoded a few rows at a time into one
    scratch in the activations' dtype, bit for bit as their format decodes, and multiplied by torch; with one token and
    no segments they are read once and never written out.

    ``weights_compute="w8a8"``: forward, int8 weights are multiplied with inputs that are rounded to int8, each token by
    a scale of its own (:mod:`lema_core.ops.w8a8`); input gradients, and with them weights that lie as [in, out], stay
    as above. What cannot be served so is warned of once. ``auto`` is ``dequant``.

    ``compute_stream`` gives the handle of the ``cuda_stream`` to queue on, default torch's current one. Not for several
    callers at once. Raises PluginError for tensors that it does not serve, RuntimeError with CUDA's text for what
    fails.
    """

    def __init__(self, weights_compute: str = "auto", compute_stream: Callable[[], int] | None = None) -> None:
        super().__init__(weights_compute)
        self._library = open_cuda_library()
        self._compute_stream = compute_stream
        self._told: set[str] = set()

    def packed(self, x_KN: Tensor, segments: Sequence[Columns] = ()) -> _Inputs:
        """What several products with the same right-hand side share, to be given as ``x`` to :meth:`forward` with the
        same ``segments``."""
        return _Inputs(x_KN, segments)

    def forward(
        self,
        weight_RK: WeightBlock,
        x: Any,
        out_RN: Tensor,
        update: tuple[Tensor, Tensor, float] | None = None,
        segments: Sequence[Columns] = (),
    ) -> None:
        """out = W x, plus scale * B a where ``update`` is (B [R, r] in fp32, a [r, N], scale).

        ``x``: a tensor [K, N], or what :meth:`packed` returned; ``out`` has its dtype.
        """
        inputs = x if isinstance(x, _Inputs) else _Inputs(x, segments)
        if self._multiplies_codes(weight_RK, out_RN):
            self._multiply_codes(weight_RK, inputs, out_RN)
        elif out_RN.shape[1] == 1 and not segments and out_RN.is_contiguous() and self._decodes(weight_RK, out_RN):
            self._multiply_one(weight_RK, inputs.x_KN, out_RN)
        else:
            super().forward(weight_RK, inputs.shares, out_RN, update, segments)
            return
        if update is not None:
            _add_update(out_RN, update, segments)

    def _fill(self, scratch_rK: Tensor, weight_RK: WeightBlock, start: int) -> None:
        if not self._decodes(weight_RK, scratch_rK):
            super()._fill(scratch_rK, weight_RK, start)
            return
        weight = _described(weight_RK, start, start + len(scratch_rK))
        self._queue("decoding a weight", "lema_device_decode", weight, scratch_rK.data_ptr(), like=scratch_rK)

    def _rows_at_once(self, weight_RK: WeightBlock, like: Tensor) -> int:
        if not self._decodes(weight_RK, like):
            return super()._rows_at_once(weight_RK, like)
        rows, k = weight_RK.shape
        return min(rows, max(1, _SCRATCH_ELEMENTS // k))

    def _decodes(self, weight_RK: WeightBlock, like: Tensor) -> bool:
        """Whether the library reads this weight for products in the dtype of ``like``."""
        if not isinstance(weight_RK, QuantizedBlock):
            return False
        name = weight_RK.format.name
        if name not in FORMATS:
            self._tell(f"weights in {name} are decoded by torch, liblema_cuda reads {', '.join(FORMATS)}")
        return name in FORMATS and like.dtype in DTYPES

    def _multiplies_codes(self, weight_RK: WeightBlock, like: Tensor) -> bool:
        if not self._rounds_inputs or not self._decodes(weight_RK, like):
            return False
        name, k = weight_RK.format.name, weight_RK.shape[1]
        if name != "int8":
            self._tell(
                f"weights_compute=w8a8: weights in {name} are dequantized, int8 ones alone are multiplied as int8"
            )
            return False
        check_inputs(k)
        return True

    def _tell(self, what: str) -> None:
        if what not in self._told:
            self._told.add(what)
            warnings.warn(what, stacklevel=2)

    def _multiply_one(self, weight_RK: QuantizedBlock, x_K1: Tensor, out_R1: Tensor) -> None:
        x, (out, _) = x_K1.contiguous(), _address_and_stride(out_R1, weight_RK.shape[0], 1)
        _address_and_stride(x, weight_RK.shape[1], 1, out_R1.dtype)
        self._queue(
            "a product with one token", "lema_device_gemv", _described(weight_RK), x.data_ptr(), out, like=out_R1
        )

    def _multiply_codes(self, weight_RK: QuantizedBlock, inputs: _Inputs, out_RN: Tensor) -> None:
        (rows, k), n = weight_RK.shape, out_RN.shape[1]
        out, stride = _address_and_stride(out_RN, rows, n)
        _address_and_stride(inputs.x_KN, k, n, out_RN.dtype)
        if inputs.codes is None:
            inputs.codes = self._quantized(inputs.x_KN)
        codes_NP, scale_N = inputs.codes
        given = codes_NP.data_ptr(), scale_N.data_ptr(), n, out, stride
        self._queue("a W8A8 product", "lema_device_product", _described(weight_RK), *given, like=out_RN)

    def _quantized(self, x_KN: Tensor) -> tuple[Tensor, Tensor]:
        """Codes [N, K and padding] and scales [N] of tokens."""
        k, n = x_KN.shape
        x, stride = _address_and_stride(x_KN, k, n)
        codes_NP = torch.empty(n, self._library.lema_device_padded(k), dtype=torch.int8, device=x_KN.device)
        scale_N = torch.empty(n, device=x_KN.device)
        given, results = (x, stride, k, n, DTYPES[x_KN.dtype]), (codes_NP.data_ptr(), scale_N.data_ptr())
        error = self._library.lema_device_quantize(*given, *results, *self._where(x_KN))
        raise_for_cuda(error, "quantizing tokens")
        return codes_NP, scale_N

    def _queue(self, doing: str, function: str, weight: _Weight, *given: int, like: Tensor) -> None:
        call = getattr(self._library, function)
        raise_for_cuda(call(ctypes.byref(weight), *given, DTYPES[like.dtype], *self._where(like)), doing)

    def _where(self, tensor: Tensor) -> tuple[int, int]:
        """Number of the device, and the stream there."""
        if self._compute_stream is not None:
            return tensor.device.index or 0, self._compute_stream()
        if tensor.device.type != "cuda":
            raise PluginError(f"cpp kernel: an activation is on {tensor.device}, expected a CUDA device")
        return tensor.device.index, torch.cuda.current_stream(tensor.device).cuda_stream


def _described(block: QuantizedBlock, start: int = 0, stop: int | None = None) -> _Weight:
    """Rows of a block. The library sees addresses only: what it would misread stops here."""
    rows, k = block.shape
    for part, expected in zip(block.parts, block.format.parts(block.shape), strict=True):
        if part.dtype != expected.dtype or part.shape != expected.shape or not part.is_contiguous():
            raise PluginError(
                f"cpp kernel: part {expected.suffix or 'payload'} of a weight in {block.format.name} is {told(part)}, "
                f"expected contiguous {expected.dtype} {list(expected.shape)}"
            )
    stop = rows if stop is None else stop
    codes, scales = (part[start:stop].data_ptr() for part in block.parts)
    return _Weight(codes, scales, stop - start, k, FORMATS[block.format.name])


def _address_and_stride(tensor: Tensor, rows: int, n: int, dtype: torch.dtype | None = None) -> tuple[int, int]:
    """Address of an activation [rows, N] in rows, and the elements from one row to the next."""
    # torch may give a dimension of one any stride
    stride = tensor.stride(0) if rows > 1 else n
    in_rows = tensor.shape == (rows, n) and (n <= 1 or tensor.stride(1) == 1) and stride >= n
    if not in_rows or tensor.dtype not in DTYPES or tensor.dtype != (dtype or tensor.dtype):
        expected = f"{dtype or 'fp32, fp16 or bf16'} {[rows, n]} with contiguous rows"
        raise PluginError(f"cpp kernel: an activation is {told(tensor)}, expected {expected}")
    return tensor.data_ptr(), stride


def _add_update(out_RN: Tensor, update: tuple[Tensor, Tensor, float], segments: Sequence[Columns]) -> None:
    """out += scale * B a, the columns of each segment as if they stood alone."""
    low_rank_Rr, scale = update[0].to(out_RN.dtype), update[2]
    columns = segments or ((0, out_RN.shape[1]),)
    for y, a_rN, (first, last) in zip(apart(out_RN, segments), apart(update[1], segments), columns, strict=True):
        y.addmm_(low_rank_Rr, a_rN, alpha=scale)
        if (target := out_RN[:, first:last]).data_ptr() != y.data_ptr():
            target.copy_(y)
