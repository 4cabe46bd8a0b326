"""What a merged model's folder will hold, tensor by tensor and file by file, before anything of it is written."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch

from lema_core.atomic import identity_of
from lema_core.checkpoint import Manifest, SafetensorsHeader, TensorInfo, read_header, read_hf_config
from lema_core.checkpoint.beside import files_beside
from lema_core.checkpoint.manifest import INDEX_NAME, SINGLE_NAME
from lema_core.checkpoint.quantized import METADATA_KEY
from lema_core.errors import CheckpointError
from lema_train.merge import Change, Changes

_FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class PlannedTensor:
    """``source`` with ``changes`` made, rounded to ``dtype``, under ``name``."""

    name: str
    source: TensorInfo
    dtype: torch.dtype
    changes: tuple[Change, ...]

    @property
    def nbytes(self) -> int:
        return prod(self.source.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class PlannedFile:
    """One safetensors file; tensors in the order in which they are written."""

    name: str
    tensors: tuple[PlannedTensor, ...]
    metadata: Mapping[str, str]

    @property
    def nbytes(self) -> int:
        """Bytes of tensor data."""
        return sum(tensor.nbytes for tensor in self.tensors)

    @property
    def needed_bytes(self) -> int:
        """Disk space at most: header and index take 1 kB a tensor, far more than they need."""
        return self.nbytes + 1000 * len(self.tensors) + 10_000


@dataclass(frozen=True)
class MergePlan:
    """``files`` and, if there is one, their ``index``; ``config`` is what config.json will be where that changes;
    ``copied`` are paths below the base's ``folder``."""

    folder: Path
    files: tuple[PlannedFile, ...]
    index: Mapping[str, Any] | None
    config: Mapping[str, Any] | None
    copied: tuple[Path, ...]

    @property
    def tensors(self) -> Iterator[PlannedTensor]:
        return (tensor for file in self.files for tensor in file.tensors)

    @property
    def names(self) -> set[str]:
        """What the folder may hold; an earlier one with no more than that is replaced."""
        beside = {path.parts[0] for path in self.copied}
        return {file.name for file in self.files} | beside | {INDEX_NAME, "config.json"}

    @property
    def nbytes(self) -> int:
        """Bytes of tensor data."""
        return sum(file.nbytes for file in self.files)

    @property
    def needed_bytes(self) -> int:
        """Disk space at most."""
        beside = sum((self.folder / path).stat().st_size for path in self.copied)
        return sum(file.needed_bytes for file in self.files) + beside + 1_000_000


def plan_merge(
    manifest: Manifest, changes: Changes, dtype: torch.dtype | None = None, max_shard_bytes: int | None = None
) -> MergePlan:
    """Lay out the base in ``manifest`` with ``changes`` made.

    ``dtype`` is what weights are stored as (fp64, fp32, fp16 and bf16 ones; None: each as it was). ``max_shard_bytes``
    deals tensors out over files of at most so many bytes, as transformers does; None keeps the base's files. Of a
    quantized base the numbers that it stands for are merged into, and stored as ``dtype``.
    Raises CheckpointError when a file of the base cannot be read, and for a quantized one without a ``dtype``.
    """
    _check_quantized(manifest, dtype)

    def planned(name: str, source: TensorInfo) -> PlannedTensor:
        stored = dtype if dtype is not None and source.dtype in _FLOATS else source.dtype
        return PlannedTensor(name, source, stored, changes.tensors.get(name, ()))

    headers = [read_header(path) for path in _paths(manifest)]
    said = [{k: text for k, text in header.metadata.items() if k != METADATA_KEY} for header in headers]
    metadata = {key: text for each in reversed(said) for key, text in each.items()} | {"format": "pt"}
    added = [planned(name, source) for name, source in changes.added.items()]
    if max_shard_bytes is None:
        kept = [[planned(info.name, info) for info in _in_file(header, manifest)] for header in headers]
        kept[-1] += added
        own = [each | {"format": "pt"} for each in said]
        names = [header.path.name for header in headers]
        files = [PlannedFile(*each) for each in zip(names, map(tuple, kept), own, strict=True)]
        indexed = _is_indexed(manifest, names)
        if not indexed:
            files = [PlannedFile(SINGLE_NAME, files[0].tensors, files[0].metadata)]
    else:
        ordered = [info for path in _paths(manifest) for info in _by_offset(manifest.tensors, path)]
        shards = _deal([*(planned(info.name, info) for info in ordered), *added], max_shard_bytes)
        indexed = len(shards) > 1
        names = [f"model-{i:05}-of-{len(shards):05}.safetensors" for i in range(1, len(shards) + 1)]
        files = [
            PlannedFile(name if indexed else SINGLE_NAME, tuple(shard), metadata)
            for name, shard in zip(names, shards, strict=True)
        ]
    config = _config(manifest.folder, changes.config, dtype)
    copied = [path for path in files_beside(manifest.folder) if config is None or path != Path("config.json")]
    return MergePlan(manifest.folder, tuple(files), _index(manifest, files) if indexed else None, config, tuple(copied))


