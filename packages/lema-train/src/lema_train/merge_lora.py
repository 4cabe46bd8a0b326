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

from lema_core.adapter import ModelAdapter, TensorSpec
from lema_core.checkpoint import Manifest, TensorInfo, bind_tensors
from lema_train.merge import Changes, Update, low_rank_update, matrix_shape, replacement
from lema_train.merge_places import Edits, changes_of
from lema_train.peft_format import open_peft


def lora_changes(folder: Path, adapter: ModelAdapter, manifest: Manifest) -> Changes:
    """What the adapter in ``folder`` makes of the model in ``manifest``. No weight is read.

    Raises CheckpointError for what the adapter asks for and merging does not cover, and naming the tensors for a base
    that it was not made for.
    """
    bound = bind_tensors(manifest, adapter)
    return changes_of(_edits(folder, adapter, bound), adapter, manifest, bound)


def _edits(folder: Path, adapter: ModelAdapter, bound: Mapping[str, TensorInfo]) -> Edits:
    """What is done to each weight, in order: what replaces it, then what is added."""
    found = open_peft(folder, adapter, whole_weights=True)
    specs = {spec.name: spec for spec in adapter.tensors()}
    edits: dict[str, list[Callable[[], Update]]] = defaultdict(list)
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
    return edits


def _weights(spec: TensorSpec, bound: Mapping[str, TensorInfo]) -> list[str]:
    """The tensors whose rows, one below the other, a linear's weight is: of an expert's gate_up_proj they are two."""
    if spec.name in bound:
        return [spec.name]
    expert = spec.module.removesuffix("gate_up_proj")
    return [f"{expert}gate_proj.weight", f"{expert}up_proj.weight"]
