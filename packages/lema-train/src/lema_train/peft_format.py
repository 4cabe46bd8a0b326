"""LoRA weights as PEFT's files: ``adapter_config.json`` and ``adapter_model.safetensors``.

Written files list their modules so that PEFT puts LoRA on exactly the same ones. Reading is strict: a file that
asks for something that is not here (DoRA, trained biases, ``modules_to_save`` ...), or whose tensors are not
exactly those its config calls for, is refused by name; nothing is ever loaded in part.

Keys in the file: ``base_model.model.<module>.lora_A.weight``; the older ``...lora_A.default.weight`` is read too.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lema_core.adapter import ModelAdapter, TensorSpec
from lema_core.atomic import write_json
from lema_core.checkpoint import TensorInfo, read_header, read_tensor, write_safetensors
from lema_core.checkpoint.describe import shorten
from lema_core.errors import CheckpointError, ConfigError
from lema_core.selection import ALL_LINEAR, matches
from lema_train.checkpoint import find_checkpoints
from lema_train.lora import LoraConfig, LoraWeights, lora_shapes
from lema_train.peft_stacks import (
    compact_parameters,
    is_parameter,
    stack_keys,
    stacked,
    stacks_of,
    targeted,
    unstacked,
)

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"
_PREFIX = "base_model.model."
_PARTS = ("lora_A", "lora_B")

#: fields that describe the file or cannot change what plain LoRA on linear layers computes
_HARMLESS = {
    "auto_mapping", "base_model_name_or_path", "fan_in_fan_out", "inference_mode",
    "megatron_core", "peft_version", "qalora_group_size", "revision", "runtime_config", "task_type",
}  # fmt: skip
_READ = {
    "alpha_pattern", "bias", "exclude_modules", "init_lora_weights", "layers_pattern", "layers_to_transform",
    "lora_alpha", "lora_dropout", "peft_type", "r", "rank_pattern", "target_modules", "target_parameters", "use_rslora",
}  # fmt: skip
#: ways of starting that leave the base weights as they are; others (PiSSA, OLoRA, LoftQ ...) train against changed ones
_PLAIN_INITS = (True, False, "gaussian", "eva", "orthogonal")


def save_peft(folder: Path, weights: LoraWeights, adapter: ModelAdapter, base_model_name_or_path: str | None) -> None:
    """Write ``weights`` into the existing ``folder``, each file appearing only when it is complete.

    Raises CheckpointError when the disk refuses.
    """
    parameters = weights.parameters()
    tensors = []
    for name, (shape, names, part) in _in_file(weights.config, weights.modules).items():
        pairs = [tuple(parameters[f"{module}.{each}"] for each in _PARTS) for module in names]
        values = partial(stacked, pairs, part)
        tensors.append((f"{_PREFIX}{name}.weight", torch.float32, shape, values))
    write_safetensors(folder / WEIGHTS_FILE, tensors)
    write_json(folder / CONFIG_FILE, _config_to_write(weights, adapter, base_model_name_or_path))


def peft_bytes(weights: LoraWeights) -> int:
    """Bytes of tensor data that :func:`save_peft` writes."""
    return 4 * weights.num_parameters


def read_peft_config(folder: Path) -> dict[str, Any]:
    """``adapter_config.json`` as it stands. Raises CheckpointError when it is missing or not a JSON object."""
    path = folder / CONFIG_FILE
    if not path.exists() and (checkpoints := find_checkpoints(folder)):
        raise CheckpointError(
            f"no {CONFIG_FILE} in {folder}; give one of its checkpoints, such as {checkpoints[-1][1]}"
        )
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror or error}") from error
    except ValueError as error:
        raise CheckpointError(f"{path}: not valid JSON: {error}") from error
    if not isinstance(config, dict):
        raise CheckpointError(f"{path}: a JSON object expected, {type(config).__name__} found")
    return config


@dataclass(frozen=True)
class PeftFolder:
    """An adapter folder that fits a model; its tensors are checked and not read.

    ``lora`` says for each parameter, ``<module>.lora_A`` and ``<module>.lora_B`` of ``modules``, where it is: a tensor,
    and which one it is of how many that are stacked there. By canonical tensor name, ``saved`` holds
    weights that were trained whole (``modules_to_save``), and ``copies`` base weights that PEFT writes beside LoRA on
    a head, and loads into the base model again.
    """

    config: LoraConfig
    modules: tuple[TensorSpec, ...]
    lora: dict[str, tuple[TensorInfo, int, int]]
    saved: dict[str, TensorInfo]
    copies: dict[str, TensorInfo]

    def read(self, parameter: str) -> Tensor:
        """``<module>.lora_A`` or ``<module>.lora_B``, in the type that the file has."""
        info, number, n_stacked = self.lora[parameter]
        if n_stacked == 1:
            return read_tensor(info)
        return unstacked(_read_stack(info), _PARTS.index(parameter.rpartition(".")[2]), number, n_stacked)


def load_peft(folder: Path, adapter: ModelAdapter, *, device: torch.device | str = "cpu") -> LoraWeights:
    """The LoRA weights in ``folder``, cast to fp32, on the linear layers of ``adapter``.

    Raises CheckpointError naming the field or the tensors: for what plain LoRA on linear layers does not cover, for
    tensors missing, unknown or of another shape.
    """
    found = open_peft(folder, adapter)
    weights = LoraWeights(found.config, found.modules, device=device)
    for name in found.lora:
        weights.copy_({name: found.read(name)})
    return weights


def open_peft(folder: Path, adapter: ModelAdapter, *, whole_weights: bool = False) -> PeftFolder:
    """Check the adapter in ``folder`` against ``adapter``. ``whole_weights``: weights of the base model may be in it,
    trained or copied; otherwise they are refused.

    Raises CheckpointError as :func:`load_peft` does.
    """
    config = read_peft_config(folder)
    path = folder / CONFIG_FILE
    _refuse_unsupported(path, config, {"modules_to_save"} if whole_weights else set())
    try:
        modules = _peft_chooses(config, adapter)
        targets, layers = _compact_targets(_plain(modules), _plain(adapter.linear_modules()))
        lora_config = LoraConfig(
            rank=config["r"],
            alpha=config["lora_alpha"],
            dropout=config.get("lora_dropout", 0.0),
            target_modules=targets,
            use_rslora=bool(config.get("use_rslora", False)),
            layers=layers,
            rank_pattern=config.get("rank_pattern") or {},
            alpha_pattern=config.get("alpha_pattern") or {},
        )
    except KeyError as error:
        raise CheckpointError(f"{path}: field {error.args[0]!r} is missing") from error
    except ConfigError as error:
        raise CheckpointError(f"{path}: {error}") from error
    except (re.error, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path}: a field is of another type than PEFT writes: {error}") from error
    infos, other = _read_infos(folder)
    if other and not whole_weights:
        _refuse_whole_weights(folder / WEIGHTS_FILE, other)
    saved, copies = _whole_weights(folder, other, config, adapter)
    expected = _in_file(lora_config, modules)
    _check_tensors(folder / WEIGHTS_FILE, infos, {name: shape for name, (shape, _, _) in expected.items()})
    lora = {
        f"{module}.{_PARTS[part]}": (infos[name], number, len(names))
        for name, (_, names, part) in expected.items()
        for number, module in enumerate(names)
    }
    return PeftFolder(lora_config, tuple(modules), lora, saved, copies)


def _in_file(
    config: LoraConfig, modules: Iterable[TensorSpec]
) -> dict[str, tuple[tuple[int, int], tuple[str, ...], int]]:
    """What a file holds, by name: the shape, the modules whose ``lora_A`` (0) or ``lora_B`` (1) it is, and which."""
    modules = list(modules)
    stacks = stacks_of(modules)
    keys = stack_keys(stacks)
    members = {spec.module: (keys[stack], specs) for stack, specs in stacks.items() for spec in specs[:1]}
    found: dict[str, tuple[tuple[int, int], tuple[str, ...], int]] = {}
    for spec in modules:
        if spec.expert is not None and spec.module not in members:
            continue
        key, specs = members.get(spec.module, (spec.module, [spec]))
        names, (shape_A, shape_B) = tuple(each.module for each in specs), lora_shapes(config, spec)
        found[f"{key}.{_PARTS[0]}"] = (shape_A[0] * len(specs), shape_A[1]), names, 0
        found[f"{key}.{_PARTS[1]}"] = (shape_B[0], shape_B[1] * len(specs)), names, 1
    return found


@lru_cache(maxsize=2)
def _read_stack(info: TensorInfo) -> Tensor:
    """Its experts are asked for one after another."""
    return read_tensor(info)


def _config_to_write(weights: LoraWeights, adapter: ModelAdapter, base: str | None) -> dict[str, Any]:
    config = weights.config
    linears = list(adapter.linear_modules())
    targets, layers = _compact_targets(_plain(weights.modules), _plain(linears))
    alpha = int(config.alpha) if float(config.alpha).is_integer() else config.alpha
    revision = None
    if base is not None and not os.path.isabs(base):  # org/name@revision
        base, _, revision = base.partition("@")
    return {
        "alpha_pattern": dict(config.alpha_pattern),
        "auto_mapping": None,
        "base_model_name_or_path": base,
        "bias": "none",
        "exclude_modules": None,
        "fan_in_fan_out": any(spec.transposed for spec in weights.modules),
        "inference_mode": True,
        "init_lora_weights": True,
        "layers_pattern": None,
        "layers_to_transform": layers,
        "lora_alpha": alpha,
        "lora_bias": False,
        "lora_dropout": config.dropout,
        "modules_to_save": None,
        "peft_type": "LORA",
        "r": config.rank,
        "rank_pattern": dict(config.rank_pattern),
        "revision": revision or None,
        "target_modules": targets,
        "target_parameters": compact_parameters(weights.modules, linears) or None,
        "task_type": "CAUSAL_LM",
        "use_dora": False,
        "use_rslora": config.use_rslora,
    }


def base_model(config: Mapping[str, Any]) -> str | None:
    """The base model that an adapter_config.json names, as lema writes it: a folder, ``org/name``,
    ``org/name@revision``; None when it names none."""
    name, revision = config.get("base_model_name_or_path"), config.get("revision")
    return f"{name}@{revision}" if name and revision else name


def _compact_targets(
    modules: Sequence[TensorSpec], linears: Sequence[TensorSpec]
) -> tuple[list[str], list[int] | None]:
    """``target_modules`` and ``layers_to_transform`` by which PEFT picks exactly ``modules``.

    The modules' last names, with the layers if limited, where that is exact; else every full path.
    """
    if not modules:
        return [], None
    chosen = {spec.module for spec in modules}
    leaves = sorted({module.rpartition(".")[2] for module in chosen})
    layers = sorted({spec.layer for spec in modules if spec.layer is not None})
    for limit in (None, layers):
        config = {"target_modules": leaves, "layers_to_transform": limit}
        if {spec.module for spec in linears if _peft_targets(config, spec.module)} == chosen:
            return leaves, limit
    return [spec.module for spec in modules], None


def _plain(specs: Iterable[TensorSpec]) -> list[TensorSpec]:
    """Those that PEFT reaches through ``target_modules``."""
    return [spec for spec in specs if not is_parameter(spec)]


def _peft_chooses(config: Mapping[str, Any], adapter: ModelAdapter) -> list[TensorSpec]:
    """The linear layers that PEFT puts LoRA on, in forward order."""
    targets = config["target_modules"]
    if isinstance(targets, str) and targets.lower() == ALL_LINEAR:
        return [spec for spec in adapter.all_linear() if not _excluded(config, spec.module)]
    return [
        spec
        for spec in adapter.linear_modules()
        if (targeted(config, spec) if is_parameter(spec) else _peft_targets(config, spec.module))
    ]


def _excluded(config: Mapping[str, Any], module: str) -> bool:
    exclude = config.get("exclude_modules") or ()
    if isinstance(exclude, str):
        return re.fullmatch(exclude, module) is not None
    return any(matches(each, module) for each in exclude)


def _peft_targets(config: Mapping[str, Any], module: str) -> bool:
    """Whether PEFT puts LoRA on ``module`` (``peft.tuners.tuners_utils.check_target_module_exists``), where the targets
    are names or a pattern."""
    if _excluded(config, module):
        return False
    targets = config["target_modules"]
    if isinstance(targets, str):
        return re.fullmatch(targets, module) is not None
    if module in targets:
        return True
    if not any(matches(each, module) for each in targets):
        return False
    layers = config.get("layers_to_transform")
    if layers is None or layers == []:
        return True
    layer = _layer_index(module, config.get("layers_pattern"))
    return layer is not None and layer in ([layers] if isinstance(layers, int) else layers)


def _layer_index(module: str, patterns: str | Sequence[str] | None) -> int | None:
    if not patterns:
        expressions = [r".*?\.[^.]*\.(?P<idx>\d+)\."]
    else:
        listed = [patterns] if isinstance(patterns, str) else patterns
        expressions = [rf"(?:^|.*?\.){pattern}\.(?P<idx>\d+)\." for pattern in listed]
    for expression in expressions:
        match = re.match(expression, module)
        if match:
            return int(match["idx"])
    return None


def _refuse_unsupported(path: Path, config: Mapping[str, Any], allowed: Set[str]) -> None:
    if config.get("peft_type") != "LORA":
        raise CheckpointError(f"{path}: peft_type 'LORA' expected, {config.get('peft_type')!r} found")
    if config.get("bias", "none") != "none":
        raise CheckpointError(f"{path}: bias {config['bias']!r}: trained biases cannot be used here; 'none' expected")
    init = config.get("init_lora_weights", True)
    if init not in _PLAIN_INITS:
        raise CheckpointError(
            f"{path}: init_lora_weights {init!r} trains against changed base weights; convert it with PEFT's "
            "save_pretrained(path_initial_model_for_weight_conversion=...)"
        )
    asked = {name: value for name, value in config.items() if value and name not in _HARMLESS | _READ | allowed}
    if init == "eva":
        asked.pop("eva_config", None)
    if asked:
        listed = ", ".join(f"{name} = {value!r}"[:100] for name, value in sorted(asked.items()))
        raise CheckpointError(f"{path}: asks for what plain LoRA on linear layers does not cover: {listed}")


def _read_infos(folder: Path) -> tuple[dict[str, TensorInfo], dict[str, TensorInfo]]:
    """Tensors of the file: LoRA's by parameter name (``<module>.lora_A``), all others by key."""
    path = folder / WEIGHTS_FILE
    if not path.exists() and (folder / "adapter_model.bin").exists():
        raise CheckpointError(
            f"{folder / 'adapter_model.bin'}: a pickle, which can run code when it is read; save it again with PEFT's "
            f"save_pretrained(safe_serialization=True) to get {WEIGHTS_FILE}"
        )
    infos: dict[str, TensorInfo] = {}
    other: dict[str, TensorInfo] = {}
    for key, info in read_header(path).tensors.items():
        match = re.fullmatch(rf"{re.escape(_PREFIX)}(.+\.lora_[AB])(?:\.default)?\.weight", key)
        if match is None:
            other[key] = info
        elif match[1] in infos:
            raise CheckpointError(f"{path}: {key!r} and another key hold the same weight")
        else:
            infos[match[1]] = info
    if embeddings := [key for key in other if "lora_embedding_" in key]:
        raise CheckpointError(f"{path}: LoRA on embeddings is not supported: {shorten(embeddings)}")
    return infos, other


