"""Reads and checks the header of a safetensors file (https://github.com/huggingface/safetensors#format).

A file is ``<u64 little-endian N> <N bytes of JSON, space-padded> <data>``. The JSON maps a name to ``dtype``, ``shape``
and ``data_offsets`` (begin, end; counted from the first data byte), and may hold ``__metadata__``, a map of strings.
The data is indexed without overlap and without holes and ends where the file does.

Everything is checked here, once, so that nothing later can read outside a file. A length is compared with the file's
size before anything of that length is allocated.
"""

from __future__ import annotations

import json
import os
import stat
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch

from lema_core.checkpoint.segments import Segment, TensorInfo
from lema_core.errors import CheckpointError

#: the format's own limit on the JSON part
MAX_HEADER_BYTES = 100_000_000
LENGTH_BYTES = 8

DTYPES: dict[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "F8_E8M0": torch.float8_e8m0fnu,
    "C64": torch.complex64,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
DTYPE_NAMES: dict[torch.dtype, str] = {dtype: name for name, dtype in DTYPES.items()}

_AGAIN = "the file is damaged or its download was cut: download it again"


@dataclass(frozen=True)
class SafetensorsHeader:
    """The checked header of one file: ``tensors`` by name, and ``__metadata__``, {} when absent."""

    path: Path
    tensors: dict[str, TensorInfo]
    metadata: dict[str, str]


def read_header(path: Path) -> SafetensorsHeader:
    """Read and check ``path``'s header. Raises CheckpointError naming file, tensor, and bytes expected and found."""
    raw, file_bytes = _read_raw(path)
    entries = _parse_json(path, raw)
    metadata = _check_metadata(path, entries.pop("__metadata__", {}))
    data_start = LENGTH_BYTES + len(raw)
    tensors = {name: _check_entry(path, name, entry, data_start) for name, entry in entries.items()}
    _check_coverage(path, tensors, data_start, file_bytes)
    return SafetensorsHeader(path, tensors, metadata)


def _read_raw(path: Path) -> tuple[bytes, int]:
    """The JSON bytes and the file's size; the length is checked against that size before anything is allocated."""
    try:
        with open(path, "rb", buffering=0) as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise CheckpointError(f"{path}: not a regular file")
            file_bytes = status.st_size
            prefix = file.read(LENGTH_BYTES)
            if len(prefix) < LENGTH_BYTES:
                raise CheckpointError(
                    f"{path}: expected at least {LENGTH_BYTES} bytes of header length, found {len(prefix)}; {_AGAIN}"
                )
            if prefix == b"version ":
                raise CheckpointError(f"{path}: a Git LFS pointer, not the weights; fetch them with 'git lfs pull'")
            header_bytes = int.from_bytes(prefix, "little")
            if header_bytes > MAX_HEADER_BYTES:
                raise CheckpointError(
                    f"{path}: header of at most {MAX_HEADER_BYTES} bytes expected, {header_bytes} found; {_AGAIN}"
                )
            if LENGTH_BYTES + header_bytes > file_bytes:
                raise CheckpointError(
                    f"{path}: {LENGTH_BYTES + header_bytes} bytes of header expected, {file_bytes} found; {_AGAIN}"
                )
            raw = file.read(header_bytes)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror or error}") from error
    if len(raw) != header_bytes:
        raise CheckpointError(f"{path}: header of {header_bytes} bytes expected, {len(raw)} bytes found; {_AGAIN}")
    return raw, file_bytes


def _parse_json(path: Path, raw: bytes) -> dict[str, Any]:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        result = dict(pairs)
        if len(result) != len(pairs):
            names = [name for name, _ in pairs]
            twice = next(name for name in names if names.count(name) > 1)
            raise CheckpointError(f"{path}: header names {twice!r} twice; {_AGAIN}")
        return result

    if not raw.startswith(b"{"):
        raise CheckpointError(
            f"{path}: header does not begin with '{{': not a safetensors file, or damaged: download it again"
        )
    try:
        entries = json.loads(raw.decode("utf-8"), object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: header is not valid JSON ({error}); {_AGAIN}") from error
    return entries


def _check_metadata(path: Path, metadata: object) -> dict[str, str]:
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise CheckpointError(f"{path}: header's __metadata__ is not a map of strings; {_AGAIN}")
    return metadata


def _is_size(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _check_entry(path: Path, name: str, entry: object, data_start: int) -> TensorInfo:
    where = f"{path}: tensor {name!r}"
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        raise CheckpointError(f"{where}: header entry is not dtype, shape and data_offsets; {_AGAIN}")
    dtype_name, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    dtype = DTYPES.get(dtype_name) if isinstance(dtype_name, str) else None
    if dtype is None:
        raise CheckpointError(f"{where}: dtype {dtype_name!r} is not one of {', '.join(DTYPES)}")
    if not isinstance(shape, list) or not all(_is_size(size) for size in shape):
        raise CheckpointError(f"{where}: shape {shape!r} is not a list of sizes; {_AGAIN}")
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(_is_size(offset) for offset in offsets):
        raise CheckpointError(f"{where}: data_offsets {offsets!r} are not two byte positions; {_AGAIN}")
    begin, end = offsets
    expected_bytes = prod(shape) * dtype.itemsize
    if end - begin != expected_bytes:
        raise CheckpointError(
            f"{where}: {expected_bytes} bytes expected for {dtype_name} {shape}, {end - begin} found; {_AGAIN}"
        )
    return TensorInfo(name, dtype, tuple(shape), Segment(path, data_start + begin, expected_bytes))


def _check_coverage(path: Path, tensors: dict[str, TensorInfo], data_start: int, file_bytes: int) -> None:
    """Tensors follow each other without overlap or hole, and the last one ends where the file does."""
    position, previous = data_start, "the header"
    for info in sorted(tensors.values(), key=lambda info: (info.segment.offset, info.segment.nbytes)):
        offset = info.segment.offset
        if offset != position:
            what = "overlaps" if offset < position else "leaves a hole after"
            raise CheckpointError(
                f"{path}: tensor {info.name!r} {what} {previous}: byte {position} expected, {offset} found; {_AGAIN}"
            )
        position, previous = offset + info.segment.nbytes, f"tensor {info.name!r}"
    if position != file_bytes:
        raise CheckpointError(f"{path}: {position} bytes expected, {file_bytes} bytes found; {_AGAIN}")
