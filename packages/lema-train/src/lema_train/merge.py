"""What merging changes: the vocabulary that LoRA weights, and whatever else is trained, is said in.

A tensor of the files is seen as a matrix: its last dimension makes the columns, all others the rows, so that one expert
of a fused [experts, out, in] tensor is a run of rows like any other part.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Any, TypeAlias

from torch import Tensor

from lema_core.checkpoint import TensorInfo, read_elements

#: Changes fp32 rows [n, columns] in place. The number of the first of them, counted from the first row of the change,
#: comes with them.
Update: TypeAlias = Callable[[Tensor, int], None]


@dataclass(frozen=True)
class Change:
    """What merging does to ``rows`` rows of a tensor from ``first_row`` on.

    ``open`` is called when their turn comes, and reads what the update needs; what it returns is let go after the last
    of them.
    """

    first_row: int
    rows: int
    open: Callable[[], Update]


@dataclass(frozen=True)
class Changes:
    """All that sets a merged model apart from its base; tensors by the names that the base's files give them.

    ``tensors``: what is done to each, in this order. ``added``: tensors that the base lacks, each a copy of one that it
    has before its changes are made (a head that is no longer tied). ``config``: fields of config.json.
    """

    tensors: Mapping[str, tuple[Change, ...]]
    added: Mapping[str, TensorInfo] = field(default_factory=dict)
    config: Mapping[str, Any] = field(default_factory=dict)


def matrix_shape(info: TensorInfo) -> tuple[int, int]:
    """Rows and columns of a tensor as merging sees it."""
    return (prod(info.shape[:-1]), info.shape[-1]) if info.shape else (1, 1)


def low_rank_update(
    lora_A: Callable[[], Tensor], lora_B: Callable[[], Tensor], scale: float, transposed: bool, first_row: int = 0
) -> Callable[[], Update]:
    """Adds ``scale * B A`` [out, in] to a weight, or its transpose to one that lies as [in, out]: the product first,
    then the scale, then the sum, each in fp32, as PEFT does. ``first_row`` of that is the first of the change's."""

    def opened() -> Update:
        a, b = lora_A().float(), lora_B().float()

        def update(rows: Tensor, start: int) -> None:
            start += first_row
            stop = start + len(rows)
            product = (b @ a[:, start:stop]).t() if transposed else b[start:stop] @ a
            rows += product.mul_(scale)

        return update

    return opened


def replacement(info: TensorInfo) -> Callable[[], Update]:
    """Puts the values of ``info`` in a weight's place."""
    columns = matrix_shape(info)[1]

    def update(rows: Tensor, start: int) -> None:
        rows.copy_(read_elements(info, start * columns, rows.numel()).view_as(rows))

    return lambda: update
