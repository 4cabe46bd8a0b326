"""Runs that are killed and go on: the same numbers as a run that never stopped, and no checkpoint is ever lost."""

from __future__ import annotations

import json
import random
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from lema_train.checkpoint import find_checkpoints, verify

Rows = list[dict[str, Any]]
#: what is the same however often a run was interrupted
EXACT = ("step", "loss", "lr", "grad_norm", "tokens")
#: code that writes down the rows of every micro-batch, and leaves time to be killed between steps
ROWS_SEEN = """
import time
from lema_train.data import BatchLoader
following = BatchLoader.__next__
def noted(loader):
    batches = following(loader)
    with open("rows_seen.txt", "a") as file:
        file.write(f"{loader.step} {[b.sample_indices for b in batches]}\\n")
    time.sleep(0.02)
    return batches
BatchLoader.__next__ = noted
"""


@pytest.fixture
def options(tiny_llama: Path, lema: Any, make_rows: Any, chats: Callable[[int], Rows]) -> list[str]:
    """10 rows in batches of 2, 2 accumulated: epochs of 3 steps, the last of half as many rows."""
    make_rows(lema.cwd / "rows.jsonl", chats(10))
    return [
        f"model_name_or_path={tiny_llama}", "train_file=rows.jsonl", "batch_size=2", "gradient_accumulation_steps=2",
        "max_steps=10", "lr_schedule=cosine", "warmup_steps=3", "learning_rate=1e-2", "lora_dropout=0.3",
        "lora_rank=4", "seed=5",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("saved_at", "how"),
    [
        pytest.param(5, {"exact": True}, id="in the middle of epoch 2, as python -m lema"),
        pytest.param(6, {}, id="at an epoch border", marks=pytest.mark.slow),
    ],
)
def test_killed_and_resumed_is_bit_equal_to_a_straight_run(
    saved_at: int, how: dict[str, Any], options: list[str], lema: Any, read_steps: Any
) -> None:
    straight, broken = lema.cwd / "straight", lema.cwd / "broken"
    lema.ok(*options, f"output_dir={straight}", before=ROWS_SEEN)
    seen = dict(line.split(" ", 1) for line in (lema.cwd / "rows_seen.txt").read_text().splitlines())
    (lema.cwd / "rows_seen.txt").unlink()

    child = lema.start(*options, f"output_dir={broken}", f"save_steps={saved_at}", before=ROWS_SEEN, **how)
    child.wait_for(rf"step {saved_at + 1}/10")
    child.signal(signal.SIGKILL)
    assert child.wait() == -signal.SIGKILL and not (broken / "checkpoint-10").exists()
    resumed = lema.ok(*options, f"output_dir={broken}", "resume=auto", before=ROWS_SEEN, **how)

    assert f"going on from {broken / f'checkpoint-{saved_at}'} at step {saved_at}" in resumed.out
    both = [[[step[key] for key in EXACT] for step in read_steps(folder)] for folder in (straight, broken)]
    assert both[0] == both[1] and len(both[0]) == 10
    for name in ("adapter_model.safetensors", "optimizer.safetensors"):
        assert (straight / "checkpoint-10" / name).read_bytes() == (broken / "checkpoint-10" / name).read_bytes(), name
    # every step saw the same rows whichever process made it, those redone twice
    again = [line.split(" ", 1) for line in (lema.cwd / "rows_seen.txt").read_text().splitlines()]
    assert {step for step, _ in again} == set(seen) and all(rows == seen[step] for step, rows in again)
    states = [json.loads((folder / "checkpoint-10/trainer_state.json").read_text()) for folder in (straight, broken)]
    for key in ("step", "epoch", "step_in_epoch", "tokens", "skipped_steps", "total_steps"):
        assert states[0][key] == states[1][key], key
    assert (states[1]["epoch"], states[1]["step_in_epoch"]) == (3, 1)


def test_betas_of_the_command_line_win_in_the_bias_correction_too(options: list[str], lema: Any) -> None:
    """One step from a checkpoint with other betas, against AdamW's formula on what both checkpoints hold."""
    options = [*options, "lr_schedule=constant", "warmup_steps=0", "learning_rate=1e-2", "output_dir=out"]
    lema.ok(*options, "max_steps=5")
    lema.ok(*options, "max_steps=6", "resume=auto", "adam_beta1=0.5", "adam_beta2=0.75")
    weights = [load_file(lema.cwd / f"out/checkpoint-{step}/adapter_model.safetensors") for step in (5, 6)]
    states = [load_file(lema.cwd / f"out/checkpoint-{step}/optimizer.safetensors") for step in (5, 6)]
    for full_name, before in weights[0].items():
        name = full_name.removeprefix("base_model.model.").removesuffix(".weight")
        m5, m6 = (state[f"{name}.exp_avg"].double() for state in states)
        v5, v6 = (state[f"{name}.exp_avg_sq"].double() for state in states)
        gradient = (m6 - 0.5 * m5) / 0.5
        assert ((0.75 * v5 + 0.25 * gradient**2) - v6).norm() <= 1e-5 * v6.norm(), name
        update = 1e-2 / (1 - 0.5**6) * m6 / ((v6 / (1 - 0.75**6)).sqrt() + 1e-8)
        moved = before.double() - weights[1][full_name].double()
        assert (moved - update).norm() <= 1e-4 * update.norm(), name
        assert states[1][f"{name}.step"] == 6


