"""LoRA as a training: an optimizer over the LoRA weights, whose gradients are clipped by their global norm."""

from __future__ import annotations

from torch.nn import Parameter

from lema_core.adapter import ModelAdapter
from lema_core.errors import ConfigError
from lema_core.ops.low_rank import LowRankUpdate
from lema_core.runtime.runner import TrainPass
from lema_core.selection import Selection
from lema_core.training import Outcome, Training
from lema_train.clipping import clip_
from lema_train.lora import LoraWeights
from lema_train.lora_files import LoraFiles


class LoraTraining(Training):
    """A caller's own optimizer keeps its rate where no schedule is set."""

    def __init__(self, lora: LoraWeights, n_layers: int, selection: Selection | None = None) -> None:
        self.lora = lora
        self.updates: dict[str, LowRankUpdate] = lora.updates()
        self._first_layer = lora.first_layer(n_layers)
        self._selection = selection

    def describe(self) -> str:
        if self._selection is None:
            return f"{len(self.lora.modules)} modules train"
        return self._selection.describe()

    def parameters(self) -> list[Parameter]:
        return list(self.lora.parameters().values())

    def files(self, adapter: ModelAdapter, base_name: str) -> LoraFiles:
        return LoraFiles(self, adapter, base_name)

    @property
    def optimizer_name(self) -> str:
        return type(self.optimizer).__name__

    @property
    def numbers(self) -> int:
        return self.lora.num_parameters

    def train_pass(self, step: int, seed: int) -> TrainPass:
        return TrainPass(self._first_layer, seed)

    def begin_step(self, step: int, lr: float | None = None, waits: bool = True) -> None:
        if self.optimizer is None:
            raise ConfigError("LoRA weights are trained by an optimizer: use get_trainer()")
        self.optimizer.zero_grad(set_to_none=True)

    def finish_step(self, lr: float | None, max_norm: float | None, loss_scale: float) -> Outcome:
        grads = {name: p.grad for name, p in self.lora.parameters().items() if p.grad is not None}
        if loss_scale != 1:
            for grad in grads.values():
                grad.div_(loss_scale)
        norm, culprit = clip_(grads, max_norm)
        if culprit is None:
            if lr is not None:
                for group in self.optimizer.param_groups:
                    group["lr"] = lr
            self.optimizer.step()
        self.discard_step()
        return Outcome(norm, culprit)

    def discard_step(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)

    @property
    def rate(self) -> float:
        return float(self.optimizer.param_groups[0]["lr"])
