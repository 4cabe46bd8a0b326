"""The changes that a folder in PEFT's format makes to its base model.

LoRA on a head that is tied to the embedding changes the head alone, as it does while it runs, so the merged model has a
head of its own, and ``tie_word_embeddings`` is false. (``merge_and_unload`` of PEFT 0.21 adds the update to the shared
tensor, which changes the embedding as well, and the answers with it; for ``modules_to_save`` it unties, as here.)
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TypeAlias

from lema_core.adapter import ModelAdapter, TensorSpec
from lema_core.checkpoint import Manifest, TensorInfo, bind_tensors
from lema_train.merge import Change, Changes, Update, low_rank_update, matrix_shape, replacement
from lema_train.peft_format import open_peft

_Edits: TypeAlias = dict[str, list[Callable[[], Update]]]


def lora_changes(folder: Path, adapter: ModelAdapter, manifest: Manifest) -> Changes:
    """What the adapter in ``folder`` makes of the model in ``manifest``. No weight is read.

    Raises CheckpointError for what the adapter asks for and merging does not cover, and naming the tensors for a base
    that it was not made for.
    """
    bound = bind_tensors(manifest, adapter)
    specs = {spec.name: spec for spec in adapter.tensors()}
    edits = _edits(folder, adapter, bound, specs)
    ties = {name: spec.tied_to for name, spec in specs.items() if spec.tied_to is not None}
    untied = [pair for pair in ties.items() if edits.get(pair[0]) != edits.get(pair[1])]
    own = _own_names(manifest, adapter, bound, {name for pair in ties.items() for name in pair})
    added = {own[name]: bound[name] for pair in untied for name in pair if own[name] not in manifest.tensors}
    tensors: dict[str, list[Change]] = defaultdict(list)
    for name, todo in edits.items():
        in_files, first_row = (own[name], 0) if name in own else _place(manifest, bound[name])
        if in_files in manifest.tensors or in_files in added:  # else it is tied to one that is, edited alike
            rows = matrix_shape(bound[name])[0]
            tensors[in_files] += [Change(first_row, rows, edit) for edit in todo]
    config = {"tie_word_embeddings": False} if untied else {}
    return Changes({name: tuple(changes) for name, changes in tensors.items()}, added, config)


def _edits(
    folder: Path, adapter: ModelAdapter, bound: Mapping[str, TensorInfo], specs: Mapping[str, TensorSpec]
) -> _Edits:
    """What is done to each weight, by canonical name, in order: what replaces it, then what is added."""
    found = open_peft(folder, adapter, whole_weights=True)
    edits: _Edits = defaultdict(list)
    for name, info in found.copies.items():
        edit, source = replacement(info), specs[name].tied_to or name
        # PEFT loads a copy into the base model, where tied weights are one tensor
        for each, spec in specs.items():
            if source in (each, spec.tied_to):
                edits[each] = [edit]
    for name, info in found.saved.items():
        edits[name] = [replacement(info)]
    for spec in found.modules:
        lora_A, lora_B = (partial(found.read, f"{spec.module}.{part}") for part in ("lora_A", "lora_B"))
        scale, first_row = found.config.scale_of(spec), 0
        for name in _weights(spec, bound):
            edits[name].append(low_rank_update(lora_A, lora_B, scale, spec.transposed, first_row))
            first_row += matrix_shape(bound[name])[0]
    return dict(edits)


def _weights(spec: TensorSpec, bound: Mapping[str, TensorInfo]) -> list[str]:
    """The tensors whose rows, one below the other, a linear's weight is: of an expert's gate_up_proj they are two."""
    if spec.name in bound:
        return [spec.name]
    expert = spec.module.removesuffix("gate_up_proj")
    return [f"{expert}gate_proj.weight", f"{expert}up_proj.weight"]


def _own_names(
    manifest: Manifest, adapter: ModelAdapter, bound: Mapping[str, TensorInfo], names: set[str]
) -> dict[str, str]:
    """The names that ``names`` have in the files, or would have if they were there."""
    canonical = adapter.prefixes[0]
    stems = {name: name[len(canonical) :] for name in bound if name.startswith(canonical)}
    ends = ((bound[name].name, stem) for name, stem in stems.items() if bound[name].name.endswith(stem))
    prefix = next(whole[: -len(stem)] for whole, stem in ends)

    def own(name: str) -> str:
        if name in stems:
            return prefix + stems[name]
        # names outside the prefix may stand below any part of it
        below = (each for each in manifest.tensors if each.endswith(f".{name}"))
        return name if name in manifest.tensors else next(below, name)

    return {name: own(name) for name in names}


def _place(manifest: Manifest, info: TensorInfo) -> tuple[str, int]:
    """The tensor of the files that ``info`` is, or is a run of rows of, and the first of them."""
    start = info.segment.offset
    if info.name in manifest.tensors and manifest.tensors[info.name].segment == info.segment:
        return info.name, 0
    for name, whole in manifest.tensors.items():
        inside = start - whole.segment.offset
        if whole.segment.path == info.segment.path and 0 <= inside < whole.segment.nbytes:
            columns = matrix_shape(whole)[1]
            return name, inside // (columns * whole.dtype.itemsize)
    raise AssertionError(f"{info.name} is in none of the files' tensors")
