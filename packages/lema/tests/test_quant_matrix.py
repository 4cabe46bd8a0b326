"""Whole runs on every architecture's preset, quantized by every installed backend in 8 and in 4 bits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from lema import LemaModel
from lema.cli import main
from lema.compose import group_choices
from lema_core.plugins import get_plugin_manager

#: what makes each preset a model of a few hundred thousand weights, in widths that NF4 has
PRESETS: dict[str, dict[str, Any]] = {
    "tinyllama": {"intermediate_size": 128},
    "mistral_7b": {"intermediate_size": 128, "sliding_window": 8},
    "mixtral": {"intermediate_size": 64},
    "gpt2": {"num_attention_heads": 4},
    "lfm2": {"num_hidden_layers": 3, "intermediate_size": 192, "block_multiple_of": 64},
    "lfm2_moe": {"num_hidden_layers": 3, "num_dense_layers": 1, "intermediate_size": 128, "moe_intermediate_size": 64},
    "qwen2_5_0_5b": {"intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2},
    "qwen3_0_6b": {"intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32},
}
#: of another backend's many
QUICK = {("mixtral", "torchao", 8), ("lfm2_moe", "bitsandbytes", 4), ("gpt2", "quanto", 8), ("qwen3_0_6b", "custom", 4)}
#: at most so much of a weight, by norm
LOST = {8: 0.04, 4: 0.13}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    backends = list(dict.fromkeys(each.name for each in get_plugin_manager().quant_backends()))
    cases = [(preset, backend, bits) for preset in PRESETS for backend in backends for bits in (8, 4)]
    marks = [() if case in QUICK else pytest.mark.slow for case in cases]
    metafunc.parametrize(
        ("preset", "backend", "bits"),
        [pytest.param(*case, marks=mark) for case, mark in zip(cases, marks, strict=True)],
    )


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Random models are made once."""
    with pytest.MonkeyPatch.context() as patch:
        path = tmp_path_factory.mktemp("cache")
        patch.setenv("LEMA_CACHE", str(path))
        yield path


def test_a_run_trains_reports_and_saves(
    preset: str,
    backend: str,
    bits: int,
    cache: Path,
    tmp_path: Path,
    make_rows: Callable[..., Path],
    chats: Any,
    capsys: pytest.CaptureFixture[str],
    recwarn: pytest.WarningsRecorder,
    read_steps: Callable[[Path], list[dict[str, Any]]],
) -> None:
    if preset not in group_choices()["model"]:
        pytest.skip(f"{preset}: its plugin is not installed")
    everything = get_plugin_manager().quant_backends()
    reasons = [each.unavailable("cpu") for each in everything if each.name == backend]
    if None not in reasons:
        pytest.skip(f"{backend} is not here: {reasons}")
    records = {each.name: each for each in everything if each.bits == bits}
    serves = backend in records and records[backend].unavailable("cpu") is None
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "vocab_size": 320, **PRESETS[preset]}
    rows = make_rows(tmp_path / "rows.jsonl", chats(1))
    options = [
        f"+model={preset}", "init=random", *(f"model_overrides={key}:{value}" for key, value in sizes.items()),
        f"quant_backend={backend}", f"weights_bits={bits}", f"train_file={rows}", "max_steps=3", "lora_rank=2",
        "learning_rate=0.002", "backend=python",
    ]  # fmt: skip
    assert main([*options, f"output_dir={tmp_path / 'out'}"]) == 0
    printed = capsys.readouterr()
    assert "step 3/3" in printed.out and f"by {backend if serves else 'custom'}, made in" in printed.out
    warned = [str(each.message) for each in recwarn if "quant_backend" in str(each.message)]
    assert [line.startswith(f"quant_backend={backend}: ") for line in warned] == [True] * (not serves)
    losses = [row["loss"] for row in read_steps(tmp_path / "out")]
    assert losses[2] < losses[0]
    lora = load_file(tmp_path / "out/checkpoint-3/adapter_model.safetensors")
    assert all(tensor.isfinite().all() and tensor.any() for tensor in lora.values())
    with LemaModel.from_pretrained(tmp_path / "out/checkpoint-3", weights_bits=bits, quant_backend=backend) as model:
        copy = model.quantized
        logits = model.logits(torch.arange(8)[None])
    assert not copy.made and copy.path.parent == cache / "quantized" and logits.isfinite().all()
    encoded = [each for each in copy.report.tensors if each.format is not None]
    assert encoded and all(each.error <= LOST[bits] for each in encoded)
