"""Finds each tensor that a model needs among the tensors that its files hold.

Files spell one model's names in several ways: with the canonical prefix (``model.layers.0...``), without it
(``layers.0...``), or under a longer one (``model.language_model.layers.0...``). Of the prefixes that the model adapter
lists, the one under which most tensors are found is the file's; two that cover the same number are an error.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Mapping

import torch

from lema_core.adapter import ModelAdapter, TensorSpec
from lema_core.checkpoint.describe import describe_layers, shorten
from lema_core.checkpoint.header import DTYPE_NAMES
from lema_core.checkpoint.manifest import Manifest
from lema_core.checkpoint.quantized import unreadable
from lema_core.checkpoint.reading import same_values
from lema_core.checkpoint.segments import TensorInfo
from lema_core.errors import CheckpointError

TRAINABLE_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
#: what products are computed with and rows are looked up in; all else is small, and stays as it was
QUANTIZABLE_ROLES = ("linear", "expert", "router", "head", "embedding")


def bind_tensors(manifest: Manifest, adapter: ModelAdapter) -> dict[str, TensorInfo]:
    """Canonical name -> where the tensor is, for exactly the tensors of ``adapter``, in its order.

    A tied tensor shares the info of the one it is tied to. As transformers does: when only one of the two is in the
    files, that one serves both; when both are there and differ, they stay apart, with a warning.

    Warns by name of tensors that the model has no use for, except ``adapter.ignored``. Raises CheckpointError for
    missing tensors, layers that the config does not have, other shapes than the config implies, and dtypes that are
    not weights; quantized tensors that are not multiplied or looked up, or of which the adapter takes what cannot be
    cut out.
    """
    specs = {spec.name: spec for spec in adapter.tensors()}
    ignored = [re.compile(pattern) for pattern in adapter.ignored]
    found = adapter.unfolded(
        {name: info for name, info in manifest.tensors.items() if not any(pattern.search(name) for pattern in ignored)}
    )
    prefix = _file_prefix(manifest, adapter, specs, found)
    in_file = _resolve(manifest, adapter, specs, found, prefix)
    used = {info.name for info in in_file.values()}
    unknown = [name for name, info in found.items() if info.name not in used]
    bound = _share_tied(specs, in_file)
    _check_missing(manifest, adapter, specs, bound)
    _check_extra_layers(manifest, adapter, specs, prefix, unknown)
    for name, info in [*in_file.items(), *bound.items()]:
        _check_fits(specs[name], info)
    bound = _separate_unequal(specs, bound, in_file)
    if unknown:
        warnings.warn(
            f"{manifest.folder}: {len(unknown)} tensors that the model has no use for: {shorten(unknown, 6)}",
            stacklevel=2,
        )
    return {name: bound[name] for name in specs}


def _file_prefix(
    manifest: Manifest, adapter: ModelAdapter, specs: Mapping[str, TensorSpec], found: Mapping[str, TensorInfo]
) -> str:
    """What stands in the files where the names have the adapter's first prefix."""
    canonical = adapter.prefixes[0]
    stems = [name[len(canonical) :] for name in specs if name.startswith(canonical)]
    coverage = {prefix: sum(prefix + stem in found for stem in stems) for prefix in adapter.prefixes}
    if not any(coverage.values()):
        names = shorten(manifest.tensors) or "no tensor at all"
        raise CheckpointError(
            f"{manifest.folder}: none of the model's tensors is here: {next(iter(specs))} expected, under one of the "
            f"prefixes {', '.join(map(repr, adapter.prefixes))}; {names} found"
        )
    most = max(coverage.values())
    best = sorted(prefix for prefix, count in coverage.items() if count == most)
    if len(best) > 1:
        raise CheckpointError(
            f"{manifest.folder}: the files hold the model's tensors several times, under "
            f"{' and '.join(repr(prefix) for prefix in best)}; keep one set of weights"
        )
    return best[0]


def _resolve(
    manifest: Manifest,
    adapter: ModelAdapter,
    specs: Mapping[str, TensorSpec],
    found: Mapping[str, TensorInfo],
    prefix: str,
) -> dict[str, TensorInfo]:
    """Canonical name -> info, for those that are in the files. Root-level names may stand anywhere in the prefix."""
    canonical = adapter.prefixes[0]
    parts = prefix.split(".")[:-1]
    outer = ["".join(f"{part}." for part in parts[:depth]) for depth in range(len(parts) + 1)]
    in_file: dict[str, TensorInfo] = {}
    for name in specs:
        if name.startswith(canonical):
            candidates = [prefix + name[len(canonical) :]]
        else:
            candidates = [root + name for root in outer]
        present = [candidate for candidate in candidates if candidate in found]
        if len(present) > 1:
            raise CheckpointError(
                f"{manifest.folder}: {' and '.join(present)} are both in the files, one is expected for {name}"
            )
        if present:
            in_file[name] = found[present[0]]
    return in_file


