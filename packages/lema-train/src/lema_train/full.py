"""The model's own weights as a training: what ``training_mode=selective_full`` trains, all of them by default."""

from __future__ import annotations

from typing import Protocol

import torch

from lema_core.adapter import ModelAdapter
from lema_core.ops.adamw import AdamWKernel
from lema_core.selection import TensorSelection, select_tensors
from lema_core.training import AdamWOptions, OptimizerOptions, WeightTraining


class FullOptions(OptimizerOptions, Protocol):
    """The options of a run that this method reads."""

    trainable_modules: list[str]
    trainable_layers: list[int | str]


class FullTraining(WeightTraining):
    """Named by the ``selective_full`` TrainingMethod record."""

    def __init__(
        self, adapter: ModelAdapter, selection: TensorSelection, options: AdamWOptions, lr: float, kernel: AdamWKernel
    ) -> None:
        super().__init__(adapter, [spec.name for spec in selection.tensors], options, lr, kernel)
        self._selection = selection

    @classmethod
    def create(
        cls, adapter: ModelAdapter, options: FullOptions, device: torch.device, kernel: AdamWKernel
    ) -> FullTraining:
        """What ``options`` select. Raises ConfigError for entries that match nothing."""
        selection = select_tensors(adapter, options.trainable_modules, options.trainable_layers)
        adamw = AdamWOptions.of(options, selection.tensors)
        return cls(adapter, selection, adamw, options.learning_rate, kernel)

    def describe(self) -> str:
        return self._selection.describe()
