"""The tasks as functions: what plugins are told, what summaries hold, and runs that have nothing left to do."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lema import LemaConfig, tasks
from lema_core.hookspecs import hookimpl
from lema_core.plugins import get_plugin_manager

Rows = list[dict[str, Any]]


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture
def config(tiny_llama: Path, tmp_path: Path, make_rows: Any, chats: Callable[[int], Rows]) -> Callable[..., LemaConfig]:
    """``config(**options)`` of a training run over 6 rows; 2 steps, LoRA rank 2."""
    rows = make_rows(tmp_path / "rows.jsonl", chats(6))

    def build(**options: Any) -> LemaConfig:
        given = {
            "model_name_or_path": str(tiny_llama), "train_file": str(rows), "output_dir": str(tmp_path / "out"),
            "lora_rank": 2, "max_steps": 2, **options,
        }  # fmt: skip
        return LemaConfig(**given)

    return build


@pytest.fixture
def observed() -> Iterator[list[tuple[str, Any]]]:
    """What a plugin was told, in order."""
    told: list[tuple[str, Any]] = []

    class Observer:
        @hookimpl
        def lema_run_started(self, config: LemaConfig) -> None:
            told.append(("started", config.max_steps))

        @hookimpl
        def lema_step_finished(self, step: int, metrics: dict[str, Any]) -> None:
            assert metrics["step"] == step
            told.append(("step", step))

        @hookimpl
        def lema_checkpoint_saved(self, path: Path, step: int) -> None:
            assert (path / "trainer_state.json").is_file()
            told.append(("saved", step))

    manager = get_plugin_manager()._manager
    observer = Observer()
    manager.register(observer)
    yield told
    manager.unregister(observer)


def test_plugins_are_told_in_order(config: Any, observed: list[tuple[str, Any]]) -> None:
    tasks.train(config(max_steps=3, save_steps=2))
    assert observed == [("started", 3), ("step", 1), ("step", 2), ("saved", 2), ("step", 3), ("saved", 3)]


def test_the_summary_is_what_is_written(config: Any, tmp_path: Path) -> None:
    summary = tasks.train(config(eval_split=0.3, eval_at_start=True))
    assert json.loads((tmp_path / "out/summary.json").read_text()) == summary
    assert summary["checkpoint"] == str(tmp_path / "out/checkpoint-2")
    assert summary["exact_match_before"] is not None and set(summary["example"]) == {"prompt", "expected", "answer"}
    evaluated = tasks.evaluate(config(eval_split=0.3, lora_path=summary["checkpoint"]))
    # the same rows are held out, though nobody wrote down which
    assert (evaluated["eval_loss"], evaluated["rows"]) == (summary["eval_loss_after"], 2)
    other = tasks.evaluate(config(eval_split=0.3, lora_path=summary["checkpoint"], seed=1))
    assert other["eval_loss"] != evaluated["eval_loss"]


def test_a_run_that_is_over_is_not_run_again(config: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first = tasks.train(config())
    lines = (tmp_path / "out/metrics.jsonl").read_text()
    again = tasks.train(config(resume="auto"))
    assert (again["steps"], again["steps_this_run"], again["loss_last"]) == (2, 0, None)
    assert again["checkpoint"] == first["checkpoint"]
    assert (tmp_path / "out/metrics.jsonl").read_text() == lines


def test_nothing_to_resume_starts_at_step_0(config: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert tasks.train(config(resume="auto"))["steps_this_run"] == 2
    assert "no complete checkpoint in " in capsys.readouterr().out


def test_figures_that_json_lacks_become_null(config: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A last step whose loss is infinite is skipped; the run still ends with a summary and a checkpoint."""
    from lema_core.runtime.runner import ModelRunner

    compute = ModelRunner.train_step
    monkeypatch.setattr(
        ModelRunner,
        "train_step",
        lambda runner, batches, how, step, *rest: (
            float("inf") if step == 1 else compute(runner, batches, how, step, *rest)
        ),
    )
    summary = tasks.train(config())
    assert summary["loss_last"] == float("inf") and summary["skipped_steps"] == 1
    assert json.loads((tmp_path / "out/summary.json").read_text())["loss_last"] is None


def test_epochs_decide_without_max_steps(config: Any) -> None:
    summary = tasks.train(config(max_steps=None, num_epochs=2, batch_size=2, gradient_accumulation_steps=2))
    assert summary["steps"] == 2 * 2


def test_the_demo_writes_its_rows_below_output_dir(config: Any, tmp_path: Path) -> None:
    tasks.train(config(train_file="demo", max_steps=1, eval_max_new_tokens=0))
    assert sorted(path.name for path in (tmp_path / "out/demo").iterdir()) == ["eval.jsonl", "train.jsonl"]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, "<s><|im_start|>user\nred<|im_end|>\n<|im_start|>assistant\n"),
        ({"chat": True}, "<s><|im_start|>user\nred<|im_end|>\n<|im_start|>assistant\n"),
        ({"chat": False}, "red"),
    ],
)
def test_a_prompt_is_a_chat_where_there_is_a_template(
    options: dict[str, Any],
    expected: str,
    config: Any,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    given = SimpleNamespace(text="")

    def continue_text(model: Any, ids: list[int], tokenizer: Any, n: int, on_text: Callable[[str], None]) -> str:
        given.text = tokenizer.decode(ids, skip_special=False)
        on_text("one")
        on_text(" two")
        return "one two"

    monkeypatch.setattr("lema.model.LemaModel.continue_text", continue_text)
    summary = tasks.generate(config(task="generate", prompt="red", **options))
    assert given.text == expected and summary["task"] == "generate"
    assert capsys.readouterr().out == "one two\n"