def _share_tied(specs: Mapping[str, TensorSpec], in_file: Mapping[str, TensorInfo]) -> dict[str, TensorInfo]:
    """Both names of a tied pair on the tensor that the files have: the source's, else the tied one's own."""
    bound = dict(in_file)
    for name, spec in specs.items():
        if spec.tied_to is None:
            continue
        shared = in_file.get(spec.tied_to, in_file.get(name))
        if shared is not None:
            bound[name] = bound[spec.tied_to] = shared
    return bound


def _separate_unequal(
    specs: Mapping[str, TensorSpec], bound: dict[str, TensorInfo], in_file: Mapping[str, TensorInfo]
) -> dict[str, TensorInfo]:
    """A tied tensor whose own copy in the files has other values keeps that copy."""
    result = dict(bound)
    for name, spec in specs.items():
        if spec.tied_to is None or name not in in_file or spec.tied_to not in in_file:
            continue
        if not same_values(in_file[name], in_file[spec.tied_to]):
            warnings.warn(
                f"{in_file[name].segment.path}: the config ties {name} to {spec.tied_to}, but the files hold both with "
                "different values, so they are not tied; set tie_word_embeddings to false in config.json to say so",
                stacklevel=3,
            )
            result[name] = in_file[name]
    return result


def _check_missing(
    manifest: Manifest, adapter: ModelAdapter, specs: Mapping[str, TensorSpec], bound: Mapping[str, TensorInfo]
) -> None:
    missing = [name for name in specs if name not in bound]
    if not missing:
        return
    layers = describe_layers(specs[name].layer for name in missing)
    in_files = {specs[name].layer for name in bound} - {None}
    raise CheckpointError(
        f"{manifest.folder}: {len(missing)} tensors of the model are not in its files ({layers}): {shorten(missing)}; "
        f"config.json says {adapter.n_layers} layers, the files have {len(in_files)}: correct it or download again"
    )


def _check_extra_layers(
    manifest: Manifest, adapter: ModelAdapter, specs: Mapping[str, TensorSpec], prefix: str, unknown: list[str]
) -> None:
    """Layers that the config does not count would silently make another model."""
    canonical = adapter.prefixes[0]
    series: set[str] = set()  # "layers." for names like "model.layers.3.mlp.up_proj.weight"
    for spec in specs.values():
        if spec.layer is not None and spec.name.startswith(canonical):
            head, number, _ = spec.name[len(canonical) :].partition(f"{spec.layer}.")
            assert number, spec.name
            series.add(head)
    extra: dict[int, str] = {}
    for name in unknown:
        for head in series:
            if name.startswith(prefix + head):
                number = name[len(prefix + head) :].partition(".")[0]
                if number.isdecimal() and int(number) >= adapter.n_layers:
                    extra.setdefault(int(number), name)
    if extra:
        raise CheckpointError(
            f"{manifest.folder}: the config says {adapter.n_layers} layers, the files have {max(extra) + 1}: "
            f"{describe_layers(extra)} would be left out ({extra[min(extra)]} ...); correct config.json"
        )


def _check_fits(spec: TensorSpec, info: TensorInfo) -> None:
    where = f"{info.segment.path}: tensor {info.name!r}"
    if info.dtype not in TRAINABLE_DTYPES:
        names = ", ".join(DTYPE_NAMES[dtype] for dtype in TRAINABLE_DTYPES)
        reason = unreadable(info) or "use the model's unquantized files"
        raise CheckpointError(f"{where}: dtype {DTYPE_NAMES[info.dtype]} found, {names} expected; {reason}")
    if info.shape != tuple(spec.shape):
        raise CheckpointError(
            f"{where}: shape {list(spec.shape)} expected from the config, {list(info.shape)} found; correct "
            "config.json or use the files it belongs to"
        )
    if info.quantized is None:
        return
    if spec.role not in QUANTIZABLE_ROLES:
        raise CheckpointError(
            f"{where}: {info.storage} found, and a {spec.role} is not computed with quantized; quantize the model "
            "again without it, or use its unquantized files"
        )
    expected = [(part.dtype, part.shape) for part in info.quantized.format.parts(info.shape)]
    if expected != [(part.dtype, part.shape) for part in info.quantized.parts]:
        raise CheckpointError(
            f"{where}: {info.storage}, and {spec.name} is a part of it that cannot be cut out of quantized rows; "
            "quantize the model again without it, or use its unquantized files"
        )
