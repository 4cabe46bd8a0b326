"""Training, evaluation and generation as a user runs them: what is written, printed and equal."""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from lema import LemaConfig, LemaModel
from lema.evaluation import evaluate_dataset
from lema_train.data import load_samples

STEP_KEYS = [
    "step", "loss", "lr", "grad_norm", "tokens", "step_s", "wait_s", "read_bytes", "demand_bytes", "written_bytes",
    "device_peak_bytes", "ram_peak_bytes", "rss_peak_bytes",
]  # fmt: skip
#: code that replaces the loss of some steps, counted from 0
LOSS_AT = """
from lema_core.runtime.runner import ModelRunner
compute = ModelRunner.train_step
def spoilt(runner, batches, how, step, logits=None):
    loss = compute(runner, batches, how, step, logits)
    return float("{loss}") if step {step} else loss
ModelRunner.train_step = spoilt
"""
Rows = list[dict[str, Any]]


def test_train_then_evaluate_and_generate(
    lema: Any, tiny_llama: Path, make_rows: Any, chats: Callable[[int], Rows], read_steps: Any
) -> None:
    make_rows(lema.cwd / "train.jsonl", chats(10))
    make_rows(lema.cwd / "eval.jsonl", chats(14)[10:])
    model = f"model_name_or_path={tiny_llama}"
    run = lema.ok(
        model, "train_file=train.jsonl", "eval_file=eval.jsonl", "eval_at_start=true", "output_dir=out", "max_steps=6",
        "lora_rank=4", "learning_rate=1e-2", "save_steps=4", exact=True,
    )  # fmt: skip
    out = lema.cwd / "out"

    steps = read_steps(out)
    assert [step["step"] for step in steps] == [1, 2, 3, 4, 5, 6]
    assert all(list(step) == STEP_KEYS for step in steps)
    assert all(math.isfinite(value) and value >= 0 for step in steps for value in step.values())
    # 30 tokens and more than a step's window of weights, in a process that has torch
    assert all(step["tokens"] > 20 and step["rss_peak_bytes"] > 50e6 for step in steps)
    summary = json.loads((out / "summary.json").read_text())
    assert (summary["steps"], summary["steps_this_run"], summary["skipped_steps"]) == (6, 6, 0)
    assert (summary["loss_first"], summary["loss_last"]) == (steps[0]["loss"], steps[-1]["loss"])
    assert summary["eval_loss_after"] < summary["eval_loss_before"]
    assert summary["checkpoint"] == str(out / "checkpoint-6") and f"saved {out / 'checkpoint-6'}" in run.out
    assert sorted(path.name for path in out.iterdir()) == [
        "checkpoint-4", "checkpoint-6", "metrics.jsonl", "summary.json"
    ]  # fmt: skip

    folder = out / "checkpoint-6"
    config = json.loads((folder / "adapter_config.json").read_text())
    assert (config["peft_type"], config["r"]) == ("LORA", 4)
    tensors = load_file(folder / "adapter_model.safetensors")
    assert len(tensors) == 2 * 7 * 4 and all(tensor.abs().sum() > 0 for tensor in tensors.values())
    assert all(name.endswith((".lora_A.weight", ".lora_B.weight")) for name in tensors)

    evaluated = lema.ok(model, "task=evaluate", "eval_file=eval.jsonl", f"lora_path={folder}").out
    with LemaModel(LemaConfig(model_name_or_path=str(tiny_llama))) as loaded:
        loaded.load_lora(folder)
        rows = load_samples(lema.cwd / "eval.jsonl", loaded.tokenizer, 1024, 128)
        expected = evaluate_dataset(loaded, rows)
        text = loaded.continue_text(loaded.tokenizer.encode("red"), loaded.tokenizer, 12)
    assert _printed(evaluated)["eval_loss"] == f"{expected.loss:.6g}"
    assert _printed(evaluated)["perplexity"] == f"{expected.perplexity:.6g}"
    assert summary["eval_loss_after"] == expected.loss and summary["perplexity_after"] == expected.perplexity
    generated = lema.ok(
        model, "task=generate", "prompt=red", "chat=false", "max_new_tokens=12", f"lora_path={folder}"
    ).out
    assert generated.startswith(text + "\ntask ")


def _printed(out: str) -> dict[str, str]:
    return dict(line.split(maxsplit=1) for line in out.splitlines())


