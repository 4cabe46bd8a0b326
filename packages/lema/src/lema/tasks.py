"""What ``task=`` runs: each takes a config and returns the summary that is printed and, for runs, written as
summary.json."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lema.config import LemaConfig
from lema.display import TrainingDisplay
from lema.evaluation import Evaluation, evaluate_dataset
from lema.interrupts import StopRequest
from lema.metrics import MetricsWriter, finite_or_null, read_steps, refuse_earlier_run
from lema.model import LemaModel
from lema.prediction import measured, predicted
from lema.quantized import describe_copy
from lema_core.atomic import check_free_space, clean_leftovers, write_json
from lema_core.errors import CheckpointError
from lema_core.memory import anonymous_bytes, peak_rss_bytes
from lema_core.plugins import get_plugin_manager
from lema_train.checkpoint import STATE_FILE, latest_complete
from lema_train.claim import claimed
from lema_train.data import (
    BatchLoader,
    BatchPlan,
    Dataset,
    describe_sample,
    load_samples,
    split_dataset,
    typical_micro_batch,
    write_demo,
)
from lema_train.delta import refuse_delta
from lema_train.loop import LoopEvents, LoopOptions, run_training
from lema_train.trainer import Trainer


def train(config: LemaConfig) -> dict[str, Any]:
    """Fine-tune, save, evaluate. Writes metrics.jsonl, summary.json and checkpoints below ``output_dir``.

    Raises Interrupted after a signal, when the step under way is done and saved.
    """
    with StopRequest("steps after the newest checkpoint are not kept; go on with resume=auto") as stop:
        output_dir = Path(config.output_dir).absolute()
        display = TrainingDisplay()
        with claimed(output_dir, display.message):
            refuse_earlier_run(output_dir, config.resume)
            for line in clean_leftovers(output_dir):
                display.message(line)
            return _train_alone(config, output_dir, display, stop)


def _train_alone(config: LemaConfig, output_dir: Path, display: TrainingDisplay, stop: StopRequest) -> dict[str, Any]:
    """The run, in a folder that is no other run's."""
    with _opened(config) as model:
        selected = model.initialize_training()
        train_rows, eval_rows = _datasets(model, config, output_dir)
        plan = BatchPlan(train_rows.lengths, config.batch_size, config.gradient_accumulation_steps, config.seed)
        model.expect_tokens(max(train_rows.lengths), typical_micro_batch(train_rows, plan))
        total_steps = config.max_steps or config.num_epochs * plan.steps_per_epoch
        trainer = model.get_trainer(total_steps=total_steps, say=display.message)
        loader = BatchLoader(train_rows, plan, model.fill_id)
        _resume(trainer, loader, config, output_dir, display)
        check_free_space(output_dir, trainer.checkpoint_bytes() + model.working_bytes)
        display.message(_heading(model, selected, train_rows, total_steps))
        display.message("sample 0, " + describe_sample(train_rows[0], model.tokenizer_or_none))
        return _train(model, trainer, loader, eval_rows, total_steps, output_dir, display, stop)


