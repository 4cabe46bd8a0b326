"""Memory of the whole process: windows as small as asked for, no growth, models larger than what it may use."""

from __future__ import annotations

import filecmp
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from lema import LemaConfig, LemaModel
from lema_core.store.granules import MAX_GRANULE_BYTES

Rows = list[dict[str, Any]]
CGROUP = Path("/sys/fs/cgroup/memory")
#: 19.4 million fp32 numbers in 4 shards; a layer is 12.9 MB
MODEL = {
    "hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 6, "num_attention_heads": 8,
    "num_key_value_heads": 8,
}  # fmt: skip
TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "lm_head"]
LAYER_BYTES = 4 * (4 * 512**2 + 3 * 512 * 1408 + 2 * 512)
#: Code that writes what the process holds after each call of a method to growth.jsonl. A full collection empties
#: CPython's free lists of tuples, which fill up by some kB a step to 2000 tuples of each size; freezing what was there
#: at the start makes that quick.
WATCH = """
import gc, json, os
from {module} import {owner}
done, calls = {owner}.{method}, 0
def noted(*arguments):
    global calls
    result = done(*arguments)
    calls += 1
    if calls == 50:
        gc.freeze()
    if calls >= 50:
        gc.collect()
    status = dict(line.split(":", 1) for line in open("/proc/self/status"))
    found = {{
        "anonymous_bytes": int(status["RssAnon"].split()[0]) * 1024,
        "handles": len(os.listdir("/proc/self/fd")),
        "threads": len(os.listdir("/proc/self/task")),
    }}
    with open("growth.jsonl", "a") as file:
        file.write(json.dumps(found) + "\\n")
    return result
{owner}.{method} = noted
"""


def test_a_window_of_one_layer_is_all_that_a_large_model_takes(
    lema: Any, tiny_llama: Path, make_model: Any, make_tokenizer: Any, make_rows: Any, chats: Callable[[int], Rows]
) -> None:
    """Beside a run of a tiny model, which has everything imported that this one has."""
    model = make_tokenizer(make_model(lema.cwd / "model", shards=4, **MODEL))
    model_bytes = sum(path.stat().st_size for path in model.glob("*.safetensors"))
    before = {path: path.stat().st_mtime_ns for path in model.iterdir()}
    make_rows(lema.cwd / "rows.jsonl", chats(4))
    (lema.cwd / "tmp").mkdir()
    peaks: dict[str, int] = {}
    # the lower of two runs: peaks of equal ones differ by a megabyte or two where other work takes the processors
    for name, folder, window in (("tiny", tiny_llama, "auto"), ("large", model, "14MB"), ("again", model, "14MB")):
        lema.ok(
            f"model_name_or_path={folder}", "train_file=rows.jsonl", f"output_dir={name}", "max_steps=3", "lora_rank=2",
            f"weights_ram={window}", exact=True, TMPDIR=str(lema.cwd / "tmp"),
        )  # fmt: skip
        peaks[name] = json.loads((lema.cwd / name / "summary.json").read_text())["rss_peak_bytes"]
    assert model_bytes > 5 * LAYER_BYTES
    # the factor: one more layer, for what a step computes and trains
    assert min(peaks["large"], peaks["again"]) - peaks["tiny"] <= 14e6 + 1.0 * LAYER_BYTES
    # no second copy on disk
    assert not [path for path in (lema.cwd / "tmp").rglob("*") if path.is_file()]
    assert {path: path.stat().st_mtime_ns for path in model.iterdir()} == before
    written = sum(path.stat().st_size for path in (lema.cwd / "large").rglob("*") if path.is_file())
    assert written < model_bytes / 20

    error = lema.error(f"model_name_or_path={model}", "train_file=rows.jsonl", "output_dir=small", "weights_ram=5MB")
    assert "weights_ram gives 5,000,000 bytes, the smallest window needs 13," in error
    error = lema.error(f"model_name_or_path={model}", "train_file=rows.jsonl", "output_dir=small", "ram_budget=100MB")
    assert " bytes of weights are needed beside " in error and " are left of ram_budget=100MB" in error
    assert not (lema.cwd / "small").exists()