def _refuse_whole_weights(path: Path, other: Iterable[str]) -> None:
    if copies := [key for key in other if re.search(r"(embed_tokens|lm_head)(\.base_layer)?\.weight$", key)]:
        raise CheckpointError(
            f"{path}: holds copies of base weights ({shorten(copies)}); save it again with PEFT's "
            "save_pretrained(save_embedding_layers=False)"
        )
    _refuse_unknown(path, list(other))


def _refuse_unknown(path: Path, keys: Sequence[str]) -> None:
    raise CheckpointError(
        f"{path}: {len(keys)} tensors are not named {_PREFIX}<module>.lora_A.weight or .lora_B.weight: {shorten(keys)}"
    )


def _whole_weights(
    folder: Path, other: Mapping[str, TensorInfo], config: Mapping[str, Any], adapter: ModelAdapter
) -> tuple[dict[str, TensorInfo], dict[str, TensorInfo]]:
    """Weights trained whole and copies of base weights, by canonical name; see PeftFolder."""
    path, specs = folder / WEIGHTS_FILE, {spec.name: spec for spec in adapter.tensors()} if other else {}
    wanted = tuple(config.get("modules_to_save") or ())
    saved: dict[str, TensorInfo] = {}
    copies: dict[str, TensorInfo] = {}
    unknown: list[str] = []
    for key, info in other.items():
        name = key.removeprefix(_PREFIX).replace(".base_layer.", ".")
        spec = specs.get(name)
        if spec is None or not key.startswith(_PREFIX):
            unknown.append(key)
            continue
        if tuple(info.shape) != tuple(spec.shape):
            raise CheckpointError(
                f"{path}: tensor {key!r}: shape {list(spec.shape)} expected from the base model, {list(info.shape)} "
                "found: made for another base, or for one with tokens added"
            )
        # PEFT saves every module whose path ends so, at a dot or not
        trained = spec.module.endswith(wanted) and ".base_layer." not in key
        (saved if trained else copies)[name] = info
    if unknown:
        _refuse_unknown(path, unknown)
    for entry in wanted:
        missing = [spec.name for spec in adapter.tensors() if spec.module.endswith(entry) and spec.name not in saved]
        if missing or not any(name.rpartition(".")[0].endswith(entry) for name in saved):
            raise CheckpointError(
                f"{path}: modules_to_save names {entry!r}, and the file lacks "
                f"{shorten(missing) or 'such a weight of this model'}: made for another base model, or damaged"
            )
    return saved, copies


def _check_tensors(path: Path, infos: Mapping[str, TensorInfo], shapes: Mapping[str, tuple[int, int]]) -> None:
    problems = []
    if missing := [name for name in shapes if name not in infos]:
        problems.append(f"{len(missing)} tensors its config calls for are missing: {shorten(missing)}")
    if unknown := [name for name in infos if name not in shapes]:
        problems.append(f"{len(unknown)} tensors fit no targeted module of this model: {shorten(unknown)}")
    wrong = [
        f"{name} {list(shapes[name])} expected, {list(info.shape)} found"
        for name, info in infos.items()
        if name in shapes and tuple(info.shape) != shapes[name]
    ]
    if wrong:
        problems.append(f"{len(wrong)} tensors have another shape: {shorten(wrong)}")
    if not shapes:
        problems.append(f"target_modules in {CONFIG_FILE} match no linear layer of this model")
    if problems:
        raise CheckpointError(f"{path}: {'; '.join(problems)}: made for another base model, or damaged")