def _train(
    model: LemaModel,
    trainer: Trainer,
    loader: BatchLoader,
    eval_rows: Dataset | None,
    total_steps: int,
    output_dir: Path,
    display: TrainingDisplay,
    stop: StopRequest,
) -> dict[str, Any]:
    config, hook = model.config, get_plugin_manager().hook
    evaluations: dict[str, Evaluation] = {}

    def evaluate_now(label: str) -> None:
        if eval_rows is not None:
            evaluations[label] = evaluation = evaluate_dataset(model, eval_rows)
            display.message(f"evaluation {label}: {_in_words(evaluation)}")

    def finished(metrics: dict[str, Any]) -> None:
        writer.write(metrics)
        display.step(metrics)
        hook.lema_step_finished(step=metrics["step"], metrics=metrics)

    def saved(path: Path, step: int) -> None:
        display.message(f"saved {path}")
        hook.lema_checkpoint_saved(path=path, step=step)

    hook.lema_run_started(config=config)
    writer = MetricsWriter(output_dir, trainer.step, display.message)
    first_step, started = trainer.step, time.perf_counter()
    try:
        if config.eval_at_start and trainer.step == 0:
            evaluate_now("before")
        training_started = time.perf_counter()
        display.start(total_steps, trainer.step, _budgets(model))
        events = LoopEvents(
            finished,
            saved,
            lambda step: stop.unless_stopped(lambda: evaluate_now(f"step {step}")),
            stop.requested,
            display.message,
        )
        options = LoopOptions(output_dir, total_steps, config.save_steps, config.save_total_limit, config.eval_steps)
        with stop.finishing_steps():
            result = run_training(trainer, loader, options, events)
            train_s = time.perf_counter() - training_started
            display.stop()
            stop.unless_stopped(lambda: evaluate_now("after"))
            checkpoint = result.checkpoint or latest_complete(output_dir).path
            summary = {
                "task": "train",
                "model": config.model_name_or_path,
                "steps": trainer.step,
                "steps_this_run": trainer.step - first_step,
                "skipped_steps": trainer.skipped_steps,
                "tokens": trainer.tokens,
                "loss_first": result.loss_first,
                "loss_last": result.loss_last,
                **(evaluations["before"].summary("_before") if "before" in evaluations else {}),
                **(evaluations["after"].summary("_after") if "after" in evaluations else {}),
                "train_s": train_s,
                "total_s": time.perf_counter() - started,
                **_memory(model),
                "prediction": predicted(model.run_plan),
                "measured": measured(read_steps(output_dir, first_step)),
                "example": evaluations["after"].example if "after" in evaluations else None,
                "checkpoint": None if checkpoint is None else str(checkpoint),
                **_quantized(model),
            }
            write_json(output_dir / "summary.json", finite_or_null(summary))
    finally:
        display.stop()
        writer.close()
    stop.raise_if_requested(
        f"the run is saved in {checkpoint}; go on with resume=auto" if result.stopped else "the run was over"
    )
    return summary


def evaluate(config: LemaConfig) -> dict[str, Any]:
    """Loss, perplexity and exact match on ``eval_file``, or on the held-out share of ``train_file``."""
    with StopRequest(), _opened(config) as model:
        _load_trained(model, config)
        rows = _evaluation_rows(model, config)
        model.expect_tokens(max(rows.lengths))
        started = time.perf_counter()
        evaluation = evaluate_dataset(model, rows)
        return {
            "task": "evaluate",
            "rows": len(rows),
            **evaluation.summary(),
            "seconds_s": time.perf_counter() - started,
            **_memory(model),
            **_quantized(model),
            "example": evaluation.example,
        }


def generate(config: LemaConfig) -> dict[str, Any]:
    """Answer ``prompt``, printed as it comes. With a chat template the prompt is a user's message, unless
    ``chat=false``."""
    with StopRequest(), _opened(config) as model:
        _load_trained(model, config)
        tokenizer = model.tokenizer
        chat = tokenizer.chat_template is not None if config.chat is None else config.chat
        if chat:
            ids = tokenizer.chat_ids([{"role": "user", "content": config.prompt}], add_generation_prompt=True)
        else:
            ids = tokenizer.encode(config.prompt)
        model.expect_tokens(len(ids))
        started = time.perf_counter()

        def show(piece: str) -> None:
            print(piece, end="", flush=True)

        try:
            model.continue_text(ids, tokenizer, config.max_new_tokens, on_text=show)
        finally:
            print(flush=True)
        return {"task": "generate", "seconds_s": time.perf_counter() - started, **_memory(model), **_quantized(model)}


def _load_trained(model: LemaModel, config: LemaConfig) -> None:
    """Put what ``lora_path`` or ``delta_path`` names on the model."""
    if config.lora_path is not None:
        refuse_delta(Path(config.lora_path))
        model.load_lora(config.lora_path)
    if config.delta_path is not None:
        model.load_delta(config.delta_path, trains=False)


@contextmanager
def _opened(config: LemaConfig) -> Iterator[LemaModel]:
    model = LemaModel(config)
    try:
        yield model
    finally:
        model.close()


