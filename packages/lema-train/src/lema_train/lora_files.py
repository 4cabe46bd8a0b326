"""LoRA weights in a checkpoint: PEFT's files, and the states of whatever optimizer trains them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from torch import Tensor

from lema_core.adapter import ModelAdapter
from lema_core.checkpoint import TensorInfo, TensorToWrite, read_tensor
from lema_core.errors import ConfigError
from lema_core.training import SavedRun
from lema_train.optimizer import load_optimizer_state, optimizer_state_tensors
from lema_train.peft_format import load_peft, peft_bytes, save_peft

if TYPE_CHECKING:
    from lema_train.lora_training import LoraTraining


class LoraFiles:
    """``base_model``: the name that is written into adapter_config.json."""

    def __init__(self, training: LoraTraining, adapter: ModelAdapter, base_model: str | None) -> None:
        self._training = training
        self._adapter = adapter
        self._base_model = base_model

    @property
    def weights_nbytes(self) -> int:
        return peft_bytes(self._training.lora)

    @property
    def nbytes(self) -> int:
        return self.weights_nbytes + sum(tensor.nbytes for tensor in self._states().values())

    def write_weights(self, folder: Path) -> None:
        save_peft(folder, self._training.lora, self._adapter, self._base_model)

    def states(self, step: int) -> list[TensorToWrite]:
        return [
            (name, tensor.dtype, tuple(tensor.shape), lambda tensor=tensor: tensor)
            for name, tensor in self._states().items()
        ]

    def read(self, folder: Path, states: Mapping[str, TensorInfo], saved: SavedRun) -> None:
        found, lora = load_peft(folder, self._adapter), self._training.lora
        own, values = lora.parameters(), found.parameters()
        if {n: p.shape for n, p in values.items()} != {n: p.shape for n, p in own.items()}:
            raise ConfigError(
                f"{folder}: its LoRA weights (rank {found.config.rank}, {len(found.modules)} modules) are not those "
                f"asked for (rank {lora.config.rank}, {len(lora.modules)} modules); "
                "give the same lora_* options and layers"
            )
        lora.copy_(values)
        tensors = {name: read_tensor(info) for name, info in states.items()}
        load_optimizer_state(self._training.optimizer, own, tensors, saved.optimizer)

    def _states(self) -> Mapping[str, Tensor]:
        return optimizer_state_tensors(self._training.optimizer, self._training.lora.parameters())
