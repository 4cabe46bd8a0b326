"""Reads one tensor's bytes by plain file reads: no mapping, so a file cut meanwhile is an error and not a signal."""

from __future__ import annotations

import ctypes
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from lema_core.checkpoint.segments import TensorInfo
from lema_core.errors import CheckpointError
from lema_core.quantization.formats import WireFormat

_PIECE_ELEMENTS = 1 << 20


def tensor_bytes(tensor: Tensor) -> memoryview:
    """The memory of a contiguous CPU tensor as writable bytes; valid only as long as ``tensor`` lives."""
    assert tensor.is_contiguous() and tensor.device.type == "cpu"
    if tensor.nbytes == 0:
        return memoryview(bytearray())
    return memoryview((ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())).cast("B")


def as_numbers(memory: Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    """Bytes, uint8 and part of aligned memory, as what they stand for; a copy where ``dtype`` cannot be read at that
    address."""
    if memory.storage_offset() % dtype.itemsize:
        memory = memory.clone()
    return memory.view(dtype).view(shape)


def read_tensor(info: TensorInfo) -> Tensor:
    """Read ``info``'s data into a fresh CPU tensor, decoded where it is quantized. Raises CheckpointError when the file
    cannot give all of it."""
    return read_elements(info, 0, prod(info.shape)).view(info.shape)


def read_elements(info: TensorInfo, start: int, count: int) -> Tensor:
    """``count`` elements of ``info``'s data from ``start`` on, row-major, as a fresh CPU tensor [count]; those of a
    quantized one decoded, of whose rows whole ones are read.

    Raises CheckpointError when the file cannot give all of them, and for scales that are none.
    """
    if info.quantized is not None:
        columns = info.shape[1]
        first = start // columns
        rows = read_rows(info, first, -(-(start + count) // columns))
        return rows.flatten()[start - first * columns :][:count]
    tensor = torch.empty(count, dtype=info.dtype)
    _read_into(info, start * info.dtype.itemsize, tensor)
    return tensor


def read_rows(info: TensorInfo, start: int, stop: int) -> Tensor:
    """Rows ``start:stop`` of a quantized tensor, decoded: fp32 [rows, K]. Raises as :func:`read_elements`."""
    form, parts = info.quantized.format, []
    for part in info.quantized.parts:
        row = prod(part.shape[1:])
        parts.append(read_elements(part, start * row, (stop - start) * row).view(stop - start, *part.shape[1:]))
    if (wrong := form.wrong_scales(parts[1:])) is not None:
        raise scales_error(info.segment.path, info.name, form, wrong)
    out = torch.empty(stop - start, info.shape[1])
    form.decode(tuple(parts), out)
    return out


def scales_error(path: Path, name: str, form: WireFormat, reason: str) -> CheckpointError:
    """For scales of which :meth:`WireFormat.wrong_scales` gave a reason."""
    return CheckpointError(
        f"{path}: tensor {name!r}: {form.name}, and its scales hold a number that is {reason}: the file is damaged or "
        "was not quantized well: download it or quantize the model again"
    )


def same_values(one: TensorInfo, other: TensorInfo) -> bool:
    """Whether two tensors are equal, element by element, read in pieces of a few MB."""
    if one.shape != other.shape:
        return False
    elements = prod(one.shape)
    for start in range(0, elements, _PIECE_ELEMENTS):
        count = min(_PIECE_ELEMENTS, elements - start)
        pieces = []
        for info in (one, other):
            piece = read_elements(info, start, count)
            pieces.append(piece.float() if one.dtype != other.dtype else piece)
        if not torch.equal(*pieces):
            return False
    return True


def _read_into(info: TensorInfo, start_bytes: int, tensor: Tensor) -> None:
    """Fill the contiguous ``tensor`` with the bytes of ``info`` from ``start_bytes`` on."""
    path, view, done = info.segment.path, tensor_bytes(tensor), 0
    try:
        with open(path, "rb", buffering=0) as file:
            file.seek(info.segment.offset + start_bytes)
            # one read() returns at most 2 GiB on Linux
            while done < len(view) and (count := file.readinto(view[done:])):
                done += count
    except OSError as error:
        raise CheckpointError(f"{path}: tensor {info.name!r} cannot be read: {error.strerror or error}") from error
    if done != len(view):
        raise CheckpointError(
            f"{path}: tensor {info.name!r}: {len(view)} bytes expected, {done} bytes found; "
            "the file was cut since it was opened: download it again"
        )
