"""What a quantized checkpoint will hold, tensor by tensor and file by file, before anything of it is written."""

from __future__ import annotations

import fnmatch
import hashlib
import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Any, TypeAlias

import torch

from lema_core.adapter import ModelAdapter, TensorSpec
from lema_core.checkpoint import Manifest, TensorInfo, bind_tensors, read_header, read_hf_config, read_manifest
from lema_core.checkpoint.beside import files_beside
from lema_core.checkpoint.manifest import INDEX_NAME, SINGLE_NAME
from lema_core.checkpoint.quantized import QUANT_METHOD, QUANT_VERSION, quantization_metadata
from lema_core.errors import CheckpointError, ConfigError
from lema_core.plugins import get_plugin_manager
from lema_core.quantization.backends import ChosenCodec, WeightQuantizer
from lema_core.records import QuantBackend, load_object
from lema_core.suggest import did_you_mean
from lema_quant.checkpoint.result import REPORT_FILE

#: part of a checkpoint's identity: raised when the same base and options are to give something else
_VERSION = 1
#: bits of a head and of an embedding that it is tied to, where less is asked for: every token's loss passes it
_HEAD_BITS = 8
_KEPT = {
    "embedding": "rows of it are looked up, nothing is multiplied",
    "norm": "a norm",
    "bias": "a bias",
    "conv": "a convolution",
    "router": "a router: a rounded choice is another expert",
    "buffer": "no weight",
}


#: the files of a model by name, size and times of change
BaseFiles: TypeAlias = tuple[tuple[str, int, int, int], ...]


@dataclass(frozen=True)
class Recipe:
    """How to quantize: ``bits`` 8 or 4, ``backend`` a name or auto, ``format`` a wire format's name (None: what
    ``bits`` and ``backend`` mean), ``exclude`` shell patterns of tensor names, or parts of such names, that stay as
    they are."""

    bits: int
    backend: str = "auto"
    format: str | None = None
    exclude: tuple[str, ...] = ()


@dataclass(frozen=True)
class PlannedTensor:
    """``source`` under ``name``, encoded by ``codec``, or as it is, for the reason that ``kept`` says."""

    name: str
    source: TensorInfo
    codec: ChosenCodec | None
    kept: str | None

    @property
    def stored(self) -> list[tuple[str, torch.dtype, tuple[int, ...]]]:
        """What the file has of it: names, dtypes and shapes."""
        if self.codec is None:
            return [(self.name, self.source.dtype, self.source.shape)]
        parts = self.codec.format.parts(self.source.shape)
        return [(self.name + part.suffix, part.dtype, part.shape) for part in parts]

    @property
    def nbytes(self) -> int:
        return sum(prod(shape) * dtype.itemsize for _, dtype, shape in self.stored)


@dataclass(frozen=True)
class PlannedFile:
    """One safetensors file; tensors in the order in which they are written."""

    name: str
    tensors: tuple[PlannedTensor, ...]
    metadata: Mapping[str, str]

    @property
    def source_nbytes(self) -> int:
        """What is read for it."""
        return sum(tensor.source.nbytes for tensor in self.tensors)

    @property
    def needed_bytes(self) -> int:
        """Disk space at most: header and index take 1 kB a tensor, far more than they need."""
        return sum(tensor.nbytes + 2000 for tensor in self.tensors) + 10_000


