"""Where a model's tensors are in its files: from changes by canonical name to changes by the files' names.

Files spell names in several ways, hold one tensor of a tied pair or both, and may stack a layer's experts, of which a
model's tensor is then a run of rows.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TypeAlias

from lema_core.adapter import ModelAdapter
from lema_core.checkpoint import Manifest, TensorInfo
from lema_train.merge import Change, Changes, Update, matrix_shape

#: what is done to each weight, by canonical name, one after another; those of tied weights are equal unless one of
#: them changes alone
Edits: TypeAlias = Mapping[str, Sequence[Callable[[], Update]]]


def changes_of(edits: Edits, adapter: ModelAdapter, manifest: Manifest, bound: Mapping[str, TensorInfo]) -> Changes:
    """``edits`` of the tensors in ``bound``, as changes of those in ``manifest``. Tied weights that no longer agree are
    untied: the files get both, and config.json says so."""
    ties = {spec.name: spec.tied_to for spec in adapter.tensors() if spec.tied_to is not None}
    untied = [pair for pair in ties.items() if edits.get(pair[0]) != edits.get(pair[1])]
    own = _own_names(manifest, adapter, bound, {name for pair in ties.items() for name in pair})
    added = {own[name]: bound[name] for pair in untied for name in pair if own[name] not in manifest.tensors}
    places = Places(manifest)
    tensors: dict[str, list[Change]] = defaultdict(list)
    for name, todo in edits.items():
        in_files, first_row = (own[name], 0) if name in own else places.of(bound[name])
        if in_files in manifest.tensors or in_files in added:  # else it is tied to one that is, edited alike
            rows = matrix_shape(bound[name])[0]
            tensors[in_files] += [Change(first_row, rows, edit) for edit in todo]
    config = {"tie_word_embeddings": False} if untied else {}
    return Changes({name: tuple(changes) for name, changes in tensors.items()}, added, config)


class Places:
    """Finds the tensor of the files that a model's tensor is, or is a run of rows of."""

    def __init__(self, manifest: Manifest) -> None:
        self._named = manifest.tensors
        self._by_offset: dict[Path, list[TensorInfo]] = defaultdict(list)
        for info in manifest.tensors.values():
            if info.segment.nbytes:
                self._by_offset[info.segment.path].append(info)
        for infos in self._by_offset.values():
            infos.sort(key=lambda info: info.segment.offset)

    def of(self, info: TensorInfo) -> tuple[str, int]:
        """Its name in the files, and the row of it that is the first of ``info``'s."""
        if info.name in self._named and self._named[info.name].segment == info.segment:
            return info.name, 0
        there, start = self._by_offset[info.segment.path], info.segment.offset
        whole = there[bisect_right(there, start, key=lambda each: each.segment.offset) - 1]
        inside = start - whole.segment.offset
        assert 0 <= inside < whole.segment.nbytes, f"{info.name} is in none of the files' tensors"
        return whole.name, inside // (whole.segment.nbytes // matrix_shape(whole)[0])


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
