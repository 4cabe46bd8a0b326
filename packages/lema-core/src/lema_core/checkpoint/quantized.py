"""Quantized weights among the tensors of files: payload and scales become one tensor of what they stand for.

In a file the payload has the weight's name, and what belongs to it that name and a suffix (``NAME.scale``). The file's
``__metadata__`` says so under ``lema.quantization``: JSON of ``{NAME: {"format": "int4-32", "shape": [R, K]}}``. Int8
with fp32 ``NAME.scale`` [R] is known without; packed numbers are not, as nothing tells their shape. ``config.json`` has
``quantization_config`` with ``"quant_method": "lema"``.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from lema_core.checkpoint.header import DTYPE_NAMES, SafetensorsHeader
from lema_core.checkpoint.segments import Quantized, TensorInfo
from lema_core.errors import CheckpointError, ConfigError
from lema_core.plugins import get_plugin_manager
from lema_core.quantization.formats import WireFormat, wire_formats

METADATA_KEY = "lema.quantization"
SCALE_SUFFIX = ".scale"
QUANT_METHOD, QUANT_VERSION = "lema", 1

_QUANTIZE_AGAIN = "quantize the model again, or use its unquantized files"


@dataclass(frozen=True)
class Declared:
    """What the metadata of ``path`` says of one tensor. ``shape``: [R, K]."""

    path: Path
    format: str
    shape: tuple[int, int]


def quantization_metadata(tensors: Mapping[str, tuple[WireFormat, tuple[int, int]]]) -> dict[str, str]:
    """What a file's ``__metadata__`` says of the quantized ``tensors`` in it, by name."""
    entries = {name: {"format": form.name, "shape": list(shape)} for name, (form, shape) in tensors.items()}
    return {METADATA_KEY: json.dumps(entries)} if entries else {}


def declared(headers: Iterable[SafetensorsHeader]) -> dict[str, Declared]:
    """What files say of their quantized tensors, by name. Raises CheckpointError for what is malformed, and where two
    of them differ."""
    found: dict[str, Declared] = {}
    for header in headers:
        text = header.metadata.get(METADATA_KEY)
        for name, entry in _entries(header.path, text).items() if text is not None else ():
            this = Declared(header.path, *_format_and_shape(header.path, name, entry))
            other = found.setdefault(name, this)
            if (other.format, other.shape) != (this.format, this.shape):
                raise CheckpointError(
                    f"{header.path}: tensor {name!r}: {this.format} {list(this.shape)} by {METADATA_KEY}, and "
                    f"{other.format} {list(other.shape)} by that of {other.path.name}; {_QUANTIZE_AGAIN}"
                )
    return found


def _entries(path: Path, text: str) -> dict[str, Any]:
    try:
        entries = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: {METADATA_KEY} is not valid JSON ({error}); {_QUANTIZE_AGAIN}") from error
    if not isinstance(entries, dict):
        raise CheckpointError(
            f"{path}: {METADATA_KEY}: a map of names expected, {type(entries).__name__} found; {_QUANTIZE_AGAIN}"
        )
    return entries


def _format_and_shape(path: Path, name: str, entry: object) -> tuple[str, tuple[int, int]]:
    where = f"{path}: tensor {name!r}: {METADATA_KEY}"
    if not isinstance(entry, dict) or not isinstance(entry.get("format"), str):
        raise CheckpointError(f"{where} names no format; {_QUANTIZE_AGAIN}")
    shape = entry.get("shape")
    if not isinstance(shape, list) or not all(type(size) is int and size >= 0 for size in shape):
        raise CheckpointError(
            f"{where} says {entry['format']} and no shape, without which packed numbers cannot be read; "
            f"{_QUANTIZE_AGAIN}"
        )
    return entry["format"], tuple(shape)


def folded(tensors: Mapping[str, TensorInfo], said: Mapping[str, Declared]) -> dict[str, TensorInfo]:
    """``tensors`` of files with each quantized weight as one, and its scales gone; ``said``: from :func:`declared`.

    Raises CheckpointError naming tensor and reason: no scales, others than the format has, plain numbers.
    """
    quantized: dict[str, TensorInfo] = {}
    for name, each in said.items():
        quantized[name] = _quantized(tensors, name, each.path, _wire_format(each, name), each.shape)
    for name, info in tensors.items():
        scale = tensors.get(name + SCALE_SUFFIX)
        if name not in quantized and info.dtype == torch.int8 and scale is not None:
            quantized[name] = _quantized(tensors, name, info.segment.path, wire_formats()["int8"], info.shape)
    beside = {part.name for info in quantized.values() for part in info.quantized.parts[1:]}
    return {name: quantized.get(name, info) for name, info in tensors.items() if name not in beside}


