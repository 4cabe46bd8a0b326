"""The map of all tensors in a model folder, and the folder's JSON files.

Which files count, as for transformers: ``model.safetensors`` alone, also beside an index that does not name it; else
``model.safetensors.index.json`` and the shards it names. Without an index: every ``*.safetensors``, when no two of them
hold the same name.
"""

from __future__ import annotations

import json
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lema_core.checkpoint.describe import describe_layers, layer_number, shorten
from lema_core.checkpoint.header import SafetensorsHeader, read_header
from lema_core.checkpoint.quantized import check_config, declared, folded
from lema_core.checkpoint.segments import TensorInfo
from lema_core.errors import CheckpointError

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
#: far above any real index or config; a lying file is not read into memory
_MAX_JSON_BYTES = 100_000_000


@dataclass(frozen=True)
class Manifest:
    """Every tensor of the checkpoint in ``folder``, by the name its file gives it; a quantized one with its scales, by
    the name of what it stands for."""

    folder: Path
    tensors: dict[str, TensorInfo]

    @property
    def paths(self) -> list[Path]:
        """The files that the tensors are in."""
        return sorted({each.segment.path for info in self.tensors.values() for each in info.stored})


@dataclass(frozen=True)
class StoredTensors:
    """Every tensor of files as it is in them, and the ``headers`` of these."""

    tensors: dict[str, TensorInfo]
    headers: tuple[SafetensorsHeader, ...]


def read_hf_config(folder: Path) -> dict[str, Any]:
    """``config.json`` as a dict. Raises CheckpointError naming what is missing or malformed."""
    check_folder(folder)
    path = folder / "config.json"
    if not path.is_file():
        raise CheckpointError(
            f"{folder}: no config.json in this folder; a model folder holds config.json and *.safetensors"
        )
    return _read_json_object(path)


def read_generation_config(folder: Path) -> dict[str, Any]:
    """``generation_config.json`` as a dict, {} when there is none. Raises CheckpointError when it is malformed."""
    path = folder / "generation_config.json"
    return _read_json_object(path) if path.is_file() else {}


def read_manifest(folder: Path) -> Manifest:
    """Read and check the headers of all weight files of ``folder``. No tensor data is read.

    Raises CheckpointError: no weights, only pickled ``.bin`` weights, a damaged file, shards or tensors that the index
    names and the folder lacks, one tensor name in two files; weights that another library quantized, or that are not as
    files or config.json say.
    """
    stored = read_stored(folder)
    tensors = folded(stored.tensors, declared(stored.headers))
    if (folder / "config.json").is_file():
        check_config(folder / "config.json", read_hf_config(folder), tensors)
    return Manifest(folder, tensors)


def read_file_manifest(path: Path) -> Manifest:
    """:func:`read_manifest` of the tensors in one file of a folder."""
    header = read_header(path)
    return Manifest(path.parent, folded(header.tensors, declared([header])))


def read_stored(folder: Path) -> StoredTensors:
    """The tensors of all weight files of ``folder`` as they lie there, whatever they mean. Raises CheckpointError as
    :func:`read_manifest` does of files."""
    files = weight_files(folder)
    index = folder / INDEX_NAME
    if index.is_file():
        shards = _shards(index)
        single = folder / SINGLE_NAME
        if single.is_file() and SINGLE_NAME not in shards:
            others = sorted(path.name for path in folder.glob("*.safetensors") if path != single)
            warnings.warn(
                f"{folder}: {SINGLE_NAME} alone is read, as transformers does, and not {INDEX_NAME} with its "
                f"shards; not read: {shorten(others) or 'none'}; remove one of the two sets of weights",
                stacklevel=2,
            )
            header = read_header(single)
            return StoredTensors(header.tensors, (header,))
        return _read_shards(folder, index, shards)
    tensors = {}
    headers = tuple(map(read_header, files))
    for path, header in zip(files, headers, strict=True):
        for name, info in header.tensors.items():
            if name in tensors:
                raise CheckpointError(
                    f"{folder}: {tensors[name].segment.path.name} and {path.name} both hold tensor {name!r} and no "
                    f"{INDEX_NAME} says which counts; remove one of the files"
                )
            tensors[name] = info
    return StoredTensors(tensors, headers)


def check_folder(folder: Path) -> None:
    """Raise CheckpointError unless ``folder`` is an existing folder."""
    if folder.is_dir():
        return
    if folder.exists():
        raise CheckpointError(
            f"{folder}: a file where a model folder is expected; give the folder that holds config.json"
        )
    raise CheckpointError(f"{folder}: no such folder; a model folder holds config.json and *.safetensors")


def weight_files(folder: Path) -> list[Path]:
    """The weight files of ``folder`` (the index, when it has one). Raises CheckpointError when there are none."""
    check_folder(folder)
    index = folder / INDEX_NAME
    if index.is_file():
        return [index]
    files = sorted(path for path in folder.glob("*.safetensors") if not path.name.startswith("."))
    if files:
        return files
    pickled = sorted(path.name for path in folder.glob("*.bin"))
    if pickled:
        raise CheckpointError(
            f"{folder}: only pickled weights ({shorten(pickled, 2)}), not read as a pickle runs code; "
            "convert once with transformers: AutoModelForCausalLM.from_pretrained(folder).save_pretrained(new_folder)"
        )
    raise CheckpointError(
        f"{folder}: no *.safetensors in this folder; a model folder holds config.json and *.safetensors"
    )


def _read_json_object(path: Path) -> dict[str, Any]:
    try:
        size_bytes = path.stat().st_size
        if size_bytes > _MAX_JSON_BYTES:
            raise CheckpointError(f"{path}: {size_bytes} bytes, at most {_MAX_JSON_BYTES} expected of a JSON file")
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: not valid JSON ({error}); download it again") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: a JSON object expected, {type(value).__name__} found; download it again")
    return value


def _shards(index: Path) -> dict[str, list[str]]:
    """The names of the tensors that each file of the index holds."""
    weight_map = _read_json_object(index).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
        raise CheckpointError(f"{index}: weight_map is not a map of tensor names to file names; download it again")
    shards: dict[str, list[str]] = {}
    for name, file in weight_map.items():
        if not file or Path(file).name != file or "\\" in file:
            raise CheckpointError(
                f"{index}: tensor {name!r} is mapped to {file!r}; a file name in the same folder expected"
            )
        shards.setdefault(file, []).append(name)
    return shards


def _read_shards(folder: Path, index: Path, shards: dict[str, list[str]]) -> StoredTensors:
    problems: list[str] = []
    tensors: dict[str, TensorInfo] = {}
    headers: list[SafetensorsHeader] = []
    absent_files = [file for file in shards if not (folder / file).is_file()]
    for file in absent_files:
        layers = describe_layers(layer_number(name) for name in shards[file])
        problems.append(f"{file} is missing ({layers})")
    for file, names in shards.items():
        if file in absent_files:
            continue
        header = read_header(folder / file)
        headers.append(header)
        absent = [name for name in names if name not in header.tensors]
        if absent:
            layers = describe_layers(layer_number(name) for name in absent)
            problems.append(f"{file} lacks {shorten(absent)} ({layers})")
        tensors.update((name, header.tensors[name]) for name in names if name in header.tensors)
    if problems:
        raise CheckpointError(f"{index}: {'; '.join(problems)}; the download is incomplete: download the model again")
    return StoredTensors(tensors, tuple(headers))
