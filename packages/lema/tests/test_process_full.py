"""Training of a model's own weights as a user runs it: killed, stopped, out of disk, twice at once, and looked at."""

from __future__ import annotations

import json
import random
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lema import LemaModel
from lema_train.checkpoint import find_checkpoints, verify

Rows = list[dict[str, Any]]
#: what is the same however often a run was interrupted
EXACT = ("step", "loss", "lr", "grad_norm", "tokens")
FILES = "delta.safetensors", "optimizer.safetensors"
#: code that cuts tiny models into many granules, as big ones are
PIECES = """
import lema.model
from lema_core.store.model import cut_model
lema.model.cut_model = lambda *given, **more: cut_model(*given, max_granule_bytes=24_000, **more)
"""
#: code that makes every update of a granule last, so that a signal comes in its middle
SLOW_UPDATES = """
import time
from lema_core.store.updates import WeightUpdates
change = WeightUpdates._change
def slow(*given):
    time.sleep(0.005)
    change(*given)
WeightUpdates._change = slow
"""
#: code that makes every step last
SLOW_LOOP = """
import time
from lema_train.trainer import Trainer
step = Trainer.train_micro_batches
def slow(*given):
    time.sleep(0.05)
    return step(*given)
Trainer.train_micro_batches = slow
"""
#: how long a program may go on after a signal; far above what it takes
AT_ONCE_S = 30
#: code that ends the program with 99 when it unpickles a class
NO_PICKLE = """
import os, sys
def watch(event, arguments):
    if event == "pickle.find_class": os._exit(99)
sys.addaudithook(watch)
"""
#: code that says so little of the disk is free
FREE = """
import shutil
from types import SimpleNamespace
shutil.disk_usage = lambda path: SimpleNamespace(total=10**12, used=10**12 - {free}, free={free})
"""


@pytest.fixture
def options(lema: Any, make_model: Any, make_tokenizer: Any, make_rows: Any, chats: Callable[[int], Rows]) -> list[str]:
    """24,000 numbers, a window of some of their granules, states on disk."""
    make_tokenizer(make_model(lema.cwd / "model", hidden_size=32, intermediate_size=48, num_hidden_layers=2))
    make_rows(lema.cwd / "rows.jsonl", chats(6))
    return [
        "model_name_or_path=model", "training_mode=selective_full", "train_file=rows.jsonl", "batch_size=2",
        "lr_schedule=cosine", "warmup_steps=3", "learning_rate=3e-3", "weight_decay=0.1", "seed=5", "weights_ram=90KB",
        "opt_state_ram=1B", "grad_acc_ram=1B",
    ]  # fmt: skip


def same_files(one: Path, other: Path) -> bool:
    return all((one / name).read_bytes() == (other / name).read_bytes() for name in FILES)


def figures(steps: Rows) -> list[list[Any]]:
    return [[step[key] for key in EXACT] for step in steps]


def only_known(out: Path, running: bool = False) -> None:
    """Fails for anything in a run's folder that is neither its work nor, while it runs, its lock."""
    known = r"checkpoint-\d+|metrics\.jsonl|summary\.json" + (r"|\.lema-run" if running else "")
    strange = [path.name for path in out.iterdir() if not re.fullmatch(known, path.name)]
    assert not strange
    assert not [path for path in out.rglob("*") if path.suffix == ".partial"]