#: the model's own weights
WHOLE = ["training_mode=selective_full", "learning_rate=1e-5"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "memory",
    [
        ["weights_ram=auto", "lora_rank=4"],
        ["weights_ram=400KB", "lora_rank=4"],
        ["weights_ram=400KB", "gradient_accumulation_steps=4", "activations_ram=800KB", "lora_rank=4"],
        [*WHOLE, "weights_ram=auto"],
        [*WHOLE, "weights_ram=400KB", "opt_state_ram=1B", "grad_acc_ram=1B", "opt_state_bits=8"],
    ],
    ids=["all", "window", "activations on disk", "whole weights", "whole weights, states on disk"],
)
def test_300_steps_do_not_grow(
    memory: list[str], lema: Any, tiny_llama: Path, make_rows: Any, chats: Callable[[int], Rows]
) -> None:
    # Plans of steps are kept by their shape, so that with several micro-batches of all lengths there would be more of
    # them for a hundred steps.
    rows = chats(20) if len(memory) == 2 else [{"input_ids": list(range(5, 33))}] * 20
    make_rows(lema.cwd / "rows.jsonl", rows)
    lema.ok(
        f"model_name_or_path={tiny_llama}", "train_file=rows.jsonl", "output_dir=out", "max_steps=300",
        "save_steps=40", "save_total_limit=3", *memory, exact=True,
        before=WATCH.format(module="lema.metrics", owner="MetricsWriter", method="write"),
    )  # fmt: skip
    _assert_constant(lema.cwd / "growth.jsonl", 300)
    assert {path.name for path in (lema.cwd / "out").iterdir()} == {
        "metrics.jsonl", "summary.json", *(f"checkpoint-{step}" for step in (240, 280, 300))
    }  # fmt: skip


THRICE = """
from lema.model import LemaModel
LemaModel.stop_ids = ()
once = LemaModel.continue_text
def thrice(self, *arguments, **options):
    return [once(self, *arguments, **options) for _ in range(3)][-1]
LemaModel.continue_text = thrice
"""


@pytest.mark.slow
def test_300_tokens_do_not_grow(lema: Any, tiny_llama: Path) -> None:
    """In three answers of 100: attention over more tokens takes more, which the next answer has again."""
    watch = WATCH.format(module="lema_core.runtime.runner", owner="ModelRunner", method="next_logits")
    lema.ok(
        f"model_name_or_path={tiny_llama}", "task=generate", "prompt=tell", "max_new_tokens=100", "chat=false",
        exact=True, before=watch + THRICE,
    )  # fmt: skip
    found = [json.loads(line) for line in (lema.cwd / "growth.jsonl").read_text().splitlines()]
    assert len(found) == 300
    second, third = (sum(each["anonymous_bytes"] for each in found[i : i + 100]) / 100 for i in (100, 200))
    print(f"{(third - second) / 100:.0f} bytes a token")
    assert third - second <= 100 * 1000
    assert len({(each["handles"], each["threads"]) for each in found[50:]}) == 1


def _assert_constant(path: Path, count: int) -> None:
    found = [json.loads(line) for line in path.read_text().splitlines()]
    assert len(found) == count
    late = found[50:]
    growth_bytes = torch.tensor([float(each["anonymous_bytes"]) for each in late])
    x = torch.arange(len(late)) - (len(late) - 1) / 2
    slope = (x * (growth_bytes - growth_bytes.mean())).sum() / x.square().sum()
    print(f"{slope.item():.0f} bytes a step after 50")
    assert slope <= 1000
    assert len({(each["handles"], each["threads"]) for each in late}) == 1