def test_paths_are_the_callers_and_a_second_run_overwrites_nothing(
    lema: Any, tiny_llama: Path, make_rows: Any, chats: Callable[[int], Rows]
) -> None:
    elsewhere = lema.cwd / "else where"
    elsewhere.mkdir()
    (lema.cwd / "model").symlink_to(tiny_llama)
    make_rows(elsewhere / "data.jsonl", chats(3))
    arguments = ("model_name_or_path=../model", "train_file=./data.jsonl", "output_dir=out", "max_steps=2")
    run = lema.ok(*arguments, cwd=elsewhere)
    out = elsewhere / "out"
    assert re.search(rf"^checkpoint +{re.escape(str(out / 'checkpoint-2'))}$", run.out, re.MULTILINE)
    assert sorted(path.name for path in elsewhere.iterdir()) == ["data.jsonl", "out"]

    before = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    error = lema.error(*arguments, cwd=elsewhere, code=2)
    assert str(out) in error and "resume=auto" in error
    assert {path: path.read_bytes() for path in out.rglob("*") if path.is_file()} == before
    assert "a run takes one" in lema.error(*arguments, "seed=1,2", cwd=elsewhere, code=2)


def test_the_rate_follows_optimizer_steps_and_goes_on_over_a_skipped_one(
    lema: Any, tiny_llama: Path, make_rows: Any, chats: Callable[[int], Rows], read_steps: Any
) -> None:
    """20 micro-batches in fours, warm-up 2, cosine; the loss of step 4 is made infinite."""
    make_rows(lema.cwd / "rows.jsonl", chats(20))
    run = lema.ok(
        f"model_name_or_path={tiny_llama}", "train_file=rows.jsonl", "gradient_accumulation_steps=4", "lora_rank=2",
        "warmup_steps=2", "lr_schedule=cosine", "learning_rate=4e-4", "output_dir=out",
        before=LOSS_AT.format(step="== 3", loss="inf"),
    )  # fmt: skip
    steps = read_steps(lema.cwd / "out")
    cosine = [4e-4 * 0.5 * (1 + math.cos(math.pi * k / 3)) for k in range(3)]
    assert [step["lr"] for step in steps] == pytest.approx([0.0, 2e-4, *cosine], rel=1e-12)
    assert [step["loss"] is None for step in steps] == [False, False, False, True, False]
    assert json.loads((lema.cwd / "out/summary.json").read_text())["skipped_steps"] == 1
    assert "step 4: the loss is not finite; the step is skipped, no weight was changed" in run.out


def test_a_loss_that_stays_infinite_ends_the_run_and_spares_the_checkpoints(
    lema: Any, tiny_llama: Path, make_rows: Any, chats: Callable[[int], Rows]
) -> None:
    make_rows(lema.cwd / "rows.jsonl", chats(4))
    error = lema.error(
        f"model_name_or_path={tiny_llama}", "train_file=rows.jsonl", "lora_rank=2", "output_dir=out", "max_steps=20",
        "max_nonfinite_steps=2", "save_steps=1", before=LOSS_AT.format(step=">= 3", loss="nan"),
    )  # fmt: skip
    assert "2 steps in a row were not finite (step 5 is the last)" in error
    newest = load_file(lema.cwd / "out/checkpoint-4/adapter_model.safetensors")
    assert all(tensor.isfinite().all() for tensor in newest.values())
    third = lema.cwd / "out/checkpoint-3/adapter_model.safetensors"
    assert third.read_bytes() == (lema.cwd / "out/checkpoint-4/adapter_model.safetensors").read_bytes()


def test_a_file_of_options_with_yaml_numbers(
    lema: Any, tiny_llama: Path, make_rows: Any, chats: Callable[[int], Rows], read_steps: Any
) -> None:
    make_rows(lema.cwd / "rows.jsonl", chats(2))
    (lema.cwd / "run.yaml").write_text(
        f"model_name_or_path: {tiny_llama}\ntrain_file: rows.jsonl\nlearning_rate: 1e-3\nmax_steps: 2\n"
    )
    lema.ok("--config", "run.yaml", "lora_rank=2", "output_dir=out")
    assert [step["lr"] for step in read_steps(lema.cwd / "out")] == [1e-3, 1e-3]


def _first_row(run: Any) -> str:
    return run.out.split("trained, shown between ⟦ and ⟧:\n")[1].split("\nstep ")[0]


