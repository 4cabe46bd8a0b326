"""One optimizer step after another: micro-batches, gradient accumulation, clipping, update, and the state to go on
from."""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lema_core.errors import ConfigError, DataError, NonFiniteError
from lema_core.memory import peak_rss_bytes
from lema_core.runtime.batch import TokenBatch, total_targets
from lema_core.runtime.runner import ModelRunner
from lema_core.training import Outcome, TrainedFiles, Training
from lema_train.checkpoint import checkpoint_bytes, read_checkpoint, write_checkpoint
from lema_train.loss_scale import LossScale
from lema_train.schedule import check_schedule, learning_rate_at
from lema_train.state import TrainerState

#: steps between full collections: what the interpreter keeps for reuse would otherwise grow for a thousand steps
_COLLECT_EVERY = 25


@dataclass(frozen=True)
class TrainerOptions:
    """How steps are made. ``lr_schedule`` None leaves a caller's optimizer its own rate; ``total_steps`` is the
    schedule's length.

    ``skip_nonfinite``: a step that is not finite changes nothing. ``loss_scale`` None is 1, or moves where computing is
    in fp16. ``rows_per_micro_batch``: more rows given to a step become micro-batches. ``config``: the run's options,
    kept with a checkpoint.
    """

    learning_rate: float = 1e-4
    lr_schedule: str | None = "constant"
    warmup_steps: int = 0
    total_steps: int = 1
    max_grad_norm: float | None = 1.0
    skip_nonfinite: bool = True
    max_nonfinite_steps: int = 5
    loss_scale: float | None = None
    rows_per_micro_batch: int = 1
    seed: int = 0
    config: dict[str, Any] = field(default_factory=dict)


class Trainer:
    """Makes steps of ``training`` over a runner's streamed weights; ``files`` keeps what comes of them.

    ``step`` counts optimizer steps attempted; one whose loss or gradients are not finite is skipped whole: no weight
    and no moment changes, the schedule goes on.
    """

    def __init__(
        self,
        runner: ModelRunner,
        training: Training,
        files: TrainedFiles,
        options: TrainerOptions,
        say: Callable[[str], None] = lambda text: None,
    ) -> None:
        if options.lr_schedule is not None:
            check_schedule(options.lr_schedule, options.total_steps, options.warmup_steps)
        self.runner = runner
        self.training = training
        self.options = options
        self._files = files
        self.step = 0
        self.epoch = 0
        self.step_in_epoch = 0
        self.tokens = 0
        self.skipped_steps = 0
        self.metrics: dict[str, Any] = {}
        self._non_finite_in_a_row = 0
        self._scale = LossScale(options.loss_scale, runner.dtype == torch.float16)
        self._warned_long = False
        self._say = say

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
        lr = self._learning_rate()
        self.training.begin_step(self.step, lr, self._waits)
        loss, grad_norm = math.nan, 0.0
        without = sum(batch.n_targets == 0 for batch in batches)
        if without:
            self._say(
                f"step {self.step + 1}: {without} of {len(batches)} micro-batches have no supervised token; "
                "they are left out"
            )
        if total_targets(batches):
            how = replace(self.training.train_pass(self.step, self.options.seed), loss_scale=self._scale.value)
            loss = self.runner.train_step(batches, how, self.step, logits)
            grad_norm = self._update(loss, lr)
        self.step += 1
        if self.step % _COLLECT_EVERY == 0:
            gc.collect()
        tokens = sum(int(batch.attention_mask.sum()) for batch in batches)
        self.tokens += tokens
        self.metrics = {
            "step": self.step,
            "loss": loss,
            "lr": self.training.rate if lr is None else lr,
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

    @property
    def _waits(self) -> bool:
        """Nothing may change before all gradients are there."""
        return self.options.skip_nonfinite or self.options.max_grad_norm is not None or self._scale.value != 1

    def _update(self, loss: float, lr: float | None) -> float:
        """Clip and update, or leave everything as it was when something is not finite. Returns the norm before
        clipping."""
        if math.isfinite(loss):
            outcome = self.training.finish_step(lr, self.options.max_grad_norm, self._scale.value)
        else:
            self.training.discard_step()
            outcome = Outcome(math.nan, "the loss")
        if outcome.culprit is not None and not self._waits:
            raise NonFiniteError(
                f"step {self.step + 1}: {outcome.culprit} is not finite, and weights have changed by it "
                "(skip_nonfinite=false): go on from an earlier checkpoint, with a lower learning_rate"
            )
        too_large = self._scale.may_shrink and math.isfinite(loss)
        self._scale.after(outcome.culprit is None)
        if outcome.culprit is None:
            self._non_finite_in_a_row = 0
            return outcome.norm
        self.skipped_steps += 1
        where = after = ""
        if too_large:
            where, after = " in fp16", f"; the loss scale is {self._scale.value:g} now"
        else:
            self._non_finite_in_a_row += 1
        self._say(
            f"step {self.step + 1}: {outcome.culprit} is not finite{where}; the step is skipped, no weight was "
            f"changed{after}"
        )
        return outcome.norm

    def _learning_rate(self) -> float | None:
        """Of this step; None where the training has its own."""
        o = self.options
        if o.lr_schedule is None:
            return None
        return learning_rate_at(self.step, o.total_steps, o.learning_rate, o.lr_schedule, o.warmup_steps)

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
        return checkpoint_bytes(self._files)

    def save_checkpoint(self, path: str | Path) -> Path:
        """Write what trained, with optimizer and trainer state beside it; complete or not there."""
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
            optimizer=self.training.optimizer_name,
            tokens=self.tokens,
            skipped_steps=self.skipped_steps,
            non_finite_in_a_row=self._non_finite_in_a_row,
            loss_scale=self._scale.value,
            steps_at_scale=self._scale.steps,
            config=o.config,
        )
        write_checkpoint(path, state, self._files)
        return path

    def load_checkpoint(self, path: str | Path) -> TrainerState:
        """Go on from a checkpoint: weights, moments, step and data position. Options given now win over those of the
        checkpoint.

        Raises CheckpointError when it is incomplete or of another training, ConfigError when its options were others.
        """
        path = Path(path)
        state, tensors = read_checkpoint(path)
        own, other = (config.get("training_mode") for config in (self.options.config, state.config))
        if own is not None and other is not None and own != other:
            raise ConfigError(
                f"{path}: written by a run with training_mode={other}, and training_mode is {own}: give the one that "
                "it had, or another output_dir"
            )
        self._files.read(path, tensors, state)
        self.step, self.epoch, self.step_in_epoch = state.step, state.epoch, state.step_in_epoch
        self.tokens, self.skipped_steps = state.tokens, state.skipped_steps
        self._non_finite_in_a_row = state.non_finite_in_a_row
        self._scale.go_on(state.loss_scale, state.steps_at_scale)
        return state
