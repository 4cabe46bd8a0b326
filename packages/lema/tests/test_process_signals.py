"""Ctrl-C and SIGTERM while training, saving, evaluating and generating; once and twice; with a file that hangs."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lema_train.checkpoint import find_checkpoints, verify

Rows = list[dict[str, Any]]
BOTH = pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), pytest.param(signal.SIGTERM, 143, marks=pytest.mark.slow)]
)
#: how long a program may go on after a signal; far above what it takes, far below waiting for what hangs
AT_ONCE_S = 30

#: code that makes every step last, so that a signal comes in its middle
SLOW_STEPS = """
import time
from lema_core.runtime.runner import ModelRunner
compute = ModelRunner.train_step
def slow(runner, batches, how, step, logits=None):
    time.sleep(0.1)
    loss = compute(runner, batches, how, step, logits)
    time.sleep(0.1)
    return loss
ModelRunner.train_step = slow
"""
#: code that says when a checkpoint's optimizer states are being written, and hangs {seconds}
SLOW_SAVE = """
import time
import lema_train.checkpoint as checkpoint
write = checkpoint.write_safetensors
def slow(path, tensors):
    if "checkpoint-{step}." in str(path):
        print("saving", flush=True)
        time.sleep({seconds})
    write(path, tensors)
checkpoint.write_safetensors = slow
"""
#: code that says when an evaluation computes, and hangs
SLOW_EVALUATION = """
import time
from lema_core.runtime.runner import ModelRunner
def slow(runner, batch):
    print("evaluating", flush=True)
    time.sleep(600)
ModelRunner.loss = slow
"""
#: code that lets the prefetch thread hang in its 40th read
HANGING_FILE = """
import time
from lema_core.store.disk import DiskReader
read, count = DiskReader.read_granule, 0
def hanging(*arguments):
    global count
    count += 1
    if count == 40:
        print("hangs", flush=True)
        time.sleep(600)
    read(*arguments)
