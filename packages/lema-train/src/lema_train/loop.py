"""A whole training run: steps, interval saving and evaluation, rotation, and a stop that loses nothing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lema_core.runtime.batch import TokenBatch
from lema_train.checkpoint import checkpoint_folder, rotate
from lema_train.data import Batch, BatchLoader
from lema_train.trainer import Trainer


@dataclass
class LoopOptions:
    """``save_steps`` None saves at the end only; ``keep``: checkpoints that stay; ``eval_steps`` None evaluates at the
    end only."""

    output_dir: Path
    total_steps: int
    save_steps: int | None = None
    keep: int | None = None
    eval_steps: int | None = None


@dataclass
class LoopEvents:
    """Who is told what. ``stop()`` is asked after each step and its evaluation; True ends the run after a save."""

    step: Callable[[dict[str, Any]], None] = lambda metrics: None
    saved: Callable[[Path, int], None] = lambda path, step: None
    evaluate: Callable[[int], None] | None = None
    stop: Callable[[], bool] = lambda: False
    say: Callable[[str], None] = lambda text: None


@dataclass
class LoopResult:
    """``checkpoint``: the newest one written; ``stopped``: the run ended before its last step. Losses are None without
    a step."""

    checkpoint: Path | None = None
    stopped: bool = False
    loss_first: float | None = None
    loss_last: float | None = None


def token_batch(batch: Batch) -> TokenBatch:
    return TokenBatch(batch.input_ids, batch.attention_mask, batch.labels)


def run_training(trainer: Trainer, loader: BatchLoader, options: LoopOptions, events: LoopEvents) -> LoopResult:
    """Train until ``total_steps``; the trainer and the loader stand where a resume left them."""
    result = LoopResult()
    while trainer.step < options.total_steps:
        metrics = trainer.train_micro_batches([token_batch(batch) for batch in next(loader)])
        position = loader.state_dict()
        trainer.epoch, trainer.step_in_epoch = position["epoch"], position["step_in_epoch"]
        result.loss_last = metrics["loss"]
        if result.loss_first is None:
            result.loss_first = result.loss_last
        events.step(metrics)
        at_end = trainer.step == options.total_steps
        if events.evaluate is not None and options.eval_steps and trainer.step % options.eval_steps == 0 and not at_end:
            events.evaluate(trainer.step)
        result.stopped = not at_end and events.stop()
        if at_end or result.stopped or (options.save_steps and trainer.step % options.save_steps == 0):
            result.checkpoint = save(trainer, options, events)
        if result.stopped:
            break
    return result


def save(trainer: Trainer, options: LoopOptions, events: LoopEvents) -> Path:
    """Save under this step's name, then remove the oldest beyond ``keep``: never the other way round."""
    path = trainer.save_checkpoint(checkpoint_folder(options.output_dir, trainer.step))
    events.saved(path, trainer.step)
    for old in rotate(path, options.keep):
        events.say(f"removed {old.name} (save_total_limit={options.keep})")
    return path
