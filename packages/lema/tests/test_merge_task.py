"""task=merge: the folder it leaves answers as base and LoRA weights do, here and in transformers."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from lema import LemaConfig, LemaModel
from lema.cli import main
from lema.merge_task import merge
from lema_core.errors import CheckpointError, ConfigError

IDS = torch.arange(4, 44).reshape(2, 20)


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def trained(base: Path, folder: Path, **options: Any) -> torch.Tensor:
    """Writes random LoRA weights to ``folder``; returns the logits of base and LoRA weights."""
    config = LemaConfig(model_name_or_path=str(base), strategy="resident", lora_rank=4, lora_alpha=8, **options)
    with LemaModel(config) as model:
        model.initialize_lora()
        generator = torch.Generator().manual_seed(1)
        model.lora.copy_(
            {name: torch.randn(p.shape, generator=generator) * 0.1 for name, p in model.lora.parameters().items()}
        )
        model.save_pretrained(folder)
        return model.logits(IDS)


def answers(folder: Path) -> torch.Tensor:
    with LemaModel(LemaConfig(model_name_or_path=str(folder), strategy="resident")) as model:
        return model.logits(IDS)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_merged_folder_answers_as_base_and_lora_do(
    tmp_path: Path, make_model: Any, make_tokenizer: Any, dtype: torch.dtype, tied: bool
) -> None:
    from transformers import AutoModelForCausalLM

    base = make_tokenizer(make_model(tmp_path / "base", dtype=dtype, shards=3, tie_word_embeddings=tied))
    live = trained(base, tmp_path / "lora", lora_target_modules=["q_proj", "down_proj", "lm_head"])
    summary = merge(
        LemaConfig(
            task="merge", lora_path=tmp_path / "lora", output_dir=tmp_path / "out", merge_dtype="float32",
            max_shard_size="40KB",
        )
    )  # fmt: skip
    out = tmp_path / "out"
    assert summary["merged"] == str(out) and summary["tensors_changed"] == 2 * 4 + 1
    assert len(list(out.glob("*.safetensors"))) > 3
    assert all(
        (out / name).read_bytes() == (base / name).read_bytes() for name in ("tokenizer.json", "tokenizer_config.json")
    )
    torch.testing.assert_close(answers(out), live, rtol=0, atol=1e-5)
    assert (answers(base) - live).abs().max() > 1e-2
    model = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
    with torch.no_grad():
        torch.testing.assert_close(model(IDS).logits, live, rtol=0, atol=1e-5)


def test_from_training_to_an_answer_on_the_command_line(
    lema: Any, tiny_llama: Path, make_rows: Any, chats: Any
) -> None:
    make_rows(lema.cwd / "rows.jsonl", chats(4))
    lema.ok(f"model_name_or_path={tiny_llama}", "train_file=rows.jsonl", "output_dir=run", "max_steps=2", "lora_rank=2")
    child = lema.ok("task=merge", "lora_path=run/checkpoint-2", "output_dir=merged")
    assert re.search(rf"^merged +{lema.cwd / 'merged'}$", child.out, re.MULTILINE)
    assert {path.name for path in (lema.cwd / "merged").iterdir()} == {path.name for path in tiny_llama.iterdir()}
    lema.ok("model_name_or_path=merged", "task=generate", "prompt=say", "max_new_tokens=3")
    error = lema.error("task=merge", "lora_path=run/checkpoint-2", "output_dir=run")
    assert f"output_dir: {lema.cwd / 'run'} is or holds run/checkpoint-2, which is read" in error
    error = lema.error("task=merge", "lora_path=run/checkpoint-2", f"output_dir={tiny_llama}")
    assert f"output_dir: {tiny_llama} is or holds {tiny_llama}, which is read" in error
    error = lema.error("task=merge", "lora_path=run", "output_dir=other")
    assert "no adapter_config.json in run; give one of its checkpoints, such as run/checkpoint-2" in error


def test_a_signal_leaves_nothing(lema: Any, tiny_llama: Path) -> None:
    trained(tiny_llama, lema.cwd / "lora")
    interrupt = """
import os, signal
from lema_train import merge_write
read, count = merge_write.read_elements, 0
def counting(*arguments):
    global count
    count += 1
    if count == 9:
        os.kill(os.getpid(), signal.SIGINT)
    return read(*arguments)
merge_write.read_elements = counting
"""
    error = lema.error("task=merge", "lora_path=lora", "output_dir=out", code=130, before=interrupt)
    assert "stopped by SIGINT; nothing is left of the merge" in error
    assert sorted(path.name for path in lema.cwd.iterdir() if path.is_dir()) == ["lora"]


def test_the_base_that_is_given_counts(tmp_path: Path, make_model: Any, tiny_llama: Path) -> None:
    trained(tiny_llama, tmp_path / "lora")
    other = make_model(tmp_path / "other", seed=7)
    options = {"task": "merge", "lora_path": tmp_path / "lora", "output_dir": tmp_path / "out"}
    assert merge(LemaConfig(**options, model_name_or_path=str(other)))["model"] == str(other)
    assert not (tmp_path / "out/tokenizer.json").exists()
    wrong = make_model(tmp_path / "wrong", hidden_size=32)
    with pytest.raises(CheckpointError, match=r"q_proj\.lora_A \[4, 32\] expected, \[4, 64\] found"):
        merge(LemaConfig(**options, model_name_or_path=str(wrong)))
    path = tmp_path / "lora/adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"base_model_name_or_path": None}))
    with pytest.raises(ConfigError, match="names no base model; give model_name_or_path"):
        merge(LemaConfig(**options))


def test_updates_below_the_rounding_are_told(
    tmp_path: Path, make_model: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    base = make_model(tmp_path / "base", dtype=torch.bfloat16)
    trained(base, tmp_path / "lora", lora_target_modules=["q_proj"])
    options = {"task": "merge", "lora_path": tmp_path / "lora", "output_dir": tmp_path / "out"}
    summary = merge(LemaConfig(**options))
    assert 0 < summary["numbers_lost"] < summary["numbers_updated"] == 4 * 64 * 64
    said = capsys.readouterr().out
    assert (
        f"{summary['numbers_lost']:,} of 16,384 numbers (" in said and "merge_dtype=float32 keeps such changes" in said
    )
    assert merge(LemaConfig(**options, merge_dtype="float32"))["numbers_lost"] is None


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["output_dir=out"], "task=merge needs trained weights: lora_path=FOLDER"),
        (["lora_path=here", "delta_path=here", "output_dir=out"], "takes lora_path or delta_path, and both are given"),
        (["lora_path=here"], "task=merge needs a folder of its own: output_dir=FOLDER"),
        (
            ["lora_path=here", "output_dir=out", "max_shard_size=auto"],
            "max_shard_size: 'auto' is not allowed; allowed: bytes",
        ),
        (
            ["lora_path=here", "output_dir=out", "merge_dtype=int8"],
            "merge_dtype: 'int8' is not allowed; allowed: keep, ",
        ),
    ],
)
def test_what_is_missing_is_said(argv: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["task=merge", *argv]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(("given", "expected"), [("5GB", 5 * 10**9), ("2 KiB", 2048), (1000, 1000), ("1000", 1000)])
def test_sizes_of_shards(given: Any, expected: int) -> None:
    config = LemaConfig(max_shard_size=given)
    assert config.max_shard_size == expected and LemaConfig.from_dict(config.to_dict()) == config