@pytest.mark.slow
def test_merging_takes_two_granules_whatever_the_model(lema: Any, tiny_llama: Path, make_model: Any) -> None:
    """Beside merging a tiny model; then in a group that holds neither the model nor what is written."""
    large = make_model(
        lema.cwd / "model", dtype=torch.bfloat16, vocab_size=8192, hidden_size=1024, intermediate_size=2816,
        num_hidden_layers=12, num_attention_heads=16, num_key_value_heads=16, tie_word_embeddings=True,
    )  # fmt: skip
    model_bytes = (large / "model.safetensors").stat().st_size
    peaks = {}
    for name, folder in (("tiny", tiny_llama), ("large", large)):
        config = LemaConfig(model_name_or_path=str(folder), lora_rank=8, lora_target_modules=TARGETS)
        with LemaModel(config) as model:
            model.initialize_lora()
            for parameter in model.get_trainable_parameters():
                torch.nn.init.normal_(parameter, std=0.02)
            model.save_pretrained(lema.cwd / f"{name}-lora")
        child = lema.ok("task=merge", f"lora_path={name}-lora", f"output_dir={name}-merged", exact=True)
        peaks[name] = float(re.search(r"^rss_peak_bytes +([\d.]+) MB$", child.out, re.MULTILINE)[1]) * 1e6
    print(f"peaks {peaks}, {model_bytes:,} bytes of weights")
    assert model_bytes > 300e6
    assert (lema.cwd / "large-merged/model.safetensors").stat().st_size > 1.05 * model_bytes  # untied
    assert peaks["large"] - peaks["tiny"] <= 2 * MAX_GRANULE_BYTES
    with _memory_group(500_000_000) as group:
        join = f"import os\nopen('{group}/cgroup.procs', 'w').write(str(os.getpid()))"
        lema.ok("task=merge", "lora_path=large-lora", "output_dir=grouped", exact=True, before=join)
    same = filecmp.cmp(lema.cwd / "grouped/model.safetensors", lema.cwd / "large-merged/model.safetensors", False)
    for folder in ("model", "large-merged", "grouped"):  # 950 MB, which pytest would keep
        shutil.rmtree(lema.cwd / folder)
    assert same


@contextmanager
def _memory_group(limit_bytes: int) -> Iterator[Path]:
    """A group under cgroup v1 with a limit; skips where there is none to make."""
    group = CGROUP / f"lema-test-{os.getpid()}"
    try:
        group.mkdir()
        (group / "memory.limit_in_bytes").write_text(str(limit_bytes))
    except OSError as error:
        pytest.skip(f"no memory group of cgroup v1 can be made here: {error}")
    try:
        yield group
    finally:
        group.rmdir()


@pytest.mark.slow
def test_a_model_larger_than_the_group_may_use_trains_without_any_memory_option(
    lema: Any, make_model: Any, make_tokenizer: Any, make_rows: Any, chats: Callable[[int], Rows]
) -> None:
    """The group is charged for page cache too: reads that went through it would be seen."""
    limit_bytes = 560_000_000
    with _memory_group(limit_bytes) as group:
        model = make_tokenizer(
            make_model(
                lema.cwd / "model", dtype=torch.bfloat16, hidden_size=1024, intermediate_size=2816,
                num_hidden_layers=24, num_attention_heads=16, num_key_value_heads=16,
            )
        )  # fmt: skip
        assert (model / "model.safetensors").stat().st_size > 1.05 * limit_bytes
        make_rows(lema.cwd / "rows.jsonl", chats(2))
        join = f"import os\nopen('{group}/cgroup.procs', 'w').write(str(os.getpid()))"
        run = lema.ok(
            "model_name_or_path=model", "train_file=rows.jsonl", "output_dir=out", "max_steps=2", "lora_rank=4",
            exact=True, before=join,
        )  # fmt: skip
        peak_bytes = int((group / "memory.max_usage_in_bytes").read_text())
        summary = json.loads((lema.cwd / "out/summary.json").read_text())
        print(f"group peak {peak_bytes:,}, {summary}")
        shutil.rmtree(model)  # 617 MB, which pytest would keep
    assert f"were left of cgroup limit {group}/memory.limit_in_bytes" in run.out
    assert peak_bytes <= limit_bytes and summary["steps"] == 2