@pytest.mark.parametrize(
    ("kills", "mode"),
    [
        (3, []),
        pytest.param(50, [], marks=pytest.mark.slow),
        pytest.param(
            20, ["opt_state_bits=8", "grad_acc_bits=8", "trainable_layers=[emb,last:1]"], marks=pytest.mark.slow
        ),
    ],
)
def test_kills_lose_nothing_but_steps_after_the_checkpoint_that_is_named(
    kills: int, mode: list[str], options: list[str], lema: Any, read_steps: Any
) -> None:
    """Killed at random moments of steps and of saves. Every checkpoint is, bit for bit, that of the run that was never
    killed, the next run goes on from the newest, and finds and removes what lies beside."""
    straight, out, moments = lema.cwd / "straight", lema.cwd / "out", random.Random(kills)
    steps = 4 * kills + 4
    options = [*options, *mode, f"max_steps={steps}", "save_steps=1"]
    lema.ok(*options, "output_dir=straight", before=PIECES)
    newest, parts, removed = 0, 0, 0
    for kill in range(kills):
        child = lema.start(*options, "output_dir=out", "resume=auto", before=PIECES + SLOW_UPDATES)
        child.wait_for("step ")
        child.wait_until(lambda newest=newest: _newest(out) > newest, "another checkpoint")
        if kill % 2:
            child.wait_until(lambda: any(out.glob(".checkpoint-*.tmp-*")), "a save under way")
        time.sleep(moments.uniform(0, 0.03))
        child.signal(signal.SIGKILL)
        assert child.wait() == -signal.SIGKILL
        if kill:
            assert f"going on from {out / f'checkpoint-{newest}'} at step {newest}\n" in child.out
        removed += child.out.count("removed, left by an interrupted run")
        found = find_checkpoints(out)
        newest = found[-1][0]
        for step, path in found:
            assert verify(path).step == step and same_files(path, straight / path.name), step
        left = [path for path in out.iterdir() if not re.fullmatch(r"checkpoint-\d+", path.name)]
        left = [path for path in left if path.name not in ("metrics.jsonl", ".lema-run")]
        # the working files went with their process
        assert all(re.fullmatch(rf"\.checkpoint-\d+\.tmp-{child.pid}", path.name) for path in left), left
        parts += len(left)
    assert newest < steps
    last = lema.ok(*options, "output_dir=out", "resume=auto", before=PIECES)
    removed += last.out.count("removed, left by an interrupted run")
    assert removed == parts and "passed over" not in last.out
    only_known(out)
    assert figures(read_steps(out)) == figures(read_steps(straight))
    assert same_files(out / f"checkpoint-{steps}", straight / f"checkpoint-{steps}")


def _newest(out: Path) -> int:
    return max((step for step, _ in find_checkpoints(out)), default=0)


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), pytest.param(signal.SIGTERM, 143, marks=pytest.mark.slow)]
)
def test_b70_stopped_in_a_step_it_is_finished_and_saved_and_the_resume_is_exact(
    number: signal.Signals, code: int, options: list[str], lema: Any, read_steps: Any
) -> None:
    options = [*options, "max_steps=8"]
    child = lema.start(*options, "output_dir=out", before=PIECES + SLOW_UPDATES)
    child.wait_for("step 2/8")
    child.signal(number)
    assert child.wait(AT_ONCE_S) == code
    out = lema.cwd / "out"
    ((step, checkpoint),) = find_checkpoints(out)
    assert 2 < step < 8 and verify(checkpoint).step == step
    assert f"the run is saved in {checkpoint}; go on with resume=auto" in child.err
    only_known(out)
    # another layout of memory, and everything in RAM
    lema.ok(*options[:-4], "max_steps=8", "output_dir=out", "resume=auto", before=PIECES + NO_PICKLE)
    lema.ok(*options, "output_dir=straight", before=PIECES)
    assert figures(read_steps(out)) == figures(read_steps(lema.cwd / "straight"))
    assert same_files(out / "checkpoint-8", lema.cwd / "straight" / "checkpoint-8")


def test_b70_twice_stops_at_once_and_keeps_the_last_checkpoint(options: list[str], lema: Any) -> None:
    slow = SLOW_UPDATES.replace("0.005", "0.05")
    child = lema.start(*options, "max_steps=8", "save_steps=2", "output_dir=out", before=PIECES + slow)
    child.wait_for("step 3/8")
    child.signal(signal.SIGINT)
    child.wait_for("stopping after this step")
    child.signal(signal.SIGINT)
    assert child.wait(AT_ONCE_S) == 130
    assert [step for step, _ in find_checkpoints(lema.cwd / "out")] == [2]
    only_known(lema.cwd / "out")


def test_b70_an_evaluation_is_given_up_while_updates_are_applied_in_it(
    options: list[str], lema: Any, read_steps: Any
) -> None:
    """What it had not come to is applied by the save: the resume is exact."""
    options = [*options, "max_steps=8", "eval_file=rows.jsonl"]
    waits = (
        "import time\n"
        "from lema_core.runtime.runner import ModelRunner\n"
        "def slow(*given):\n"
        "    print('evaluating', flush=True)\n"
        "    time.sleep(600)\n"
        "ModelRunner._hidden = slow\n"
    )
    child = lema.start(*options, "eval_steps=4", "output_dir=out", before=PIECES + SLOW_UPDATES + waits)
    child.wait_for("evaluating")
    child.signal(signal.SIGINT)
    assert child.wait(AT_ONCE_S) == 130
    out = lema.cwd / "out"
    assert [step for step, _ in find_checkpoints(out)] == [4]
    only_known(out)
    lema.ok(*options, "output_dir=out", "resume=auto", before=PIECES)
    lema.ok(*options, "output_dir=straight", before=PIECES)
    assert figures(read_steps(out)) == figures(read_steps(lema.cwd / "straight"))
    assert same_files(out / "checkpoint-8", lema.cwd / "straight" / "checkpoint-8")