@pytest.mark.parametrize("auto_bos", [True, False])
def test_exactly_one_bos_in_training_and_generation(
    auto_bos: bool, lema: Any, make_model: Any, make_tokenizer: Any, make_rows: Any, chats: Callable[[int], Rows]
) -> None:
    """The template prints BOS; a tokenizer that adds one by itself must not add a second."""
    make_tokenizer(make_model(lema.cwd / "model"), auto_bos=auto_bos)
    make_rows(lema.cwd / "rows.jsonl", chats(2))
    run = lema.ok("model_name_or_path=model", "train_file=rows.jsonl", "max_steps=1", "lora_rank=2", "output_dir=out")
    assert _first_row(run).startswith("<s><|im_start|>") and _first_row(run).count("<s>") == 1
    ids = (
        "from lema.model import LemaModel\n"
        "def shown(model, ids, *rest, **more): print('ids', list(ids)); return ''\n"
        "LemaModel.continue_text = shown"
    )
    generated = lema.ok("model_name_or_path=model", "task=generate", "prompt=red", before=ids).out
    assert generated.startswith("ids [0, 2, ")


def test_both_answers_and_their_ends_are_trained(
    lema: Any, make_model: Any, make_tokenizer: Any, make_rows: Any
) -> None:
    make_tokenizer(make_model(lema.cwd / "model"))
    turns = [("user", "a"), ("assistant", "one"), ("user", "b"), ("assistant", "two")]
    make_rows(lema.cwd / "rows.jsonl", [{"messages": [{"role": r, "content": c} for r, c in turns]}])
    run = lema.ok("model_name_or_path=model", "train_file=rows.jsonl", "max_steps=1", "lora_rank=2", "output_dir=out")
    assert _first_row(run) == (
        "<s><|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n⟦one<|im_end|>⟧\n"
        "<|im_start|>user\nb<|im_end|>\n<|im_start|>assistant\n⟦two<|im_end|>⟧\n"
    )


@pytest.mark.parametrize(
    ("template", "said"),
    [
        (None, "chat_template.jinja"),
        ("{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}{% endfor %}", "cannot tell which tokens"),
        ("{% for m in messages %}{{ m['content'] }}{% endfor %}", "nothing that ends the assistant's turn"),
    ],
)
def test_a_template_that_does_not_tell_is_an_error(
    template: str | None,
    said: str,
    lema: Any,
    make_model: Any,
    make_tokenizer: Any,
    make_rows: Any,
    chats: Callable[[int], Rows],
) -> None:
    make_tokenizer(make_model(lema.cwd / "model"), template=template)
    make_rows(lema.cwd / "rows.jsonl", chats(2))
    error = lema.error("model_name_or_path=model", "train_file=rows.jsonl", "output_dir=out")
    assert said in error and "rows.jsonl:1: " in error
    assert not (lema.cwd / "out").exists()


def test_padding_by_eos_leaves_the_loss_alone_and_trains_each_rows_own_eos(
    lema: Any, make_model: Any, make_tokenizer: Any, make_rows: Any, read_steps: Any
) -> None:
    """No pad token, so EOS fills the shorter row; both rows in one batch against each alone."""
    make_tokenizer(make_model(lema.cwd / "model"), eos_token="</s>")
    rows = [{"prompt": "ab", "completion": "cd"}, {"prompt": "xyz", "completion": "pqrstuv"}]
    files = [
        make_rows(lema.cwd / f"{name}.jsonl", part) for name, part in (("0", rows[:1]), ("1", rows[1:]), ("2", rows))
    ]
    losses = []
    for file in files:
        run = lema.ok(
            "model_name_or_path=model", f"train_file={file}", "batch_size=2", "max_steps=1", f"output_dir={file}.out",
            "lora_rank=2",
        )  # fmt: skip
        assert _first_row(run).count("</s>⟧") == 1
        losses.append(read_steps(Path(f"{file}.out"))[0]["loss"])
    # a completion's tokens and the one EOS behind them
    assert losses[2] == pytest.approx((3 * losses[0] + 8 * losses[1]) / 11, rel=1e-6)


def test_help_and_a_mistyped_option_do_not_wait_for_torch(tmp_path: Path) -> None:
    code = (
        "import sys\n"
        "from lema.cli import main\n"
        "codes = [main(['--help']), main(['learning_rat=1']), main(['+recipe=dem'])]\n"
        "print(codes, [name for name in ('torch', 'numpy', 'tokenizers') if name in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert result.stdout.splitlines()[-1] == "[0, 2, 2] []"
