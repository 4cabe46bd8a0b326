"""The quantized copy of a model that a run computes with, made at the first one and found again in the cache."""

from __future__ import annotations

import hashlib
import json
import sys
import warnings
from collections.abc import Callable
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import TextIO

from lema.config import LemaConfig
from lema.display import byte_progress
from lema_core.atomic import NoRoomError, write_json
from lema_core.cache import cache_folder
from lema_core.checkpoint import Manifest, read_hf_config
from lema_core.errors import CheckpointError, ConfigError
from lema_core.memory import format_bytes
from lema_core.plugins import get_plugin_manager
from lema_quant.checkpoint import (
    QuantizationPlan,
    QuantizedCheckpoint,
    Recipe,
    base_files,
    finished,
    plan_quantization,
    read_quantized,
    write_quantized,
)

#: what backends of lema quantize with
_LIBRARIES = ("torchao", "optimum-quanto", "bitsandbytes", "torch")


def recipe_of(config: LemaConfig) -> Recipe:
    """How ``config`` wants weights quantized. Raises ConfigError when it does not."""
    if config.weights_bits is None:
        raise ConfigError("weights_bits: null quantizes nothing; give 8 or 4")
    return Recipe(config.weights_bits, config.quant_backend, config.weights_format, tuple(config.quant_exclude))


def quantized_copy(config: LemaConfig, base: Manifest) -> QuantizedCheckpoint | None:
    """The copy of ``base`` that ``config`` asks for, made when it is not there yet; None when ``base`` itself is what
    to compute with: nothing was asked for, or it is quantized so already.

    Raises CheckpointError for a base that is quantized otherwise, or broken, and with the bytes needed when there is no
    room; ConfigError for a backend or pattern that means nothing. A backend that cannot serve, and tensors that lose
    much, are warned of.
    """
    if config.weights_bits is None or _is_so_already(config, base):
        return None
    request = _Request(config, base)
    copy, said = request.answer()
    for line in said:
        warnings.warn(line, stacklevel=2)
    if copy is None:

        def say(line: str) -> None:
            said.append(line)
            warnings.warn(line, stacklevel=3)

        plan = plan_quantization(base.folder, recipe_of(config), say)
        folder = cache_folder("quantized") / f"{_model_type(plan)}-{plan.recipe.format}-{plan.identity[:16]}"
        copy = finished(plan, folder)
        try:
            copy = copy or write_with_progress(plan, folder, sys.stderr)
        except NoRoomError as error:
            raise NoRoomError(f"{error}, or set LEMA_CACHE to a larger disk") from error
        request.keep(folder, said)
    for line in copy.report.warnings:
        warnings.warn(line, stacklevel=2)
    return copy


class _Request:
    """What leads to a copy without asking who would make it, as that imports its library: seconds, and memory that the
    run could use."""

    def __init__(self, config: LemaConfig, base: Manifest) -> None:
        packages = (*get_plugin_manager().packages, *_LIBRARIES)
        asked = [base_files(base), read_hf_config(base.folder), asdict(recipe_of(config)), *map(_version, packages)]
        digest = hashlib.sha256(json.dumps(asked, sort_keys=True).encode()).hexdigest()
        self._path = cache_folder("quantized") / "requests" / f"{digest[:32]}.json"

    def answer(self) -> tuple[QuantizedCheckpoint | None, list[str]]:
        """The copy, None when it was never made, or is there no more; and what was said of who makes it."""
        try:
            found = json.loads(self._path.read_text(encoding="utf-8"))
            copy = read_quantized(cache_folder("quantized") / str(found["folder"]))
            return copy, list(map(str, found["said"])) if copy is not None else []
        except (OSError, ValueError, KeyError, TypeError):
            return None, []  # as good as absent: it is looked for anew

    def keep(self, folder: Path, said: list[str]) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        write_json(self._path, {"folder": folder.name, "said": said})


def write_with_progress(plan: QuantizationPlan, output_dir: Path, out: TextIO) -> QuantizedCheckpoint:
    """Write what ``plan`` says, and show how far it has come on ``out``."""
    recipe = plan.recipe
    about = f"quantizing {plan.folder} to {recipe.format}, by {recipe.backend}, in {output_dir}"
    with byte_progress(about, plan.source_nbytes, out) as advance:
        return write_quantized(plan, output_dir, advance, say_to(out))


def describe_copy(copy: QuantizedCheckpoint) -> str:
    """Where weights are and how large, in one line."""
    report = copy.report
    return (
        f"weights in {copy.format}, by {copy.backend}, {'made' if copy.made else 'found'} in {copy.path}: "
        f"{format_bytes(report.bytes_after)} of {format_bytes(report.bytes_before)}"
    )


def say_to(out: TextIO) -> Callable[[str], None]:
    return lambda line: print(f"lema: {line}", file=out, flush=True)


def _is_so_already(config: LemaConfig, base: Manifest) -> bool:
    """Whether ``base`` is quantized as ``config`` wants it. Raises CheckpointError when it is quantized otherwise."""
    formats = {info.quantized.format for info in base.tensors.values() if info.quantized is not None}
    if not formats:
        return False
    # a head has 8 bits beside weights of 4
    least = min(each.bits for each in formats)
    names = sorted(each.name for each in formats if each.bits == least)
    wanted = config.weights_format or f"{config.weights_bits} bits"
    if least != config.weights_bits or (config.weights_format is not None and names != [config.weights_format]):
        raise CheckpointError(
            f"{base.folder}: its weights are in {', '.join(names)} already, and {wanted} would only lose more: leave "
            "weights_bits out, or give the model that it was made from"
        )
    if config.quant_exclude:
        raise ConfigError(
            f"quant_exclude: {base.folder} is quantized already; leave it out, or give the model that it was made from"
        )
    return True


def _version(package: str) -> str:
    try:
        return f"{package} {metadata.version(package)}"
    except metadata.PackageNotFoundError:
        return package


def _model_type(plan: QuantizationPlan) -> str:
    return str(plan.config.get("model_type", "model"))
