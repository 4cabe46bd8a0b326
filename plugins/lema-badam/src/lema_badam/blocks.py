"""A model's tensors in blocks, and whose turn it is: functions of the step's number alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

from lema_core.adapter import ModelAdapter, TensorSpec
from lema_core.errors import ConfigError
from lema_core.suggest import did_you_mean

ASCENDING, DESCENDING, RANDOM = "ascending", "descending", "random"
_MODES = (ASCENDING, DESCENDING, RANDOM)


@dataclass(frozen=True)
class BlockOptions:
    """What ``method_options`` may hold; ``switch_*`` as the authors' own implementation has them.

    ``layers_per_block``: neighbouring layers that train together. ``switch_block_every``: optimizer steps of a turn, K
    in the paper. ``switch_mode``: blocks take turns from the model's input on, from its output on, or in an order that
    is drawn anew for each pass over them.
    """

    layers_per_block: int = 1
    switch_block_every: int = 100
    switch_mode: str = RANDOM

    def __post_init__(self) -> None:
        for name in ("layers_per_block", "switch_block_every"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}: a whole number from 1 up expected, {getattr(self, name)} found")
        if self.switch_mode not in _MODES:
            near = did_you_mean(self.switch_mode, _MODES)
            raise ConfigError(f"switch_mode: {', '.join(_MODES)} expected, {self.switch_mode!r} found{near}")


def cut_blocks(
    adapter: ModelAdapter, selected: Sequence[TensorSpec], layers_per_block: int
) -> tuple[tuple[str, ...], ...]:
    """Names of the tensors of each block, in forward order.

    First the embeddings, then the layers that have something ``selected``, last the head with the norm before it. Where
    head and embedding are one tensor, all that lies outside layers is one block, the first.
    """
    layers = sorted({spec.layer for spec in selected if spec.layer is not None})
    outside = [spec for spec in selected if spec.layer is None]
    tied = any(spec.tied_to for spec in adapter.tensors())
    first = [spec for spec in outside if tied or spec.role == "embedding"]
    last = [spec for spec in outside if spec not in first]
    groups = [layers[i : i + layers_per_block] for i in range(0, len(layers), layers_per_block)]
    inside = [[spec for spec in selected if spec.layer in group] for group in groups]
    return tuple(tuple(spec.name for spec in block) for block in (first, *inside, last) if block)


@dataclass(frozen=True)
class Turns:
    """Which of ``n_blocks`` trains in a step. ``seed``: of the order that is drawn."""

    n_blocks: int
    steps: int
    mode: str
    seed: int

    def begins(self, step: int) -> bool:
        return step % self.steps == 0

    def block(self, step: int) -> int:
        """Of step ``step`` (from 0); every block once in each pass."""
        number, place = divmod(step // self.steps, self.n_blocks)
        return self._order(number)[place]

    def _order(self, number: int) -> list[int]:
        order = list(range(self.n_blocks))
        if self.mode == DESCENDING:
            order.reverse()
        if self.mode == RANDOM:
            Random(f"{self.seed} {number}").shuffle(order)
        return order