def check_target_file(path: Path, sources: Iterable[Path]) -> Path:
    """The file that ``path`` is, links followed, when it may be written: it is none of ``sources``, under whatever
    name, and no folder. Raises CheckpointError otherwise."""
    final = Path(os.path.realpath(path))
    if final.is_dir():
        raise CheckpointError(f"{path}: a file to write expected, a folder found: give the name of a file")
    for source in sources if final.exists() else ():
        if identity_of(final) == identity_of(source):
            raise CheckpointError(f"{path} is {source}, which is read: give another file to write")
    return final


def _paths(manifest: Manifest) -> list[Path]:
    """Files with nothing but scales in them are none of a merged model's."""
    return sorted({info.segment.path for info in manifest.tensors.values()})


def _check_quantized(manifest: Manifest, dtype: torch.dtype | None) -> None:
    first = next((info for info in manifest.tensors.values() if info.quantized is not None), None)
    if first is not None and dtype is None:
        raise CheckpointError(
            f"{first.segment.path}: tensor {first.name!r} is {first.storage}, too coarse for what was trained: give "
            "the unquantized model as model_name_or_path, or merge_dtype=bfloat16 to merge into what it stands for"
        )


def _in_file(header: SafetensorsHeader, manifest: Manifest) -> Iterator[TensorInfo]:
    """The tensors of one file, also those that no index names; quantized ones as what they stand for."""
    quantized = [info for info in manifest.tensors.values() if info.quantized is not None]
    scales = {part.name for info in quantized for part in info.quantized.parts[1:]}
    whole = {info.name: info for info in quantized}
    return (whole.get(info.name, info) for info in _by_offset(header.tensors) if info.name not in scales)


def _by_offset(tensors: Mapping[str, TensorInfo], path: Path | None = None) -> list[TensorInfo]:
    infos = (info for info in tensors.values() if path in (None, info.segment.path))
    return sorted(infos, key=lambda info: (info.segment.offset, info.segment.nbytes))


def _is_indexed(manifest: Manifest, names: Sequence[str]) -> bool:
    """Whether the base's files are several, or one that is read because its index names it."""
    return len(names) > 1 or (names[0] != SINGLE_NAME and (manifest.folder / INDEX_NAME).is_file())


def _deal(tensors: Sequence[PlannedTensor], max_shard_bytes: int) -> list[list[PlannedTensor]]:
    """Tensors in order, a new file where the next one does not fit (``split_state_dict_into_shards_factory`` of
    huggingface_hub): one that is too large by itself gets its own, and files around it go on filling up."""
    shards: list[list[PlannedTensor]] = []
    filling: list[PlannedTensor] = []
    for tensor in tensors:
        if tensor.nbytes > max_shard_bytes:
            shards.append([tensor])
            continue
        if filling and sum(each.nbytes for each in filling) + tensor.nbytes > max_shard_bytes:
            shards.append(filling)
            filling = []
        filling.append(tensor)
    return [*shards, filling] if filling else shards


def _index(manifest: Manifest, files: Sequence[PlannedFile]) -> dict[str, Any]:
    weight_map = {tensor.name: file.name for file in files for tensor in file.tensors}
    sizes = {tensor.name: (tensor.nbytes, prod(tensor.source.shape)) for file in files for tensor in file.tensors}
    metadata: dict[str, Any] = {}
    if _is_indexed(manifest, [path.name for path in _paths(manifest)]) and (manifest.folder / INDEX_NAME).is_file():
        metadata = json.loads((manifest.folder / INDEX_NAME).read_text(encoding="utf-8")).get("metadata") or {}
    metadata["total_size"] = sum(nbytes for nbytes, _ in sizes.values())
    if "total_parameters" in metadata:
        metadata["total_parameters"] = sum(numbers for _, numbers in sizes.values())
    return {"metadata": metadata, "weight_map": dict(sorted(weight_map.items()))}


def _config(folder: Path, changed: Mapping[str, Any], dtype: torch.dtype | None) -> dict[str, Any] | None:
    config = read_hf_config(folder)
    edited = config | changed
    if config.get("quantization_config") is not None:
        # what is written is not
        del edited["quantization_config"]
    if dtype is not None:
        # the older of the two names is the one that all versions of transformers read
        spelled = [name for name in ("dtype", "torch_dtype") if name in config] or ["torch_dtype"]
        edited |= dict.fromkeys(spelled, str(dtype).removeprefix("torch."))
    return None if edited == config else edited