def _datasets(model: LemaModel, config: LemaConfig, output_dir: Path) -> tuple[Dataset, Dataset | None]:
    """Training and evaluation rows; ``demo`` writes lema's own set below ``output_dir`` first."""
    train_file, eval_file = config.train_file, config.eval_file
    if train_file == "demo":
        train_path, held_out = write_demo(output_dir / "demo", seed=config.seed)
        train_file, eval_file = str(train_path), eval_file or str(held_out)
    rows = load_rows(model, config, train_file)
    if eval_file is not None:
        return rows, load_rows(model, config, eval_file)
    return split_dataset(rows, config.eval_split, config.seed) if config.eval_split else (rows, None)


def _evaluation_rows(model: LemaModel, config: LemaConfig) -> Dataset:
    if config.eval_file is not None:
        return load_rows(model, config, config.eval_file)
    return split_dataset(load_rows(model, config, config.train_file), config.eval_split, config.seed)[1]


def load_rows(model: LemaModel, config: LemaConfig, path: str) -> Dataset:
    """The rows of a JSONL file, encoded and cut to what ``model`` and ``config`` take."""
    limit = config.max_seq_length
    if model.adapter.hard_max_positions:
        limit = min(limit, model.adapter.max_positions)
    return load_samples(Path(path), model.tokenizer_or_none, limit, model.adapter.vocab_size)


def _resume(
    trainer: Trainer, loader: BatchLoader, config: LemaConfig, output_dir: Path, display: TrainingDisplay
) -> None:
    if config.resume == "none":
        return
    path = Path(config.resume)
    if config.resume == "auto":
        found = latest_complete(output_dir)
        for reason in found.skipped:
            display.message(f"passed over: {reason}")
        if found.path is None:
            display.message(f"resume=auto: no complete checkpoint in {output_dir}; starting at step 0")
            return
        path = found.path
    elif not (path / STATE_FILE).exists() and not path.is_dir():
        raise CheckpointError(f"resume={path}: no such checkpoint folder")
    state = trainer.load_checkpoint(path)
    loader.load_state_dict({"epoch": state.epoch, "step_in_epoch": state.step_in_epoch})
    display.message(f"going on from {path} at step {trainer.step}")


def _heading(model: LemaModel, selected: str, rows: Dataset, total_steps: int) -> str:
    windows = "; ".join(model.budget.because) if model.budget else ""
    lines = [f"{model.folder}: {selected}; {model.training.numbers:,} trained numbers"]
    if model.quantized is not None:
        lines.append(describe_copy(model.quantized))
    return "\n".join([*lines, f"{len(rows)} rows, {total_steps} steps; {windows}"])


def _budgets(model: LemaModel) -> dict[str, int]:
    """What the streams were given; activations come and go within what is left."""
    given = [stats for kind, stats in model.stats().items() if kind != "activations"]
    return {
        "ram": sum(stats.ram_window_bytes for stats in given),
        "device": sum(stats.device_window_bytes for stats in given),
    }


def _quantized(model: LemaModel) -> dict[str, Any]:
    """Of weights that were quantized for this run, or one before."""
    if model.quantized is None:
        return {}
    copy = model.quantized
    return {"weights": f"{copy.format}, by {copy.backend}, in {copy.path}", "weights_bytes": copy.report.bytes_after}


def _memory(model: LemaModel) -> dict[str, int]:
    weights = model.stats()["weights"]
    return {
        "device_peak_bytes": weights.device_peak_bytes,
        "ram_peak_bytes": weights.ram_peak_bytes,
        "ram_window_bytes": weights.ram_window_bytes,
        "rss_peak_bytes": peak_rss_bytes(),
        "anonymous_bytes": anonymous_bytes(),
    }


def _in_words(evaluation: Evaluation) -> str:
    words = f"loss {evaluation.loss:.4f}, perplexity {evaluation.perplexity:.4g}"
    if evaluation.exact_match is not None:
        words += f", exact match {100 * evaluation.exact_match:.1f} % of {evaluation.answers}"
    return words
