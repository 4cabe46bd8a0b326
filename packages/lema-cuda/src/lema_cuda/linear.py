"""Products with a borrowed weight, in liblema: the weight is read in its storage format, quantized or not.

Shapes: N tokens, K inputs, R rows of one block, r rank of a low-rank update.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from lema_core.errors import PluginError
from lema_core.ops.linear import Columns
from lema_core.ops.w8a8 import MOST_INPUTS
from lema_core.quantization.block import QuantizedBlock, WeightBlock
from lema_core.quantization.formats import wire_formats
from lema_cuda.library import open_library, raise_for

#: enum lema_dtype
DTYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
#: enum lema_quantized, by the names of wire formats
FORMATS = {"int8": 3, "int4-32": 4, "int4-64": 5, "int4-128": 6, "nf4": 7}
#: of enum lema_compute
_F32, _INT8 = 0, 1
#: of enum lema_error
_SMALL_SCRATCH = 2
#: beyond it, inputs are packed in parts by each product instead of once for all
_MOST_PACKED_BYTES = 16 << 20
#: numbers of a format that the library does not know, and rows of them, that are decoded together
_DECODED_NUMBERS, _LEAST_ROWS = 1 << 20, 96

_address, _int32, _int64 = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64


class _Product(ctypes.Structure):
    """struct lema_product"""

    _fields_ = (
        ("weight", _address),
        ("scales", _address),
        ("rows", _int64),
        ("k", _int64),
        ("n", _int64),
        ("right", _address),
        ("right_stride", _int64),
        ("out", _address),
        ("out_stride", _int64),
        ("factor", _address),
        ("factor_row", _int64),
        ("factor_column", _int64),
        ("inner", _address),
        ("inner_stride", _int64),
        ("rank", _int64),
        ("scratch", _address),
        ("scratch_bytes", _int64),
        ("scale", ctypes.c_float),
        ("dtype", _int32),
        ("compute", _int32),
        ("transposed", _int32),
        ("accumulate", _int32),
        ("apart", _int32),
        ("threads", _int32),
    )


_NO_UPDATE = (None, 0, 0, None, 0, 0)


class _Free:
    """Memory that products pack into, their own and what is packed for several: few pieces, of which one grows where
    none is large enough."""

    def __init__(self) -> None:
        self._pieces: list[Tensor] = []  # the largest last

    def take(self, size: int) -> Tensor:
        if self._pieces:
            memory = self._pieces.pop()
            if memory.numel() >= size:
                return memory
            del memory  # before there is more
        return torch.empty(size, dtype=torch.uint8)

    def give_back(self, memory: Tensor) -> None:
        self._pieces.append(memory)
        if len(self._pieces) > 1:
            self._pieces.sort(key=Tensor.numel)


class _Packed:
    """Inputs [K, N] as the tiles read them, in memory that goes back to ``free`` with this object."""

    def __init__(self, memory: Tensor, k: int, n: int, apart: bool, free: _Free) -> None:
        self.address = memory.data_ptr()
        self.shape = (k, n)
        self.apart = apart
        self._memory = memory
        self._free = free

    def __del__(self) -> None:
        self._free.give_back(self._memory)


class NativeLinear:
    """As :class:`lema_core.ops.linear.LinearKernel`, for fp32 activations on the CPU.

    Quantized blocks in FORMATS are multiplied as they lie; others are decoded a few rows at a time. With
    ``weights_compute="w8a8"`` products of int8 blocks, forward, are of inputs that are rounded to int8 as well, see
    :mod:`lema_core.ops.w8a8`.

    Computes with as many threads as torch; their number changes no bit of the result, nor do the columns beside a
    segment. Not for several callers at once. Raises PluginError for tensors that it does not serve.
    """

    def __init__(self, weights_compute: str = "auto") -> None:
        self._library = open_library()
        self._rounds_inputs = weights_compute == "w8a8"
        self._decoded = torch.empty(0)
        self._free = _Free()

    def packed(self, x_KN: Tensor, segments: Sequence[Columns] = ()) -> Any:
        """What several products with the same right-hand side share, to be given as ``x`` to :meth:`forward` with the
        same ``segments``."""
        k, n = x_KN.shape
        size = self._library.lema_linear_packed_bytes(k, n, bool(segments))
        if size > _MOST_PACKED_BYTES or size == 0:
            return x_KN
        x, stride = _address_and_stride(x_KN, k, n)
        memory = self._free.take(size)
        packed, threads = _Packed(memory, k, n, bool(segments), self._free), torch.get_num_threads()
        raise_for(self._library.lema_linear_pack(x, stride, k, n, packed.address, packed.apart, threads))
        return packed

    def forward(
        self,
        weight_RK: WeightBlock,
        x: Any,
        out_RN: Tensor,
        update: tuple[Tensor, Tensor, float] | None = None,
        segments: Sequence[Columns] = (),
    ) -> None:
        """out = W x, plus scale * B a where ``update`` is (B [R, r] in fp32, a [r, N], scale).

        ``x``: a tensor [K, N], or what :meth:`packed` returned.
        """
        if _is_foreign(weight_RK):
            for some, wide in self._decode(weight_RK):
                part = None if update is None else (update[0][some], *update[1:])
                self.forward(wide, x, out_RN[some], part, segments)
            return
        (rows, k), n = weight_RK.shape, out_RN.shape[1]
        if not isinstance(x, _Packed):
            right = _address_and_stride(x, k, n)
        elif x.shape == (k, n) and x.apart == bool(segments):
            right = x.address, 0
        else:
            found, expected = _packing(x.shape, x.apart), _packing((k, n), bool(segments))
            raise PluginError(f"cpp kernel: inputs are packed as {found}, expected {expected}")
        factor, scale = _NO_UPDATE, 1.0
        if update is not None:
            low_rank, inner, scale = update
            factor = _address_of_factor(low_rank, rows, len(inner)) + _address_and_stride(inner, len(inner), n)
            factor += (len(inner),)
        self._multiply(
            weight_RK,
            n,
            right,
            _address_and_stride(out_RN, rows, n),
            factor,
            scale,
            (self._compute_of(weight_RK), 0, 0, bool(segments)),
        )

    def input_gradient(
        self,
        weight_RK: WeightBlock,
        dy_RN: Tensor,
        dx_KN: Tensor,
        first: bool,
        update: tuple[Tensor, Tensor] | None = None,
        segments: Sequence[Columns] = (),
    ) -> None:
        """dx = W^T dy, or dx += W^T dy when not ``first``; plus A^T da where ``update`` is (A [r, K] in fp32, da
        [r, N])."""
        if _is_foreign(weight_RK):
            for some, wide in self._decode(weight_RK):
                self.input_gradient(wide, dy_RN[some], dx_KN, first and some.start == 0, update, segments)
                update = None
            return
        (rows, k), n = weight_RK.shape, dy_RN.shape[1]
        right, dx = (
            _address_and_stride(dy_RN, rows, n),
            _address_and_stride(dx_KN, k, n),
        )
        factor = _NO_UPDATE
        if update is not None:
            low_rank, inner = update
            factor = _address_of_factor(low_rank, len(inner), k) + _address_and_stride(inner, len(inner), n)
            factor += (len(inner),)
        self._multiply(weight_RK, n, right, dx, factor, 1.0, (_F32, 1, not first, bool(segments)))

    def _multiply(
        self,
        weight_RK: WeightBlock,
        n: int,
        right: tuple[int, int],
        out: tuple[int, int],
        factor: tuple[int | None, int, int, int | None, int, int],
        scale: float,
        flags: tuple[int, int, bool, bool],
    ) -> None:
        weight, scales, dtype = _addresses_of_weight(weight_RK)
        memory = self._free.take(0)
        scratch = memory.data_ptr(), memory.numel()
        threads = torch.get_num_threads()
        product = _Product(
            weight,
            scales,
            *weight_RK.shape,
            n,
            *right,
            *out,
            *factor,
            *scratch,
            scale,
            dtype,
            *flags,
            threads,
        )
        error = self._library.lema_linear(ctypes.byref(product))
        if error == _SMALL_SCRATCH:
            needed = self._library.lema_linear_scratch_bytes(ctypes.byref(product))
            del memory  # before there is more
            memory = torch.empty(needed, dtype=torch.uint8)
            product.scratch, product.scratch_bytes = memory.data_ptr(), needed
            error = self._library.lema_linear(ctypes.byref(product))
        self._free.give_back(memory)
        raise_for(error)

    def _compute_of(self, weight_RK: WeightBlock) -> int:
        """Of enum lema_compute, forward."""
        if not self._rounds_inputs or isinstance(weight_RK, Tensor) or weight_RK.format.name != "int8":
            return _F32
        check_inputs(weight_RK.shape[1])
        return _INT8

    def _decode(self, block: QuantizedBlock) -> Iterator[tuple[slice, Tensor]]:
        """Some rows after the others, in fp32, in memory that the next ones take."""
        rows, k = block.shape
        step = max(_LEAST_ROWS, _DECODED_NUMBERS // max(k, 1))
        if self._decoded.numel() < min(step, rows) * k:
            self._decoded = torch.empty(min(step, rows) * k)
        for start in range(0, rows, step):
            some = slice(start, min(start + step, rows))
            wide = self._decoded[: (some.stop - start) * k].view(-1, k)
            block.decode(wide, start)
            yield some, wide


def check_inputs(k: int) -> None:
    """Raises PluginError for a weight with more inputs than W8A8 sums products of."""
    if k > MOST_INPUTS:
        raise PluginError(
            f"cpp kernel: weights_compute: 'w8a8' sums {MOST_INPUTS} products at most, and a weight has {k} inputs; "
            "use weights_compute=dequant"
        )


def _is_foreign(weight: WeightBlock) -> bool:
    return isinstance(weight, QuantizedBlock) and weight.format.name not in FORMATS


@lru_cache(maxsize=256)
def _layout(name: str, shape: tuple[int, int]) -> tuple[tuple[torch.dtype, tuple[int, ...]], ...]:
    """Dtype and shape of each part of a weight of ``shape`` in the format ``name``."""
    return tuple((part.dtype, part.shape) for part in wire_formats()[name].parts(shape))


def _addresses_of_weight(weight_RK: WeightBlock) -> tuple[int, int | None, int]:
    """Addresses of the numbers and of their scales, and enum lema_dtype or lema_quantized. The library sees addresses
    only: what it would misread stops here."""
    if isinstance(weight_RK, QuantizedBlock):
        name = weight_RK.format.name
        for part, (dtype, shape) in zip(weight_RK.parts, _layout(name, weight_RK.shape), strict=True):
            if part.dtype != dtype or part.shape != shape or not (part.is_cpu and part.is_contiguous()):
                raise PluginError(
                    f"cpp kernel: of a weight in {name} there is {told(part)}, expected contiguous {dtype} "
                    f"{list(shape)} on the CPU"
                )
        codes, scales = weight_RK.parts
        return codes.data_ptr(), scales.data_ptr(), FORMATS[name]
    if weight_RK.dtype not in DTYPES or not weight_RK.is_cpu or not weight_RK.is_contiguous():
        raise PluginError(
            f"cpp kernel: the weight is {told(weight_RK)}, expected contiguous fp32, fp16 or bf16 on the CPU"
        )
    return weight_RK.data_ptr(), None, DTYPES[weight_RK.dtype]


def _address_of_factor(factor: Tensor, rows: int, columns: int) -> tuple[int, int, int]:
    """Address and strides of a low-rank factor, a view of any kind."""
    if factor.shape != (rows, columns) or factor.dtype != torch.float32 or not factor.is_cpu:
        raise PluginError(
            f"cpp kernel: a low-rank factor is {told(factor)}, expected fp32 {[rows, columns]} on the CPU"
        )
    return factor.data_ptr(), *factor.stride()


def _address_and_stride(tensor: Tensor, rows: int, n: int) -> tuple[int, int]:
    """Address of a matrix in rows, and the elements from one row to the next."""
    # torch may give a dimension of one any stride
    stride = tensor.stride(0) if rows > 1 else n
    in_rows = tensor.shape == (rows, n) and (n <= 1 or tensor.stride(1) == 1) and stride >= n
    if not in_rows or tensor.dtype != torch.float32 or not tensor.is_cpu:
        raise PluginError(
            f"cpp kernel: an activation is {told(tensor)}, expected fp32 {[rows, n]} with contiguous rows on the CPU"
        )
    return tensor.data_ptr(), stride


def _packing(shape: tuple[int, int], apart: bool) -> str:
    return f"{list(shape)} {'in' if apart else 'without'} segments"


def told(tensor: Tensor) -> str:
    """What a tensor is, for errors about it."""
    return f"{tensor.dtype} {list(tensor.shape)} with strides {list(tensor.stride())} on {tensor.device}"
