"""The changes that a delta makes to its base model: ``base + delta``, summed in fp32."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from lema_core.adapter import ModelAdapter
from lema_core.checkpoint import Manifest, bind_tensors
from lema_core.errors import CheckpointError
from lema_train.delta import Delta
from lema_train.merge import Changes, Update, matrix_shape
from lema_train.merge_places import changes_of


def delta_changes(delta: Delta, adapter: ModelAdapter, manifest: Manifest) -> Changes:
    """What ``delta`` makes of the model in ``manifest``. No weight is read.

    Raises CheckpointError naming tensors that the model does not have, or has in another shape. That ``manifest`` is
    the delta's base is for :meth:`Delta.check_base` to say.
    """
    delta.check_fits(adapter)
    bound = bind_tensors(manifest, adapter)
    edits = {name: [_addition(delta, name)] for name in delta.tensors}
    for spec in adapter.tensors():
        if spec.tied_to is None or bound[spec.name] != bound[spec.tied_to]:
            continue
        if spec.name in edits:
            raise CheckpointError(
                f"{delta.path}: holds {spec.name}, which is one with {spec.tied_to} in {manifest.folder}, as its "
                "config.json says tie_word_embeddings: the delta was made from an untied model"
            )
        if spec.tied_to in edits:
            edits[spec.name] = edits[spec.tied_to]
    return changes_of(edits, adapter, manifest, bound)


def _addition(delta: Delta, name: str) -> Callable[[], Update]:
    columns = matrix_shape(delta.tensors[name])[1]

    def update(rows: Tensor, start: int) -> None:
        rows += delta.elements(name, start * columns, rows.numel()).view_as(rows)

    return lambda: update
