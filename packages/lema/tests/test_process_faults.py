"""What a user can get wrong, through the whole program: one line that says what to do, and nothing written."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lema_train.checkpoint import find_checkpoints, verify

Rows = list[dict[str, Any]]
GOOD = '{"text": "hello"}'
#: code that ends the program with 99 when it asks for the network
NO_NETWORK = """
import os, sys
def watch(event, arguments):
    if event in ("socket.connect", "socket.getaddrinfo", "socket.gethostbyname", "socket.sendto"):
        os._exit(99)
sys.addaudithook(watch)
"""


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (f'{GOOD}\n\n{{"text": "he', "rows.jsonl:3: not valid JSON"),
        (f"{GOOD}\n[1, 2]\n", "rows.jsonl:2: a row must be a JSON object, found a list"),
        (f'{GOOD}\n{{"txt": "a"}}\n', "rows.jsonl:2: nothing to train on"),
        (f'{GOOD}\n{{"text": 5}}\n', "rows.jsonl:2: 'text' must be a string, found a number"),
        ('{"messages": []}\n', "rows.jsonl:1: 'messages' is empty"),
        (
            '{"messages": [{"role": "assistant", "content": "a"}, {"role": "user", "content": "b"}]}\n',
            "rows.jsonl:1: messages[0]: roles in wrong order",
        ),
        ("", "rows.jsonl: the file has no rows"),
        ("\n \n", "rows.jsonl: the file has no rows"),
        ('{"input_ids": [1, 2, 128]}\n', "rows.jsonl:1: input_ids[2] is 128, but the model's vocabulary"),
        (
            '{"messages": [{"role": "user", "content": "a long question"}, {"role": "assistant", "content": "b"}]}\n',
            "max_seq_length=8 cuts their answers off",
        ),
    ],
)
def test_a_bad_row_is_named_by_its_line(text: str, said: str, lema: Any, tiny_llama: Path) -> None:
    (lema.cwd / "rows.jsonl").write_text(text)
    error = lema.error(
        f"model_name_or_path={tiny_llama}", "train_file=rows.jsonl", "output_dir=out", "max_seq_length=8"
    )
    assert said in error and len(error) < 400
    assert not (lema.cwd / "out").exists()


def test_few_rows_and_no_newline_at_the_end(lema: Any, tiny_llama: Path, read_steps: Any) -> None:
    """3 rows with batches of 4: a step is made of what there is."""
    (lema.cwd / "rows.jsonl").write_text("\n".join([GOOD] * 3))
    lema.ok(f"model_name_or_path={tiny_llama}", "train_file=rows.jsonl", "batch_size=4", "output_dir=out")
    assert [(step["step"], step["tokens"]) for step in read_steps(lema.cwd / "out")] == [(1, 3 * 5)]


def test_a_file_that_is_not_there(lema: Any, tiny_llama: Path) -> None:
    error = lema.error(f"model_name_or_path={tiny_llama}", "train_file=./rows.jsonl", "output_dir=out")
    assert f"{lema.cwd / 'rows.jsonl'}: no such file" in error and not (lema.cwd / "out").exists()


@pytest.mark.parametrize(
    ("argument", "said"),
    [
        ("learning_rate=abc", "learning_rate: 'abc' is not allowed; allowed: a number greater than 0"),
        ("learning_rate=nan", "learning_rate: "),
        ("lora_rank=0", "lora_rank: 0 is not allowed; allowed: a whole number from 1"),
        ("weights_bits=7", "weights_bits: "),
        ("+learning_rat=1e-4", "did you mean 'learning_rate'?"),
        ("+recipe=lorra", "did you mean 'lora'?"),
    ],
)
def test_an_option_that_is_not_one(argument: str, said: str, lema: Any, tiny_llama: Path) -> None:
    (lema.cwd / "rows.jsonl").write_text(GOOD)
    error = lema.error(f"model_name_or_path={tiny_llama}", "train_file=rows.jsonl", argument, code=2)
    assert said in error
    assert {path.suffix for path in lema.cwd.iterdir()} == {".jsonl", ".txt"}


@pytest.mark.parametrize(
    ("ref", "said"),
    [
        ("./no/such/dir", "no/such/dir: no such folder; a model folder holds config.json and *.safetensors"),
        ("/abs/missing", "/abs/missing: no such folder"),
        ("./no_config", "no_config: no config.json in this folder"),
        ("./no_weights", "no_weights: no *.safetensors in this folder"),
        ("./only_bin", "not read as a pickle runs code; convert once with transformers"),
        ("./file", "file: a file where a model folder is expected"),
        ("./no-such-name", "no-such-name: no such folder"),
    ],
)
def test_a_wrong_path_to_a_model_is_named_without_asking_the_network(ref: str, said: str, lema: Any) -> None:
    for name in ("no_config", "no_weights", "only_bin"):
        (lema.cwd / name).mkdir()
        if name != "no_config":
            (lema.cwd / name / "config.json").write_text('{"model_type": "llama"}')
    (lema.cwd / "only_bin/pytorch_model.bin").write_bytes(b"x")
    (lema.cwd / "file").write_text("x")
    (lema.cwd / "rows.jsonl").write_text(GOOD)
    error = lema.error(f"model_name_or_path={ref}", "train_file=rows.jsonl", before=NO_NETWORK)
    assert said in error


def test_a_name_that_is_not_there_offline(lema: Any) -> None:
    (lema.cwd / "rows.jsonl").write_text(GOOD)
    offline = f"import os; os.environ['HF_HUB_OFFLINE'] = '1'\n{NO_NETWORK}"
    error = lema.error("model_name_or_path=no-such-name", "train_file=rows.jsonl", before=offline)
    assert "no-such-name" in error and "HF_HUB_OFFLINE" in error


def test_a_whole_run_asks_no_network(lema: Any, tiny_llama: Path) -> None:
    (lema.cwd / "rows.jsonl").write_text(GOOD)
    lema.ok(f"model_name_or_path={tiny_llama}", "train_file=rows.jsonl", "output_dir=out", before=NO_NETWORK)


@pytest.fixture
def sharded(lema: Any, make_model: Any, make_tokenizer: Any) -> Path:
    (lema.cwd / "rows.jsonl").write_text(GOOD)
    return make_tokenizer(make_model(lema.cwd / "model", shards=3))


def test_a_cut_shard_is_found_before_the_first_step(sharded: Path, lema: Any) -> None:
    shard = sharded / "model-00002-of-00003.safetensors"
    whole = shard.read_bytes()
    shard.write_bytes(whole[:-100])
    error = lema.error("model_name_or_path=model", "train_file=rows.jsonl", "output_dir=out")
    numbers = error.replace(",", "")
    assert shard.name in error and "download" in error
    assert f"{len(whole)} bytes" in numbers and f"{len(whole) - 100} bytes" in numbers
    assert not (lema.cwd / "out").exists()


def test_a_missing_shard_is_found_before_the_first_step(sharded: Path, lema: Any) -> None:
    (sharded / "model-00002-of-00003.safetensors").unlink()
    for task in ("task=train", "task=generate"):
        error = lema.error("model_name_or_path=model", task, "train_file=rows.jsonl", "prompt=a", "output_dir=out")
        assert "model-00002-of-00003.safetensors is missing (layers " in error and "download" in error
    assert not (lema.cwd / "out").exists()


def test_a_shard_that_is_cut_while_training_is_named_and_the_checkpoint_stays(sharded: Path, lema: Any) -> None:
    """A window of a few granules reads the file again in every step."""
    shard = sharded / "model-00002-of-00003.safetensors"
    cut = (
        "import os\n"
        "from lema_train.trainer import Trainer\n"
        "save = Trainer.save_checkpoint\n"
        f"def then_cut(*a):\n    save(*a)\n    os.truncate({str(shard)!r}, 5000)\n"
        "Trainer.save_checkpoint = then_cut"
    )
    error = lema.error(
        "model_name_or_path=model", "train_file=rows.jsonl", "output_dir=out", "max_steps=9", "save_steps=2",
        "weights_ram=400KB", before=cut,
    )  # fmt: skip
    assert f"{shard.name}: cut while in use: model.layers." in error
    assert [verify(path).step for _, path in find_checkpoints(lema.cwd / "out")] == [2]


# -- the disk


def test_a_disk_that_is_full_keeps_the_old_checkpoint(
    lema: Any, tiny_llama: Path, make_rows: Any, chats: Callable[[int], Rows]
) -> None:
    """Files of at most 64 kB: the second run cannot save, and must not have removed what the first one did."""
    make_rows(lema.cwd / "rows.jsonl", chats(4))
    arguments = (
        f"model_name_or_path={tiny_llama}", "train_file=rows.jsonl", "output_dir=out", "save_total_limit=1",
        "lora_rank=16", "resume=auto", "save_steps=1",
    )  # fmt: skip
    lema.ok(*arguments, "max_steps=1")
    limit = "import resource\nresource.setrlimit(resource.RLIMIT_FSIZE, (64000, 64000))"
    error = lema.error(*arguments, "max_steps=2", before=limit)
    out = lema.cwd / "out"
    assert f"{out / 'checkpoint-2'}: cannot be written: File too large: " in error
    assert " bytes needed, " in error and " bytes free on its disk" in error
    assert sorted(path.name for path in out.iterdir()) == ["checkpoint-1", "metrics.jsonl", "summary.json"]
    assert verify(out / "checkpoint-1").step == 1
    run = lema.ok(*arguments, "max_steps=2")
    assert "going on from" in run.out and "removed checkpoint-1 (save_total_limit=1)" in run.out
    assert [step for step, _ in find_checkpoints(out)] == [2]


def test_too_little_space_is_told_before_training(
    lema: Any, tiny_llama: Path, make_rows: Any, chats: Callable[[int], Rows]
) -> None:
    make_rows(lema.cwd / "rows.jsonl", chats(4))
    full = (
        "import shutil\nfrom types import SimpleNamespace\n"
        "shutil.disk_usage = lambda path: SimpleNamespace(total=10**9, used=10**9 - 1000, free=1000)"
    )
    error = lema.error(f"model_name_or_path={tiny_llama}", "train_file=rows.jsonl", "output_dir=out", before=full)
    assert f"{lema.cwd / 'out'}: " in error and " bytes needed, 1000 bytes free on its disk" in error
    assert not (lema.cwd / "out").exists()


def test_an_output_dir_that_cannot_be_one(lema: Any, tiny_llama: Path) -> None:
    (lema.cwd / "rows.jsonl").write_text(GOOD)
    (lema.cwd / "out").write_text("a file")
    arguments = (f"model_name_or_path={tiny_llama}", "train_file=rows.jsonl")
    for output_dir in ("out", "out/below"):
        error = lema.error(*arguments, f"output_dir={output_dir}")
        assert f"output_dir: {lema.cwd / output_dir}: cannot be made: " in error


def test_lora_weights_that_do_not_fit_are_refused(
    lema: Any, tiny_llama: Path, make_model: Any, make_tokenizer: Any
) -> None:
    (lema.cwd / "rows.jsonl").write_text(GOOD)
    lema.ok(f"model_name_or_path={tiny_llama}", "train_file=rows.jsonl", "output_dir=out")
    make_tokenizer(make_model(lema.cwd / "other", num_hidden_layers=3))
    error = lema.error("model_name_or_path=other", "task=generate", "prompt=a", "lora_path=out/checkpoint-1")
    assert "out/checkpoint-1" in error and "made for another base model" in error
    shutil.rmtree(lema.cwd / "out/checkpoint-1")
    error = lema.error(f"model_name_or_path={tiny_llama}", "task=generate", "prompt=a", "lora_path=out/checkpoint-1")
    assert "out/checkpoint-1" in error and "No such file" in error
