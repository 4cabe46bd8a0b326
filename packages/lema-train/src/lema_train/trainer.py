"""One optimizer step after another: micro-batches, gradient accumulation, clipping, update, and the state to go on
from."""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lema_core.errors import ConfigError, DataError, NonFiniteError
from lema_core.memory import peak_rss_bytes
from lema_core.runtime.batch import TokenBatch, total_targets
from lema_core.runtime.runner import ModelRunner, TrainPass
from lema_train.checkpoint import checkpoint_bytes, read_checkpoint, write_checkpoint
from lema_train.clipping import clip_
from lema_train.lora import LoraWeights
from lema_train.optimizer import Optimizer, load_optimizer_state, optimizer_state_tensors
from lema_train.peft_format import load_peft, peft_bytes, save_peft
from lema_train.schedule import check_schedule, learning_rate_at
from lema_train.state import TrainerState

#: steps between full collections: what the interpreter keeps for reuse would otherwise grow for a thousand steps
_COLLECT_EVERY = 25


@dataclass(frozen=True)
class TrainerOptions:
    """How steps are made. ``lr_schedule`` None leaves a caller's optimizer its own rate; ``total_steps`` is the
    schedule's length.

    ``rows_per_micro_batch``: more rows given to a step become micro-batches.
    ``base_model``: the name written into adapter_config.json; ``config``: the run's options, kept with a checkpoint.
    """

    learning_rate: float = 1e-4
    lr_schedule: str | None = "constant"
    warmup_steps: int = 0
    total_steps: int = 1
    max_grad_norm: float | None = 1.0
    max_nonfinite_steps: int = 5
    rows_per_micro_batch: int = 1
    seed: int = 0
    base_model: str | None = None
    config: dict[str, Any] = field(default_factory=dict)


