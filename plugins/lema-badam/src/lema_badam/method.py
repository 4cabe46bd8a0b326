"""BAdam (Luo, Yu and Li 2024, arXiv:2404.02827): block coordinate descent whose inner solver is Adam.

The model's layers are cut into blocks. One block trains for K steps, with moments that start from zero; then it is the
next one's turn::

    for each pass over the blocks, for each block, in the order of the pass:
        m = v = 0
        K times, with t = 1 ... K:
            g = gradient of the loss for this block alone
            m = b1 m + (1 - b1) g          v = b2 v + (1 - b2) g^2
            w = w (1 - lr d) - lr m / (1 - b1^t) / (sqrt(v / (1 - b2^t)) + eps)

Decay d is decoupled and leaves norms and biases alone, as everywhere in lema. A clipped norm is that of the block.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Protocol

import torch

from lema_badam.blocks import BlockOptions, Turns, cut_blocks
from lema_core.adapter import ModelAdapter
from lema_core.method_options import read_options
from lema_core.ops.adamw import AdamWKernel
from lema_core.selection import TensorSelection, select_tensors
from lema_core.training import AdamWOptions, OptimizerOptions, WeightTraining


class Options(OptimizerOptions, Protocol):
    """The options of a run that this method reads."""

    trainable_modules: list[str]
    trainable_layers: list[int | str]
    method_options: Mapping[str, object] | None
    seed: int


class BlockTraining(WeightTraining):
    """Named by the ``badam`` TrainingMethod record."""

    optimizer_name = "BAdam"

    def __init__(
        self,
        adapter: ModelAdapter,
        selection: TensorSelection,
        options: AdamWOptions,
        lr: float,
        kernel: AdamWKernel,
        how: BlockOptions,
        seed: int,
    ) -> None:
        super().__init__(adapter, [spec.name for spec in selection.tensors], options, lr, kernel)
        self.blocks = cut_blocks(adapter, selection.tensors, how.layers_per_block)
        self.schedule = Turns(len(self.blocks), how.switch_block_every, how.switch_mode, seed)
        self._selection = selection

    @classmethod
    def create(
        cls, adapter: ModelAdapter, options: Options, device: torch.device, kernel: AdamWKernel
    ) -> BlockTraining:
        """What ``options`` select, in blocks. Raises ConfigError for entries that match nothing, and for
        ``method_options`` that are none of :class:`~lema_badam.blocks.BlockOptions`."""
        how = read_options(BlockOptions, options.method_options)
        selection = select_tensors(adapter, options.trainable_modules, options.trainable_layers)
        adamw = AdamWOptions.of(options, selection.tensors)
        return cls(adapter, selection, adamw, options.learning_rate, kernel, how, options.seed)

    def describe(self) -> str:
        turns = self.schedule
        return (
            f"{self._selection.describe()}; one of {len(self.blocks)} blocks at a time, {turns.steps} steps each, in "
            f"{turns.mode} order"
        )

    def active(self, step: int) -> Collection[str]:
        return self.blocks[self.schedule.block(step)]

    def restarts(self, step: int) -> bool:
        return self.schedule.begins(step)

    @property
    def turns(self) -> Sequence[Collection[str]]:
        return self.blocks