def _wire_format(said: Declared, name: str) -> WireFormat:
    """Raises CheckpointError for a format that nothing installed knows."""
    try:
        return get_plugin_manager().wire_format(said.format)
    except ConfigError as error:
        raise CheckpointError(f"{said.path}: tensor {name!r}: {error}") from error


def _quantized(
    tensors: Mapping[str, TensorInfo], name: str, path: Path, form: WireFormat, shape: tuple[int, ...]
) -> TensorInfo:
    where = f"{path}: tensor {name!r}: {form.name}"
    if name not in tensors:
        raise CheckpointError(f"{where} by {METADATA_KEY}, and the files do not hold it; {_QUANTIZE_AGAIN}")
    if (reason := form.refuses(shape)) is not None:
        raise CheckpointError(f"{where} cannot be: {reason}; {_QUANTIZE_AGAIN}")
    parts = []
    for expected in form.parts(shape):
        found = tensors.get(name + expected.suffix)
        if found is None:
            raise CheckpointError(
                f"{where}, and {name + expected.suffix!r}, its scales, are not in the files: the numbers mean nothing "
                f"without; {_QUANTIZE_AGAIN}"
            )
        if (found.dtype, found.shape) != (expected.dtype, expected.shape):
            what = f"{name + expected.suffix!r}: " if expected.suffix else ""
            plain = "plain numbers, " if found.name == name and found.dtype.is_floating_point else ""
            raise CheckpointError(
                f"{where} {list(shape)}: {what}{DTYPE_NAMES[expected.dtype]} {list(expected.shape)} expected, {plain}"
                f"{DTYPE_NAMES[found.dtype]} {list(found.shape)} found; {_QUANTIZE_AGAIN}"
            )
        parts.append(found)
    return TensorInfo(name, torch.float32, shape, parts[0].segment, Quantized(form, tuple(parts)))


def check_config(path: Path, config: Mapping[str, Any], tensors: Mapping[str, TensorInfo]) -> None:
    """What ``config``, read from ``path``, says of the quantization of ``tensors``. Raises CheckpointError for another
    library's, and where it says that weights are quantized which are not."""
    found = config.get("quantization_config", config.get("compression_config"))
    if found is None:
        return
    fields = found if isinstance(found, dict) else {}
    method = fields.get("quant_method", fields.get("quantization_type"))
    strange = next((name for name, info in tensors.items() if not _is_plain(info)), next(iter(tensors), "none"))
    if method != QUANT_METHOD:
        raise CheckpointError(
            f"{path}: quantization_config: quant_method {QUANT_METHOD!r} expected, {method!r} found: tensors such as "
            f"{strange!r} are in a format that is not read; use the model's unquantized files, and weights_bits=8 or 4"
        )
    if fields.get("version") != QUANT_VERSION:
        raise CheckpointError(
            f"{path}: quantization_config: version {QUANT_VERSION} expected, {fields.get('version')!r} found; use the "
            "version of lema that wrote it"
        )
    if all(info.quantized is None for info in tensors.values()):
        reason = unreadable(tensors[strange]) if strange in tensors else None
        raise CheckpointError(
            f"{path}: quantization_config says {fields.get('format')!r}, and no tensor of the files is quantized: "
            f"{strange!r} holds {reason or f'plain numbers: take quantization_config out, or {_QUANTIZE_AGAIN}'}"
        )


def _is_plain(info: TensorInfo) -> bool:
    return info.dtype.is_floating_point and info.dtype.itemsize > 1


def unreadable(info: TensorInfo) -> str | None:
    """Why a tensor of integers is no weight, in words that end an error; None for other dtypes."""
    if info.dtype == torch.int8:
        scales = info.name + SCALE_SUFFIX
        return f"quantized numbers, and {scales!r}, their scales, are not in the files: {_QUANTIZE_AGAIN}"
    if info.dtype == torch.uint8:
        return (
            f"packed numbers, and no {METADATA_KEY} in the file's metadata says their format and shape: "
            f"{_QUANTIZE_AGAIN}"
        )
    return None
