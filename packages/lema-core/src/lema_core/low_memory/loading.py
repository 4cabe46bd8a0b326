"""Loads a state dict or a checkpoint file into a module: PyTorch decides what goes where, lema moves the data.

1. The checkpoint's tensors are stood in for by meta tensors, and the module's own ``load_state_dict`` puts these into
   place. Missing and unexpected keys, shapes, renaming hooks, overridden ``_load_from_state_dict`` and extra state are
   thereby PyTorch's business, as is the report.
2. What landed where is noted, and the module is given back what it had. Everything that can be wrong is wrong here.
3. Each tensor is read once: a parameter on meta is made, any other gets its values in place.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from lema_core.errors import CheckpointError, ConfigError, LemaError
from lema_core.low_memory.empty import inside_empty_model
from lema_core.low_memory.files import CheckpointFile, open_checkpoint
from lema_core.low_memory.filling import DTypePolicy, Filler
from lema_core.low_memory.placing import Before, assignable, postponed_hooks, report_text
from lema_core.low_memory.reading import SegmentReader
from lema_core.low_memory.tensors import module_tensors, place, storage_id


class StateDictError(CheckpointError, RuntimeError):
    """The file's tensors are not those of the module: PyTorch's own report, behind the name of the file."""


def get_keys_to_submodule(model: nn.Module) -> dict[str, nn.Module]:
    """Key of the state dict -> the module that holds this parameter or persistent buffer, in the state dict's order.

    A tensor that has several names has them all here; one of the root module has no dot in its key.
    """
    return {
        f"{prefix}.{name}" if prefix else name: module
        for prefix, module in model.named_modules(remove_duplicate=False)
        for name, tensor in module_tensors(module).items()
        if tensor is not None and name not in module._non_persistent_buffers_set
    }


def load_state_dict_with_low_memory(
    model: nn.Module, state_dict: Mapping[str, Any], *, strict: bool = True, dtype: DTypePolicy = "module"
) -> Any:
    """``model.load_state_dict(state_dict, strict)`` that also fills modules on the meta device. Returns its result.

    A parameter or buffer on meta takes the state dict's tensor itself, as with ``assign=True``, cast where the dtypes
    differ: no second copy exists, and what changes one changes the other. Any other is copied into, on its device, so
    that it remains the same object. ``dtype``: "module" casts to the module's dtypes, "checkpoint" takes the state
    dict's. ``requires_grad``, ties, attributes, hooks and training mode remain.

    Raises RuntimeError with PyTorch's report, CheckpointError for tensors without data and for a non-persistent buffer
    on meta (``strict`` only); the module is then as it was.
    """
    if not isinstance(state_dict, Mapping):
        raise TypeError(f"Expected state_dict to be dict-like, got {type(state_dict)}.")
    entries: OrderedDict[str, Any] = OrderedDict(state_dict)
    if (metadata := getattr(state_dict, "_metadata", None)) is not None:
        entries._metadata = metadata  # type: ignore[attr-defined]
    return _load(model, CheckpointFile(None, False, entries), strict, dtype)


def load_checkpoint_with_low_memory(
    model: nn.Module, path: str | PathLike[str], *, strict: bool = True, dtype: DTypePolicy = "module"
) -> Any:
    """:func:`load_state_dict_with_low_memory` from a file: each tensor is read once, to where it stays.

    ``path``: a safetensors file, a folder of them (``model.safetensors.index.json`` and its shards, or one file), or a
    zip file that ``torch.save`` wrote of a state dict, of which only tensors and plain containers are read, no code is
    run. What was on meta is on the CPU afterwards. Beside the module a few MB are needed, and once more a tensor's size
    for one that is not stored row-major. safetensors files hold a tied tensor under one of its names; its other names
    do not count as missing.

    Raises CheckpointError naming file and tensor, StateDictError with PyTorch's report. The module is then as it was;
    only a disk that fails, or a file that is cut, *while* data is read leaves values of both in those parameters that
    were not on meta.
    """
    path = Path(path)
    opened = open_checkpoint(path)
    if opened.safetensors:
        _add_tied_names(model, opened.entries)
    try:
        return _load(model, opened, strict, dtype)
    except CheckpointError:
        raise
    except RuntimeError as error:
        raise StateDictError(f"{path}: {error}") from error


def _add_tied_names(model: nn.Module, entries: dict[str, Any]) -> None:
    """Add the names whose memory is, in the module, that of a name that the file has, or part of it."""
    by_storage: dict[int, dict[str, Tensor]] = {}
    for key, module in get_keys_to_submodule(model).items():
        tensor = module_tensors(module)[key.rpartition(".")[2]]
        if tensor is not None and not is_lazy(tensor) and tensor.layout == torch.strided:
            by_storage.setdefault(storage_id(tensor), {})[key] = tensor
    for tied in by_storage.values():
        present = {key: tensor for key, tensor in tied.items() if key in entries}
        for key, tensor in tied.items():
            for name, whole in present.items():
                if key not in entries and (part := _part(tensor, whole, entries[name])) is not None:
                    entries[key] = part


def _part(tensor: Tensor, whole: Tensor, stand_in: Tensor) -> Tensor | None:
    """What ``tensor`` is of ``stand_in``, if it lies in ``whole``, in whose place that comes; else None."""
    if place(tensor) == place(whole):
        return stand_in
    start = tensor.storage_offset() - whole.storage_offset()
    end = start + 1 + sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    row_major = whole.is_contiguous() and stand_in.shape == whole.shape and tensor.dtype == whole.dtype
    if not row_major or not 0 <= start <= end <= whole.numel():
        return None
    return stand_in.as_strided(tensor.shape, tensor.stride(), start)


def _load(model: nn.Module, opened: CheckpointFile, strict: bool, dtype: DTypePolicy) -> Any:
    if dtype not in ("module", "checkpoint"):
        raise ConfigError(f"dtype={dtype!r}: 'module' or 'checkpoint' expected")
    if inside_empty_model():
        raise LemaError(
            "a checkpoint is loaded inside empty_model(), where every tensor goes to meta again; leave it first"
        )
    before = Before(model)
    with SegmentReader() as reader:
        filler = Filler(opened, reader, dtype)
        entries = filler.entries_for_torch()
        try:
            with postponed_hooks(model) as (hooked, finished), assignable(model):
                # hooks may amend the report
                report = model.load_state_dict(entries, strict=strict and not hooked, assign=True)
            targets = before.targets()
            before.restore()
            filler.check(targets, strict)
            filler.fill(targets, before)
            for module in finished:
                for hook in list(module._load_state_dict_post_hooks.values()):
                    hook(module, report)
            if hooked and strict and (report.missing_keys or report.unexpected_keys):
                raise RuntimeError(report_text(model, report))
        except BaseException:
            before.restore()
            before.restore_extra_state()
            raise
    return report
