"""Opens checkpoint files and stands in for their tensors: names, dtypes, shapes and places, and no data."""

from __future__ import annotations

import bisect
import pickle
import re
import zipfile
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from lema_core.checkpoint import SafetensorsHeader, Segment, TensorInfo, read_header
from lema_core.checkpoint.manifest import INDEX_NAME, read_stored
from lema_core.checkpoint.quantized import declared
from lema_core.errors import CheckpointError
from lema_core.low_memory.tensors import is_extra_state, storage_id

_ZIP_START = b"PK\x03\x04"
_PICKLE_START = b"\x80"
_SAVE_AGAIN = "save it again with torch.save(module.state_dict(), path)"
#: a zip entry's data lies behind 30 bytes, its name and at most so many bytes of extra field
_ZIP_ENTRY_BYTES, _ZIP_EXTRA_BYTES = 30, 1 << 16


@dataclass
class CheckpointFile:
    """``entries`` is a state dict whose tensors are on the meta device; ``segments`` tells where the bytes of their
    storages are, by :func:`storage_id`, with the tensor's name. Views of a stand-in, as hooks that rename or split make
    them, lead to the same bytes. ``safetensors``: from a format that stores tied tensors once. A state dict in memory
    has neither ``path`` nor segments."""

    path: Path | None
    safetensors: bool
    entries: OrderedDict[str, Any]
    segments: dict[int, tuple[str, Segment]] = field(default_factory=dict)


def open_checkpoint(path: Path) -> CheckpointFile:
    """A safetensors file, a folder of them (or its index), or what ``torch.save`` wrote of a state dict.

    Raises CheckpointError naming the file: missing, cut, malformed, a pickle with code, or no state dict.
    """
    folder = path.parent if path.name == INDEX_NAME else path
    if folder.is_dir():
        stored = read_stored(folder)
        return _from_infos(path, stored.tensors, stored.headers)
    try:
        with open(path, "rb", buffering=0) as file:
            start = file.read(len(_ZIP_START))
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror or error}") from error
    if start == _ZIP_START:
        return _from_zip(path)
    if start.startswith(_PICKLE_START) and path.suffix != ".safetensors":
        raise CheckpointError(f"{path}: a pickle without a zip around it, as torch wrote before 1.6; {_SAVE_AGAIN}")
    header = read_header(path)
    return _from_infos(path, header.tensors, [header])


def _from_infos(path: Path, infos: Mapping[str, TensorInfo], headers: Iterable[SafetensorsHeader]) -> CheckpointFile:
    for name, said in declared(headers).items():
        raise CheckpointError(
            f"{said.path}: tensor {name!r}: {said.format}, which only lema computes with: a module gets plain numbers; "
            "use the model's unquantized files"
        )
    opened = CheckpointFile(path, True, OrderedDict())
    for name, info in infos.items():
        stand_in = torch.empty(info.shape, dtype=info.dtype, device="meta")
        opened.entries[name] = stand_in
        opened.segments[storage_id(stand_in)] = (name, info.segment)
    return opened


def _from_zip(path: Path) -> CheckpointFile:
    records = _records(path)
    entries = _unpickle(path)
    opened = CheckpointFile(path, False, OrderedDict(entries))
    if (metadata := getattr(entries, "_metadata", None)) is not None:
        opened.entries._metadata = metadata  # type: ignore[attr-defined]
    tensors: list[tuple[str, Tensor]] = []
    for name, value in entries.items():
        leaves = torch.utils._pytree.tree_leaves(value)
        tensors += [(name, leaf) for leaf in leaves if isinstance(leaf, Tensor)]
    for name, tensor in tensors:
        where = f"{path}: tensor {name!r}"
        if type(tensor) not in (Tensor, Parameter) or tensor.layout != torch.strided:
            raise CheckpointError(f"{where}: {type(tensor).__name__}, {tensor.layout}: only plain tensors are read")
        if tensor.is_conj() or tensor.is_neg():
            raise CheckpointError(f"{where}: saved as a lazy conjugate; save it as .resolve_conj().resolve_neg()")
        storage = tensor.untyped_storage()
        if storage_id(tensor) not in opened.segments and storage.nbytes():
            segment = Segment(path, storage._checkpoint_offset, storage.nbytes())  # type: ignore[attr-defined]
            _check_record(where, segment, records)
            opened.segments[storage_id(tensor)] = (name, segment)
    return opened


def _records(path: Path) -> list[zipfile.ZipInfo]:
    """What the zip file lists, in the order it lies there."""
    try:
        with zipfile.ZipFile(path) as archive:
            records = sorted(archive.infolist(), key=lambda record: record.header_offset)
            names = {record.filename.partition("/")[2]: record for record in records}
            order = archive.read(names["byteorder"]) if "byteorder" in names else b"little"
    except Exception as error:  # a damaged one raises anything, UnicodeDecodeError among them
        raise CheckpointError(f"{path}: a cut or damaged torch.save file ({error}): copy it again") from error
    if "constants.pkl" in names:
        raise CheckpointError(f"{path}: a TorchScript archive, which is a program; {_SAVE_AGAIN}")
    if "data.pkl" not in names:
        raise CheckpointError(f"{path}: a zip file, but not of torch.save: it holds no data.pkl")
    if order != b"little":
        raise CheckpointError(f"{path}: byte order {order.decode(errors='replace')!r} found, 'little' expected")
    return records


def _check_record(where: str, segment: Segment, records: list[zipfile.ZipInfo]) -> None:
    """That ``segment`` is the data of one record: nothing that a pickle says is read from elsewhere."""
    number = bisect.bisect_right(records, segment.offset, key=lambda record: record.header_offset) - 1
    record = records[max(0, number)]
    skipped = segment.offset - record.header_offset - _ZIP_ENTRY_BYTES - len(record.filename.encode())
    if record.compress_type != zipfile.ZIP_STORED:
        raise CheckpointError(f"{where}: compressed, as torch.save never does; {_SAVE_AGAIN}")
    if not 0 <= skipped < _ZIP_EXTRA_BYTES or record.file_size != segment.nbytes:
        raise CheckpointError(
            f"{where}: {segment.nbytes} bytes expected, {record.file_size} found in {record.filename}; "
            "the file is damaged: copy it again"
        )


def _unpickle(path: Path) -> Mapping[str, Any]:
    """The pickled state dict with its tensors on meta; runs no code that the file brings."""
    try:
        found = torch.load(path, map_location="meta", weights_only=True)
    except pickle.UnpicklingError as error:
        called = re.search(r"GLOBAL ([\w.]+)", str(error))
        what = f"a pickle that calls {called[1]}" if called else " ".join(str(error).split())[:200]
        raise CheckpointError(f"{path}: {what}; code is not run, only tensors are read: {_SAVE_AGAIN}") from error
    except Exception as error:  # a damaged pickle raises anything
        raise CheckpointError(f"{path}: damaged: {' '.join(str(error).split())[:200]}; copy it again") from error
    if not isinstance(found, Mapping) or not all(isinstance(name, str) for name in found):
        raise CheckpointError(
            f"{path}: {type(found).__name__} found, a dict of names to tensors expected; {_SAVE_AGAIN}"
        )
    inner = [name for name, value in found.items() if isinstance(value, Mapping) and not is_extra_state(name)]
    if inner and not any(isinstance(value, Tensor) for value in found.values()):
        raise CheckpointError(
            f"{path}: dicts and no tensors are at its top ({', '.join(map(repr, inner[:4]))}); save only the state dict"
        )
    return found