@dataclass(frozen=True)
class QuantizationPlan:
    """``folder`` is the base's; ``recipe`` has the ``format`` and ``backend`` that were chosen. ``index`` is there
    where the files are several; ``copied`` are paths below ``folder``."""

    folder: Path
    recipe: Recipe
    base: BaseFiles
    files: tuple[PlannedFile, ...]
    config: Mapping[str, Any]
    copied: tuple[Path, ...]

    @property
    def tensors(self) -> Iterator[PlannedTensor]:
        return (tensor for file in self.files for tensor in file.tensors)

    @property
    def source_nbytes(self) -> int:
        return sum(file.source_nbytes for file in self.files)

    @property
    def beside_bytes(self) -> int:
        return sum((self.folder / path).stat().st_size for path in self.copied) + 1_000_000

    @property
    def index(self) -> dict[str, Any] | None:
        """What names the files of the tensors; None where there is one file, under the name that is looked for."""
        if [file.name for file in self.files] == [SINGLE_NAME]:
            return None
        where = {name: file.name for file in self.files for tensor in file.tensors for name, *_ in tensor.stored}
        total = sum(tensor.nbytes for tensor in self.tensors)
        return {"metadata": {"total_size": total}, "weight_map": dict(sorted(where.items()))}

    @property
    def names(self) -> set[str]:
        """What the folder will hold."""
        beside = {path.parts[0] for path in self.copied}
        return {file.name for file in self.files} | beside | {INDEX_NAME, "config.json", REPORT_FILE}

    @cached_property
    def identity(self) -> str:
        """A hash of all that decides the bytes: the base's files by size and times, the options, who encodes. Equal
        ones make equal checkpoints."""
        stored = [
            [tensor.name, *((tensor.codec.format.name, tensor.codec.version) if tensor.codec else ())]
            for tensor in self.tensors
        ]
        text = json.dumps([_VERSION, self.base, stored, self.config], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()


def plan_quantization(folder: Path, recipe: Recipe, say: Callable[[str], object]) -> QuantizationPlan:
    """Lay out the model in ``folder``, quantized as ``recipe`` says. Reads headers only. ``say`` hears of backends that
    cannot do what was asked, and who does it instead.

    Raises CheckpointError for a model that is quantized already, by lema or another, or broken; ConfigError for a
    backend, format or pattern that means nothing.
    """
    hf_config = read_hf_config(folder)
    manifest = read_manifest(folder)
    refuse_quantized(folder, hf_config, manifest)
    adapter: ModelAdapter = load_object(get_plugin_manager().match_architecture(hf_config).adapter).from_hf_config(
        hf_config
    )
    bound = bind_tensors(manifest, adapter)
    roles = _Roles(adapter, bound)
    _check_patterns(recipe.exclude, roles)
    quantizer = WeightQuantizer(get_plugin_manager(), recipe.backend, warn=say)
    backend = quantizer.choice(recipe.bits, recipe.format).backend
    tensors = _tensors(manifest, adapter, roles, recipe, quantizer)
    chosen = Recipe(recipe.bits, backend.name, backend.format, recipe.exclude)
    config = {**hf_config, "quantization_config": _quantization_config(backend)}
    if roles.untied:
        config["tie_word_embeddings"] = False
    copied = tuple(path for path in files_beside(folder) if path != Path("config.json"))
    return QuantizationPlan(folder, chosen, base_files(manifest), tuple(_files(manifest, tensors)), config, copied)


def refuse_quantized(folder: Path, hf_config: Mapping[str, Any], manifest: Manifest) -> None:
    """Raises CheckpointError when the model in ``folder`` is quantized already."""
    said = hf_config.get("quantization_config")
    some = next((info for info in manifest.tensors.values() if info.quantized is not None), None)
    if said is None and some is None:
        return
    how = (
        f"{said.get('format')}, by {said.get('backend')}" if isinstance(said, dict) else f"{some.name}: {some.storage}"
    )
    raise CheckpointError(
        f"{folder}: its weights are quantized already ({how}), and would only lose more; quantize the model that it "
        "was made from"
    )


class _Roles:
    """What each tensor of the files is to the model, by where it lies; of a tied pair the one that others are tied
    to."""

    def __init__(self, adapter: ModelAdapter, bound: Mapping[str, TensorInfo]) -> None:
        self._specs: dict[tuple[Path, int], TensorSpec] = {}
        #: embeddings that are multiplied as heads too
        self.heads: set[str] = set()
        #: names of tied tensors, of which the other one is stored
        self.copies: set[str] = set()
        #: whether a tied tensor has other values than the one it should be tied to
        self.untied = False
        for spec in adapter.tensors():
            if spec.tied_to is None:
                self._specs[self._place(bound[spec.name])] = spec
            elif bound[spec.name] == bound[spec.tied_to]:
                self.heads.add(spec.tied_to)
                self.copies.add(spec.name)
            else:
                self.untied = True
                self._specs[self._place(bound[spec.name])] = spec

    @staticmethod
    def _place(info: TensorInfo) -> tuple[Path, int]:
        return info.segment.path, info.segment.offset

    def of(self, info: TensorInfo) -> TensorSpec | None:
        """None for what the model has no use for."""
        return self._specs.get(self._place(info))

    def is_copy(self, name: str) -> bool:
        """Whether what a file calls ``name`` is a tied tensor that is stored under the other's name."""
        return any(name == copy or name.endswith(f".{copy}") for copy in self.copies)

    def bits(self, spec: TensorSpec, bits: int) -> int | None:
        """In how many bits it is stored; None: as it is."""
        if len(spec.shape) != 2:
            return None
        if spec.role in ("linear", "expert"):
            return bits
        return max(bits, _HEAD_BITS) if spec.role == "head" or spec.name in self.heads else None

    @property
    def names(self) -> list[str]:
        return [spec.name for spec in self._specs.values()]


def _tensors(
    manifest: Manifest, adapter: ModelAdapter, roles: _Roles, recipe: Recipe, quantizer: WeightQuantizer
) -> list[PlannedTensor]:
    """In the order of the base's files; what these stack is one by one, as the adapter names it."""

    def planned(name: str, info: TensorInfo) -> PlannedTensor:
        spec = roles.of(info)
        if spec is None:
            return PlannedTensor(name, info, None, "no weight of the model")
        bits = roles.bits(spec, recipe.bits)
        if bits is None:
            return PlannedTensor(name, info, None, _KEPT.get(spec.role, f"a {spec.role} of shape {list(spec.shape)}"))
        if any(_matches(spec.name, pattern) for pattern in recipe.exclude):
            return PlannedTensor(name, info, None, "excluded")
        format = recipe.format if bits == recipe.bits else None
        try:
            return PlannedTensor(name, info, quantizer.codec(info.shape, bits, format), None)
        except ConfigError as error:
            raise ConfigError(f"{info.segment.path}: tensor {name!r}: {error}; keep it with quant_exclude") from error

    unfolded = adapter.unfolded(manifest.tensors)
    ordered = sorted(unfolded.items(), key=lambda item: (item[1].segment.path, item[1].segment.offset))
    return [
        planned(info.name if info.name in manifest.tensors else name, info)
        for name, info in ordered
        if roles.of(info) is not None or not roles.is_copy(name)
    ]


def _matches(name: str, pattern: str) -> bool:
    return fnmatch.fnmatchcase(name, f"*{pattern}*")


def _check_patterns(patterns: Iterable[str], roles: _Roles) -> None:
    for pattern in patterns:
        if not any(_matches(name, pattern) for name in roles.names):
            raise ConfigError(
                f"quant_exclude: {pattern!r} is in no tensor's name{did_you_mean(pattern, roles.names)}; names are "
                f"such as {roles.names[len(roles.names) // 2]}"
            )


def _files(manifest: Manifest, tensors: Sequence[PlannedTensor]) -> Iterator[PlannedFile]:
    """The base's files, of which those that nothing is left of are gone."""
    of_path: dict[Path, list[PlannedTensor]] = defaultdict(list)
    for tensor in tensors:
        of_path[tensor.source.segment.path].append(tensor)
    alone = len(of_path) == 1 and not (manifest.folder / INDEX_NAME).is_file()
    for path, inside in of_path.items():
        encoded = {tensor.name: (tensor.codec.format, tensor.source.shape) for tensor in inside if tensor.codec}
        metadata = {**read_header(path).metadata, "format": "pt", **quantization_metadata(encoded)}
        yield PlannedFile(SINGLE_NAME if alone else path.name, tuple(inside), metadata)


def _quantization_config(backend: QuantBackend) -> dict[str, Any]:
    found = {
        "quant_method": QUANT_METHOD,
        "version": QUANT_VERSION,
        "bits": backend.bits,
        "format": backend.format,
        "backend": backend.name,
    }
    group = getattr(get_plugin_manager().wire_format(backend.format), "group", None)
    return found if group is None else {**found, "group_size": group}


def base_files(manifest: Manifest) -> BaseFiles:
    """What changes when a file of ``manifest`` does. Raises CheckpointError naming a file that cannot be read."""
    return tuple((path.name, *stamp_of(path)) for path in manifest.paths)


def stamp_of(path: Path) -> tuple[int, int, int]:
    """Size and times of change in ns: the time of the last change of any kind too, as the other can be set back.
    Raises CheckpointError for a file that cannot be read."""
    try:
        status = path.stat()
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror or error}") from error
    return status.st_size, status.st_mtime_ns, status.st_ctime_ns