# -- two at once


@pytest.mark.parametrize("mode", ["selective_full", "lora"])
def test_a_second_run_in_the_same_folder_is_refused_while_the_first_lives(
    mode: str, options: list[str], lema: Any
) -> None:
    options = [*(options if mode != "lora" else [*options[:1], options[2]]), "output_dir=out", "save_steps=1"]
    first = lema.start(*options, "max_steps=400", before=PIECES + SLOW_LOOP)
    first.wait_for("step 2/400")
    error = lema.error(*options, "max_steps=400", "resume=auto", code=2)
    assert f"output_dir: {lema.cwd / 'out'} is in use by another run, process {first.pid} on " in error
    assert first.code is None
    first.signal(signal.SIGKILL)
    first.wait()
    # the lock is gone with its process, whatever file it left
    step = _newest(lema.cwd / "out")
    lema.ok(*options, f"max_steps={step + 1}", "warmup_steps=0", "resume=auto")
    only_known(lema.cwd / "out")


# -- the disk


def test_b09_less_room_than_the_working_files_need_is_told_at_once(options: list[str], lema: Any) -> None:
    error = lema.error(*options, "max_steps=3", "output_dir=out", before=FREE.format(free=100_000))
    numbers = re.search(
        r"out: ([\d,]+) bytes of weights, optimizer states and gradients are needed, 100,000 are", error
    )
    # three times fp32, and once more for the gradients, in whole sectors
    needed = int(numbers[1].replace(",", ""))
    assert 16 * 24_000 < needed < 32 * 24_000
    assert not (lema.cwd / "out").exists()
    # room for the working files, and none for a checkpoint
    error = lema.error(*options, "max_steps=3", "output_dir=out", before=FREE.format(free=needed + 1000))
    assert f"{lema.cwd / 'out'}: " in error and f" bytes needed, {needed + 1000} bytes free on its disk" in error
    assert not (lema.cwd / "out").exists()


def test_b09_a_disk_that_is_full_keeps_the_old_checkpoint(options: list[str], lema: Any) -> None:
    """From the optimizer's states on, no file may be longer than 30 kB; all states are in RAM."""
    options = [*options[:-2], "output_dir=out", "save_total_limit=1", "save_steps=1", "resume=auto", "warmup_steps=0"]
    lema.ok(*options, "max_steps=1")
    limit = (
        "import resource\n"
        "from lema_train.weight_files import WeightFiles\n"
        "states = WeightFiles.states\n"
        "def limited(*given):\n"
        "    resource.setrlimit(resource.RLIMIT_FSIZE, (30000, 30000))\n"
        "    return states(*given)\n"
        "WeightFiles.states = limited"
    )
    error = lema.error(*options, "max_steps=2", before=limit)
    out = lema.cwd / "out"
    assert f"{out / 'checkpoint-2'}: cannot be written: File too large: " in error
    assert re.search(r" \d+ bytes needed, \d+ bytes free on its disk", error)
    assert sorted(path.name for path in out.iterdir()) == ["checkpoint-1", "metrics.jsonl", "summary.json"]
    assert verify(out / "checkpoint-1").step == 1
    run = lema.ok(*options, "max_steps=2")
    assert "going on from" in run.out and "removed checkpoint-1 (save_total_limit=1)" in run.out
    assert [step for step, _ in find_checkpoints(out)] == [2]