DiskReader.read_granule = hanging
"""


@pytest.fixture
def training(tiny_llama: Path, lema: Any, make_rows: Any, chats: Callable[[int], Rows]) -> list[str]:
    make_rows(lema.cwd / "rows.jsonl", chats(6))
    return [
        f"model_name_or_path={tiny_llama}", "train_file=rows.jsonl", "output_dir=out", "lora_rank=4", "max_steps=8",
        "lora_dropout=0.2", "lr_schedule=cosine", "learning_rate=1e-2",
    ]  # fmt: skip


def _complete(out: Path) -> list[int]:
    """Steps of all checkpoints; fails where one is not whole or a temporary file is left."""
    assert {path.name.split("-")[0] for path in out.iterdir()} <= {"checkpoint", "metrics.jsonl", "summary.json"}
    assert not [path for path in out.rglob("*") if ".partial" in path.name or path.name.startswith(".")]
    folders = find_checkpoints(out)
    assert [verify(path).step for _, path in folders] == [step for step, _ in folders]
    return [step for step, _ in folders]


@BOTH
def test_in_a_step_it_is_finished_and_saved_and_the_resume_is_exact(
    number: signal.Signals, code: int, training: list[str], lema: Any, read_steps: Any
) -> None:
    child = lema.start(*training, before=SLOW_STEPS)
    child.wait_for("step 3/8")
    child.signal(number)
    assert child.wait(AT_ONCE_S) == code
    out = lema.cwd / "out"
    (step,) = _complete(out)
    assert step in (4, 5) and len(read_steps(out)) == step
    assert "lema: stopping after this step; once more stops at once" in child.err
    assert f"lema: error: stopped by {number.name}; the run is saved in {out / f'checkpoint-{step}'}; " in child.err
    assert "Traceback" not in child.err

    lema.ok(*training, "resume=auto")
    straight = [*training, "output_dir=straight"]
    lema.ok(*straight)
    for name in ("adapter_model.safetensors", "optimizer.safetensors"):
        both = [(lema.cwd / run / "checkpoint-8" / name).read_bytes() for run in ("out", "straight")]
        assert both[0] == both[1], name


def test_twice_in_a_step_stops_at_once_and_keeps_the_last_checkpoint(training: list[str], lema: Any) -> None:
    child = lema.start(*training, "save_steps=2", before=SLOW_STEPS.replace("time.sleep(0.1)", "time.sleep(0.5)"))
    child.wait_for("step 3/8")
    child.signal(signal.SIGINT)
    child.wait_for("stopping after this step")
    child.signal(signal.SIGINT)
    assert child.wait(AT_ONCE_S) == 130
    assert _complete(lema.cwd / "out") == [2]
    assert "lema: error: stopped by SIGINT; steps after the newest checkpoint are not kept" in child.err
    assert "going on from" in lema.ok(*training, "resume=auto").out


def test_in_a_save_it_is_finished(training: list[str], lema: Any) -> None:
    child = lema.start(*training, "save_steps=2", before=SLOW_SAVE.format(step=2, seconds=0.5))
    child.wait_for("saving")
    child.signal(signal.SIGINT)
    assert child.wait(AT_ONCE_S) == 130
    # the step after is done too: the signal came when this one's end was past
    assert _complete(lema.cwd / "out") == [2, 3]


def test_twice_in_a_save_keeps_the_previous_checkpoint(training: list[str], lema: Any) -> None:
    child = lema.start(*training, "save_steps=2", before=SLOW_SAVE.format(step=4, seconds=600))
    child.wait_for("saving")
    for _ in range(2):
        child.signal(signal.SIGTERM)
        child.wait_for("stopping after this step")
    assert child.wait(AT_ONCE_S) == 143
    assert _complete(lema.cwd / "out") == [2]


@BOTH
def test_an_evaluation_between_steps_is_given_up_and_the_run_saved(
    number: signal.Signals, code: int, training: list[str], lema: Any
) -> None:
    child = lema.start(*training, "eval_file=rows.jsonl", "eval_steps=2", before=SLOW_EVALUATION)
    child.wait_for("evaluating")
    child.signal(number)
    assert child.wait(AT_ONCE_S) == code
    assert _complete(lema.cwd / "out") == [2]


def test_an_evaluation_at_the_end_is_given_up_and_the_run_is_over(training: list[str], lema: Any) -> None:
    child = lema.start(*training, "eval_file=rows.jsonl", before=SLOW_EVALUATION)
    child.wait_for("evaluating")
    child.signal(signal.SIGINT)
    assert child.wait(AT_ONCE_S) == 130
    assert _complete(lema.cwd / "out") == [8] and (lema.cwd / "out/summary.json").exists()
    assert "lema: error: stopped by SIGINT; the run was over" in child.err


@BOTH
def test_task_evaluate_stops_at_once(number: signal.Signals, code: int, training: list[str], lema: Any) -> None:
    child = lema.start(training[0], "task=evaluate", "eval_file=rows.jsonl", before=SLOW_EVALUATION)
    child.wait_for("evaluating")
    child.signal(number)
    assert child.wait(AT_ONCE_S) == code
    assert child.err == f"lema: error: stopped by {number.name}\n"


@BOTH
def test_task_generate_stops_at_once_and_keeps_what_it_printed(
    number: signal.Signals, code: int, tiny_llama: Path, lema: Any
) -> None:
    child = lema.start(
        f"model_name_or_path={tiny_llama}", "task=generate", "prompt=tell", "max_new_tokens=100000", "chat=false",
        before="from lema.model import LemaModel\nLemaModel.stop_ids = ()",
    )  # fmt: skip
    child.wait_for(r"[\w\W]{20}")
    child.signal(number)
    assert child.wait(AT_ONCE_S) == code
    assert child.err == f"lema: error: stopped by {number.name}\n" and len(child.out) > 20
    assert child.out.endswith("\n")


def test_a_file_that_hangs_does_not_keep_a_second_signal_from_ending_the_program(
    training: list[str], lema: Any
) -> None:
    """The prefetch thread is in a read that does not return; the program itself, to the end of its interpreter."""
    child = lema.start(*training, "weights_ram=400KB", "save_steps=1", before=HANGING_FILE, exact=True)
    child.wait_for("hangs")
    child.signal(signal.SIGINT)
    child.wait_for("stopping after this step")
    child.signal(signal.SIGINT)
    assert child.wait(AT_ONCE_S) == 130
    saved = _complete(lema.cwd / "out")
    assert child.out.count("\nsaved ") == len(saved) and "Traceback" not in child.err


def test_a_file_that_hangs_does_not_keep_generation_from_stopping(tiny_llama: Path, lema: Any) -> None:
    child = lema.start(
        f"model_name_or_path={tiny_llama}", "task=generate", "prompt=tell", "weights_ram=400KB", before=HANGING_FILE
    )
    child.wait_for("hangs")
    child.signal(signal.SIGTERM)
    assert child.wait(AT_ONCE_S) == 143