@pytest.mark.parametrize("kills", [3, pytest.param(20, marks=pytest.mark.slow)])
def test_kills_while_saving_never_show_a_part_and_lose_nothing(
    kills: int, tiny_llama: Path, lema: Any, make_rows: Any, chats: Callable[[int], Rows]
) -> None:
    """Killed at random moments from the start of a save on; each next run goes on from the newest checkpoint."""
    make_rows(lema.cwd / "rows.jsonl", chats(4))
    out, moments = lema.cwd / "out", random.Random(0)
    arguments = (
        f"model_name_or_path={tiny_llama}", "train_file=rows.jsonl", "output_dir=out", "max_steps=100000",
        "lora_rank=64", "save_steps=1", "save_total_limit=3", "resume=auto",
    )  # fmt: skip
    said, newest = "", 0
    for kill in range(kills):
        child = lema.start(*arguments)
        child.wait_for("step ")
        child.wait_until(lambda newest=newest: _newest(out) > newest + 1, "two checkpoints more")
        child.wait_until(lambda: any(out.glob(".checkpoint-*.tmp-*")), "a save under way")
        time.sleep(moments.uniform(0, 0.03))
        child.signal(signal.SIGKILL)
        child.wait()
        said += child.out
        if kill:
            assert f"going on from {out / f'checkpoint-{newest}'} at step {newest}\n" in child.out
        folders = find_checkpoints(out)
        newest = folders[-1][0]
        # what has the final name is whole: sizes, hashes, and each step's own state
        assert [verify(path).step for _, path in folders] == [step for step, _ in folders]
        assert 2 <= len(folders) <= 4
    last = lema.ok(*[a for a in arguments if not a.startswith("max_steps")], f"max_steps={newest + 1}")
    said += last.out
    assert "removed, left by an interrupted run" in said and "passed over" not in said
    assert not [path for path in out.rglob("*") if "tmp-" in path.name or path.name.endswith(".partial")]
    assert [step for step, _ in find_checkpoints(out)][-1] == newest + 1


def _newest(out: Path) -> int:
    return max((step for step, _ in find_checkpoints(out)), default=0)


def test_a_broken_newest_checkpoint_is_passed_over_and_named_when_asked_for(options: list[str], lema: Any) -> None:
    lema.ok(*options, "output_dir=out", "save_steps=2", "max_steps=6", "warmup_steps=0")
    weights = lema.cwd / "out/checkpoint-6/adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-10])
    (lema.cwd / "out/checkpoint-4/trainer_state.json").unlink()

    run = lema.ok(*options, "output_dir=out", "resume=auto", "warmup_steps=0", "max_steps=6")
    out = lema.cwd / "out"
    assert _lines_after(run.out, "passed over: ") == [
        f"{out / 'checkpoint-6'}: incomplete: adapter_model.safetensors: "
        f"{weights.stat().st_size} bytes expected, {weights.stat().st_size - 10} bytes found",
        f"{out / 'checkpoint-4'}: incomplete: trainer_state.json is missing",
    ]
    assert f"going on from {out / 'checkpoint-2'} at step 2" in run.out
    # the save of that step replaced the broken folder
    assert verify(out / "checkpoint-6").step == 6

    shutil.copytree(out / "checkpoint-6", lema.cwd / "copy")
    (lema.cwd / "copy/optimizer.safetensors").unlink()
    error = lema.error(*options, "output_dir=other", "resume=copy")
    assert "incomplete: optimizer.safetensors is missing" in error and not (lema.cwd / "other").exists()
    assert "no such checkpoint folder" in lema.error(*options, "output_dir=other", "resume=nowhere")


def _lines_after(text: str, start: str) -> list[str]:
    return [line.removeprefix(start) for line in text.splitlines() if line.startswith(start)]


def test_no_pickle_is_written_or_read_and_another_format_is_refused_by_its_number(
    options: list[str], lema: Any
) -> None:
    options = [*options, "output_dir=out", "warmup_steps=0"]
    lema.ok(*options, "max_steps=2")
    folder = lema.cwd / "out/checkpoint-2"
    assert {path.suffix for path in folder.iterdir()} == {".json", ".safetensors"}
    for path in folder.iterdir():
        json.loads(path.read_text()) if path.suffix == ".json" else load_file(path)
    no_pickle = (
        "import os, sys\n"
        "def watch(event, arguments):\n"
        "    if event == 'pickle.find_class': os._exit(99)\n"
        "sys.addaudithook(watch)"
    )
    lema.ok(*options, "max_steps=3", "resume=auto", before=no_pickle)
    state = lema.cwd / "out/checkpoint-3/trainer_state.json"
    state.write_text(json.dumps(json.loads(state.read_text()) | {"format_version": 0}))
    error = lema.error(*options, "max_steps=4", "resume=auto")
    assert "checkpoint format 1 expected, 0 found" in error