def test_b09_a_disk_that_fills_up_in_a_step_keeps_the_old_checkpoint(options: list[str], lema: Any) -> None:
    """The working files have no room any more: the run ends, with their figures, and goes on where there is room."""
    options = [*options, "output_dir=out", "save_steps=2", "resume=auto"]
    full = (
        "import errno\n"
        "from lema_core.store.unnamed import UnnamedFile\n"
        "from lema_train.trainer import Trainer\n"
        "step = Trainer.train_micro_batches\n"
        "def refuse(*given): raise OSError(errno.ENOSPC, 'No space left on device')\n"
        "def then_full(trainer, *given):\n"
        "    if trainer.step == 3: UnnamedFile.write = refuse\n"
        "    return step(trainer, *given)\n"
        "Trainer.train_micro_batches = then_full"
    )
    error = lema.error(*options, "max_steps=6", before=PIECES + full)
    out = lema.cwd / "out"
    assert re.search(
        r"out: (weights|optimizer states|gradients) cannot be written there: No space left on device: [\d,]+ "
        r"bytes needed, [\d,]+ free: make room",
        error,
    )
    assert [verify(path).step for _, path in find_checkpoints(out)] == [2]
    only_known(out)
    run = lema.ok(*options, "max_steps=6", before=PIECES)
    assert f"going on from {out / 'checkpoint-2'} at step 2" in run.out
    lema.ok(*options[:-3], "output_dir=straight", "max_steps=6", before=PIECES)
    assert same_files(out / "checkpoint-6", lema.cwd / "straight" / "checkpoint-6")


def test_b08_a_save_that_dies_in_any_file_is_never_gone_on_from(options: list[str], lema: Any) -> None:
    options = [*options, "output_dir=out", "save_steps=1", "resume=auto", "warmup_steps=0"]
    lema.ok(*options, "max_steps=1")
    out = lema.cwd / "out"
    for where in (
        "lema_train.delta.write_safetensors",
        "lema_train.checkpoint.write_safetensors",
        "lema_train.checkpoint.write_json",
    ):
        module, _, name = where.rpartition(".")
        die = (
            f"import os\nimport {module} as module\n"
            f"write = module.{name}\n"
            "def dying(path, *given):\n"
            "    if 'checkpoint-2.' not in str(path):\n        return write(path, *given)\n"
            "    write(path, *given)\n"
            "    os.truncate(path, path.stat().st_size // 2)\n"
            "    os.kill(os.getpid(), 9)\n"
            f"module.{name} = dying"
        )
        child = lema.run(*options, "max_steps=2", before=die)
        assert child.code == -signal.SIGKILL, child.err
        assert [step for step, _ in find_checkpoints(out)] == [1]
        part = out / f".checkpoint-2.tmp-{child.pid}"
        assert part.is_dir()
        error = lema.error(*options, "max_steps=2", f"resume={part}", "output_dir=other")
        assert "incomplete" in error
    run = lema.ok(*options, "max_steps=2")
    assert run.out.count("removed, left by an interrupted run") >= 1
    assert f"going on from {out / 'checkpoint-1'} at step 1" in run.out
    only_known(out)


# -- what was trained, looked at


def test_evaluate_and_generate_with_a_delta_give_what_the_run_gave(
    options: list[str], lema: Any, make_rows: Any, chats: Callable[[int], Rows]
) -> None:
    make_rows(lema.cwd / "eval.jsonl", chats(9)[6:])
    options = [*options, "learning_rate=1e-2", "max_steps=6", "output_dir=out", "eval_file=eval.jsonl"]
    lema.ok(*options, before=PIECES)
    summary = json.loads((lema.cwd / "out/summary.json").read_text())
    folder = lema.cwd / "out/checkpoint-6"
    small = ["model_name_or_path=model", "weights_ram=90KB", f"delta_path={folder}", "output_dir=working"]
    evaluated = lema.ok("task=evaluate", "eval_file=eval.jsonl", "batch_size=2", *small, before=PIECES).out
    assert f"eval_loss {summary['eval_loss_after']:.6g}" in re.sub(" +", " ", evaluated)
    generated = lema.ok("task=generate", "prompt=red", "chat=false", "max_new_tokens=9", *small, before=PIECES).out
    with LemaModel.from_pretrained(folder, output_dir=str(lema.cwd / "again")) as model:
        text = model.continue_text(model.tokenizer.encode("red"), model.tokenizer, 9)
    assert generated.startswith(text + "\ntask ")
    assert not (lema.cwd / "working").exists()
    error = lema.error("model_name_or_path=model", "task=generate", "prompt=red", f"lora_path={folder}")
    assert f"give them as delta_path={folder}" in error
    both = [*small, f"lora_path={folder}"]
    assert "both are given: leave one out" in lema.error("task=generate", "prompt=red", *both, code=2)