class Trainer:
    """Trains LoRA weights with ``optimizer`` over a runner's streamed weights.

    ``step`` counts optimizer steps attempted; one whose loss or gradients are not finite is skipped whole: no weight
    and no moment changes, the schedule goes on.
    """

    def __init__(
        self,
        runner: ModelRunner,
        lora: LoraWeights,
        optimizer: Optimizer,
        options: TrainerOptions,
        say: Callable[[str], None] = lambda text: None,
    ) -> None:
        if options.lr_schedule is not None:
            check_schedule(options.lr_schedule, options.total_steps, options.warmup_steps)
        self.runner = runner
        self.lora = lora
        self.optimizer = optimizer
        self.options = options
        self.step = 0
        self.epoch = 0
        self.step_in_epoch = 0
        self.tokens = 0
        self.skipped_steps = 0
        self.metrics: dict[str, Any] = {}
        self._non_finite_in_a_row = 0
        self._warned_long = False
        self._say = say
        self._how = TrainPass(lora.first_layer(runner.adapter.n_layers), options.seed)

    # -- steps

    def train_step(
        self,
        input_ids: Tensor,
        labels: Tensor | None = None,
        attention_mask: Tensor | None = None,
        return_logits: bool = True,
    ) -> tuple[Tensor | None, float]:
        """One optimizer step on int64 [B, T] ids; returns (logits before the update, fp32 [B, T, V] on the CPU, or
        None, and the loss).

        ``labels`` are shifted here; -100 is not supervised; default: the ids themselves. Raises DataError for ids
        outside the vocabulary, NonFiniteError after too many skipped steps in a row.
        """
        whole = TokenBatch.of(input_ids, attention_mask, input_ids if labels is None else labels)
        whole.check_ids(self.runner.adapter.vocab_size)
        rows = self.options.rows_per_micro_batch
        batches = [whole.rows(i, i + rows) for i in range(0, whole.input_ids.shape[0], rows)]
        if not return_logits:
            return None, self.train_micro_batches(batches)["loss"]
        left_out = {i: self.runner.logits(batch) for i, batch in enumerate(batches) if not batch.n_targets}
        logits: dict[int, Tensor] = {}
        loss = self.train_micro_batches(batches, logits)["loss"]
        logits |= left_out
        return torch.cat([logits[i] for i in range(len(batches))]), loss

    def train_micro_batches(
        self, batches: Sequence[TokenBatch], logits: dict[int, Tensor] | None = None
    ) -> dict[str, Any]:
        """One optimizer step over ``batches``, their loss weighted by token; returns the step's metrics.

        ``logits``: see ModelRunner.train_step. A micro-batch without supervised tokens counts as left out; when none
        has any, nothing changes and the loss is NaN.
        """
        started = time.perf_counter()
        for batch in batches:
            batch.check_ids(self.runner.adapter.vocab_size)
        self._warn_if_long(batches)
        lr = self._set_learning_rate()
        self.optimizer.zero_grad(set_to_none=True)
        loss, grad_norm = math.nan, 0.0
        without = sum(batch.n_targets == 0 for batch in batches)
        if without:
            self._say(
                f"step {self.step + 1}: {without} of {len(batches)} micro-batches have no supervised token; "
                "they are left out"
            )
        if total_targets(batches):
            loss = self.runner.train_step(batches, self._how, self.step, logits)
            grad_norm = self._update(loss)
        self.optimizer.zero_grad(set_to_none=True)
        self.step += 1
        if self.step % _COLLECT_EVERY == 0:
            gc.collect()
        tokens = sum(int(batch.attention_mask.sum()) for batch in batches)
        self.tokens += tokens
        self.metrics = {
            "step": self.step,
            "loss": loss,
            "lr": lr,
            "grad_norm": grad_norm,
            "tokens": tokens,
            **self._measured(started),
        }
        if self._non_finite_in_a_row >= self.options.max_nonfinite_steps:
            raise NonFiniteError(
                f"{self._non_finite_in_a_row} steps in a row were not finite (step {self.step} is the last); "
                "no weight was changed by them; lower learning_rate, or look at the rows of these steps"
            )
        return self.metrics

    def _update(self, loss: float) -> float:
        """Clip and update, or leave everything as it was when something is not finite. Returns the norm before
        clipping."""
        grads = {name: p.grad for name, p in self.lora.parameters().items() if p.grad is not None}
        culprit = None if math.isfinite(loss) else "the loss"
        norm = math.nan
        if culprit is None:
            norm, culprit = clip_(grads, self.options.max_grad_norm)
        if culprit is not None:
            self.skipped_steps += 1
            self._non_finite_in_a_row += 1
            self._say(f"step {self.step + 1}: {culprit} is not finite; the step is skipped, no weight was changed")
            return norm
        self._non_finite_in_a_row = 0
        self.optimizer.step()
        return norm

    def _set_learning_rate(self) -> float:
        o = self.options
        if o.lr_schedule is not None:
            lr = learning_rate_at(self.step, o.total_steps, o.learning_rate, o.lr_schedule, o.warmup_steps)
            for group in self.optimizer.param_groups:
                group["lr"] = lr
        return float(self.optimizer.param_groups[0]["lr"])

    def _warn_if_long(self, batches: Sequence[TokenBatch]) -> None:
        limit = self.runner.adapter.max_positions
        longest = max(batch.input_ids.shape[1] for batch in batches)
        if limit is None or longest <= limit:
            return
        text = f"a row has {longest} tokens, the model's positions were trained for {limit}"
        if self.runner.adapter.hard_max_positions:
            raise DataError(f"{text}; lower max_seq_length")
        if not self._warned_long:
            self._warned_long = True
            self._say(f"{text}; answers may suffer")

    def _measured(self, started: float) -> dict[str, Any]:
        stats = self.runner.stats().values()
        return {
            "step_s": time.perf_counter() - started,
            "wait_s": sum(s.wait_s for s in stats),
            "read_bytes": sum(s.read_bytes for s in stats),
            "demand_bytes": sum(s.demand_bytes for s in stats),
            "written_bytes": sum(s.written_bytes for s in stats),
            "device_peak_bytes": sum(s.device_peak_bytes for s in stats),
            "ram_peak_bytes": sum(s.ram_peak_bytes for s in stats),
            "rss_peak_bytes": peak_rss_bytes(),
        }

    # -- state

    def checkpoint_bytes(self) -> int:
        """Disk space one checkpoint takes at most."""
        return checkpoint_bytes(peft_bytes(self.lora), self._optimizer_tensors())

    def save_checkpoint(self, path: str | Path) -> Path:
        """Write LoRA weights in PEFT's format with optimizer and trainer state beside them; complete or not there."""
        path = Path(path)
        o = self.options
        state = TrainerState(
            step=self.step,
            total_steps=o.total_steps,
            epoch=self.epoch,
            step_in_epoch=self.step_in_epoch,
            seed=o.seed,
            base_learning_rate=o.learning_rate,
            lr_schedule=o.lr_schedule or "",
            warmup_steps=o.warmup_steps,
            optimizer=type(self.optimizer).__name__,
            tokens=self.tokens,
            skipped_steps=self.skipped_steps,
            non_finite_in_a_row=self._non_finite_in_a_row,
            config=o.config,
        )

        def write_weights(folder: Path) -> None:
            save_peft(folder, self.lora, self.runner.adapter, o.base_model)

        write_checkpoint(path, state, self._optimizer_tensors(), write_weights, peft_bytes(self.lora))
        return path

    def load_checkpoint(self, path: str | Path) -> TrainerState:
        """Go on from a checkpoint: weights, moments, step and data position. Options given now win over those of the
        checkpoint.

        Raises CheckpointError when it is incomplete or of other LoRA weights, ConfigError when the LoRA options differ.
        """
        path = Path(path)
        state, tensors = read_checkpoint(path)
        saved = load_peft(path, self.runner.adapter)
        own = self.lora.parameters()
        values = saved.parameters()
        if {n: p.shape for n, p in values.items()} != {n: p.shape for n, p in own.items()}:
            raise ConfigError(
                f"{path}: its LoRA weights (rank {saved.config.rank}, {len(saved.modules)} modules) are not those "
                f"asked for (rank {self.lora.config.rank}, {len(self.lora.modules)} modules); "
                "give the same lora_* options and layers"
            )
        self.lora.copy_(values)
        load_optimizer_state(self.optimizer, own, tensors, state.optimizer)
        self.step, self.epoch, self.step_in_epoch = state.step, state.epoch, state.step_in_epoch
        self.tokens, self.skipped_steps = state.tokens, state.skipped_steps
        self._non_finite_in_a_row = state.non_finite_in_a_row
        return state

    def _optimizer_tensors(self) -> dict[str, Tensor]:
        return optimizer_state_tensors(self.optimizer, self.lora.parameters())
