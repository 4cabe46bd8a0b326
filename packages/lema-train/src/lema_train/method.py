"""LoRA as a training method: what ``training_mode=lora`` makes and loads."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

import torch

from lema_core.adapter import ModelAdapter
from lema_core.checkpoint.describe import shorten
from lema_core.errors import ConfigError
from lema_core.ops.adamw import AdamWKernel
from lema_core.selection import ALL_LINEAR, select_modules
from lema_train.lora import LoraConfig, LoraWeights
from lema_train.lora_training import LoraTraining
from lema_train.peft_format import load_peft


class LoraOptions(Protocol):
    """The options of a run that this method reads."""

    lora_rank: int
    lora_alpha: float
    lora_dropout: float
    lora_target_modules: str | list[str]
    use_rslora: bool
    trainable_layers: list[int | str]
    seed: int


class LoraMethod:
    """Named by the ``lora`` TrainingMethod record."""

    @staticmethod
    def create(adapter: ModelAdapter, options: LoraOptions, device: torch.device, kernel: AdamWKernel) -> LoraTraining:
        """New LoRA weights where ``options`` say. Raises ConfigError for targets that match nothing. The kernel is for
        methods that have no optimizer of their own."""
        selection = select_modules(adapter, options.lora_target_modules, options.trainable_layers)
        stacks = sorted({spec.stack for spec in selection.modules if spec.expert is not None})
        if stacks and options.lora_dropout:
            raise ConfigError(
                f"lora_dropout: 0 expected where experts train ({shorten(stacks)}), as PEFT has none there; "
                f"{options.lora_dropout} found"
            )
        twice = _twice_the_rank(options) if stacks else []
        config = LoraConfig(
            rank=options.lora_rank,
            alpha=options.lora_alpha,
            dropout=options.lora_dropout,
            target_modules=options.lora_target_modules,
            use_rslora=options.use_rslora,
            layers=options.trainable_layers or None,
            rank_pattern=dict.fromkeys(twice, 2 * options.lora_rank),
            alpha_pattern=dict.fromkeys(twice, 2 * options.lora_alpha),
        )
        lora = LoraWeights(config, selection.modules, seed=options.seed, device=device)
        return LoraTraining(lora, adapter.n_layers, selection)

    @staticmethod
    def load(folder: Path, adapter: ModelAdapter, device: torch.device) -> LoraTraining:
        """LoRA weights from a PEFT folder or a checkpoint. Raises CheckpointError when they do not fit ``adapter``."""
        return LoraTraining(load_peft(folder, adapter, device=device), adapter.n_layers)


def _twice_the_rank(options: LoraOptions) -> list[str]:
    """Under ``all-linear`` gate and up of an expert have a rank each, in one stack; as PEFT 0.21 writes it."""
    targets = options.lora_target_modules
    entries = [targets] if isinstance(targets, str) else targets
    everything = any(entry.lower() == ALL_LINEAR for entry in entries)
    return [r".*\.gate_up_proj"] if everything else []
