"""Quantized bases: by task=quantize and tools/quantize_checkpoint.py, on the fly, and what computes with them."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from lema import LemaConfig, LemaModel
from lema.cli import main
from lema_core.checkpoint import read_manifest, read_tensor, write_safetensors
from lema_core.errors import CheckpointError, ConfigError, LemaError
from lema_models.gpt2 import GPT2Adapter

IDS = torch.arange(4, 44).reshape(2, 20)
GPT2 = {
    "model_type": "gpt2", "vocab_size": 300, "n_embd": 48, "n_layer": 2, "n_head": 4, "n_positions": 64,
    "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0,
}  # fmt: skip


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("LEMA_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def write_gpt2(folder: Path) -> Path:
    """Tied, with linears that lie as [in, out]."""
    folder.mkdir()
    generator = torch.Generator().manual_seed(0)
    specs = [spec for spec in GPT2Adapter.from_hf_config(GPT2).tensors() if spec.tied_to is None]
    values = {spec.name: torch.randn(spec.shape, generator=generator) * 0.2 for spec in specs}
    tensors = [(name, value.dtype, tuple(value.shape), lambda value=value: value) for name, value in values.items()]
    write_safetensors(folder / "model.safetensors", tensors)
    (folder / "config.json").write_text(json.dumps(GPT2))
    return folder


@pytest.fixture
def bases(tmp_path: Path, make_model: Callable[..., Path]) -> Callable[[str], Path]:
    def base(name: str) -> Path:
        folder = tmp_path / name
        if folder.exists():
            return folder
        return write_gpt2(folder) if name == "gpt2" else make_model(folder, shards=2)

    return base


def logits(folder: Path, **options: Any) -> torch.Tensor:
    config = LemaConfig(model_name_or_path=str(folder), backend="python", strategy="resident", **options)
    with LemaModel(config) as model:
        return model.logits(IDS)


def decoded(folder: Path, out: Path) -> Path:
    """The model in ``folder`` in fp32, as its weights stand for."""
    out.mkdir()
    manifest = read_manifest(folder)
    tensors = [
        (name, torch.float32, info.shape, lambda info=info: read_tensor(info).float())
        for name, info in manifest.tensors.items()
    ]
    write_safetensors(out / "model.safetensors", tensors)
    config = json.loads((folder / "config.json").read_text())
    config.pop("quantization_config")
    (out / "config.json").write_text(json.dumps(config))
    return out


def quantize(base: Path, out: Path, bits: int, *options: str) -> int:
    return main(
        [f"model_name_or_path={base}", "task=quantize", f"weights_bits={bits}", f"output_dir={out}",
         "quant_backend=custom", *options]
    )  # fmt: skip


def one_line(error: type[LemaError], attempt: Callable[[], object]) -> str:
    with pytest.raises(error) as caught:
        attempt()
    assert "\n" not in str(caught.value)
    return str(caught.value)


# ------------------------------------------------------------------------------------------------------- task=quantize


@pytest.mark.parametrize(
    ("name", "bits"),
    [
        ("llama", 8),
        ("gpt2", 4),
        pytest.param("llama", 4, marks=pytest.mark.slow),
        pytest.param("gpt2", 8, marks=pytest.mark.slow),
    ],
)
def test_saved_loaded_in_another_process_and_not_quantized_again(
    name: str, bits: int, bases: Any, tmp_path: Path, lema: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    base, out = bases(name), tmp_path / "out"
    assert quantize(base, out, bits) == 0
    text = capsys.readouterr().out
    assert "error" in text and "as it is: a norm" in text and str(out / "quantization_report.json") in text
    own = logits(out)
    assert torch.equal(own, logits(decoded(out, tmp_path / "decoded")))
    whole = logits(base)
    assert (own - whole).norm() < (0.06 if bits == 8 else 0.8) * whole.norm() and not torch.equal(own, whole)
    script = f"""
import torch
from pathlib import Path
from lema import LemaConfig, LemaModel
from lema_core.checkpoint import read_manifest, read_tensor
import hashlib
digest = hashlib.sha256()
for info in read_manifest(Path({str(out)!r})).tensors.values():
    for part in info.stored:
        digest.update(read_tensor(part).contiguous().view(torch.uint8).numpy().tobytes())
ids = torch.arange(4, 44).reshape(2, 20)
with LemaModel(LemaConfig(model_name_or_path={str(out)!r}, backend="python", strategy="resident")) as model:
    torch.save((digest.hexdigest(), model.logits(ids)), {str(tmp_path / "found")!r})
raise SystemExit(0)
"""
    lema.ok("--version", before=script)
    digest, found = torch.load(tmp_path / "found")
    mine = hashlib.sha256()
    for info in read_manifest(out).tensors.values():
        for part in info.stored:
            mine.update(read_tensor(part).contiguous().view(torch.uint8).numpy().tobytes())
    assert digest == mine.hexdigest() and torch.equal(found, own)
    names = [tensor for file in out.glob("*.safetensors") for tensor in load_file(file)]
    if name == "gpt2":
        assert "lm_head.weight" not in names and "transformer.wte.weight.scale" in names
    assert quantize(out, tmp_path / "again", bits) == 1
    assert "quantized already" in capsys.readouterr().err and not (tmp_path / "again").exists()


def test_a_killed_run_is_gone_on_with(bases: Any, tmp_path: Path, lema: Any) -> None:
    base, out = bases("llama"), tmp_path / "out"
    options = [f"model_name_or_path={base}", "task=quantize", "weights_bits=8", "quant_backend=custom"]
    kill = """
import os, signal
from lema_quant.checkpoint import blocks
real, count = blocks.write_safetensors, []
def killed(path, tensors, metadata):
    count.append(1)
    if len(count) == 1:
        return real(path, tensors, metadata)
    return real(path, [*tensors[:-1], (*tensors[-1][:3], lambda: os.kill(os.getpid(), signal.SIGKILL))], metadata)
blocks.write_safetensors = killed
"""
    assert lema.run(*options, f"output_dir={out}", before=kill).code == -9
    working = tmp_path / ".out.quantizing"
    assert not out.exists() and len(list(working.glob("*.safetensors"))) == 1
    went_on = lema.ok(*options, f"output_dir={out}")
    assert "1 of 2 files are finished, and are kept" in went_on.out and not working.exists()
    lema.ok(*options, f"output_dir={tmp_path / 'whole'}")
    for file in out.glob("*.safetensors"):
        assert file.read_bytes() == (tmp_path / "whole" / file.name).read_bytes()


def test_the_tool_says_the_same(bases: Any, tmp_path: Path) -> None:
    import runpy

    tool = Path(__file__).parents[3] / "tools/quantize_checkpoint.py"
    arguments = runpy.run_path(str(tool))["arguments"]
    base = bases("llama")
    argv = [str(base), "--bits", "4", "--output_dir", str(tmp_path / "tool"), "--backend", "custom"]
    assert main(arguments([*argv, "--format", "int4-64", "--exclude", "down_proj", "--exclude", "lm_head"])) == 0
    assert quantize(base, tmp_path / "task", 4, "weights_format=int4-64", "quant_exclude=[down_proj,lm_head]") == 0
    for file in (tmp_path / "task").glob("*.safetensors"):
        assert file.read_bytes() == (tmp_path / "tool" / file.name).read_bytes()
    formats = {name: info.storage for name, info in read_manifest(tmp_path / "tool").tensors.items()}
    assert formats["lm_head.weight"] == "float32" and formats["model.layers.0.self_attn.q_proj.weight"] == "int4-64"


# ----------------------------------------------------------------------------------------------------------- on the fly


@pytest.mark.parametrize("bits", [8, 4])
def test_on_the_fly_is_a_quantized_run(
    bits: int, bases: Any, tmp_path: Path, cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base = bases("llama")
    assert quantize(base, tmp_path / "out", bits) == 0
    expected = logits(tmp_path / "out")
    capsys.readouterr()
    assert torch.equal(logits(base, weights_bits=bits, quant_backend="custom"), expected)
    first = capsys.readouterr().err
    copies = [path for path in (cache / "quantized").iterdir() if path.name != "requests"]
    assert len(copies) == 1 and f"by custom, in {copies[0]}" in first
    times = {path: path.stat().st_mtime_ns for path in copies[0].iterdir()}
    assert torch.equal(logits(base, weights_bits=bits, quant_backend="custom"), expected)
    assert capsys.readouterr().err == ""
    assert {path: path.stat().st_mtime_ns for path in copies[0].iterdir()} == times
    # with the same bits it may be asked for again, with others not
    assert torch.equal(logits(tmp_path / "out", weights_bits=bits), expected)
    other = 12 - bits
    said = one_line(CheckpointError, lambda: logits(tmp_path / "out", weights_bits=other))
    assert "already" in said and "leave weights_bits out" in said


def test_a_changed_base_is_quantized_anew(bases: Any, make_model: Any, tmp_path: Path, cache: Path) -> None:
    base = bases("llama")
    options = {"weights_bits": 8, "quant_backend": "custom"}
    before = logits(base, **options)
    make_model(tmp_path / "other", shards=2, seed=1)
    for file in (tmp_path / "other").glob("*.safetensors"):
        file.replace(base / file.name)
    assert not torch.equal(logits(base, **options), before)
    assert len([path for path in (cache / "quantized").iterdir() if path.name != "requests"]) == 2


def test_a_cache_without_room_says_so(bases: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from lema_core import atomic

    base = bases("llama")
    usage = atomic.shutil.disk_usage(base)
    monkeypatch.setattr(atomic.shutil, "disk_usage", lambda path: usage._replace(free=1000))
    said = one_line(CheckpointError, lambda: logits(base, weights_bits=8, quant_backend="custom"))
    assert "bytes needed, 1000 bytes free" in said and "LEMA_CACHE" in said


def test_a_run_says_where_its_weights_are(
    tiny_llama: Path, tmp_path: Path, lema: Any, chats: Any, make_rows: Any
) -> None:
    rows = make_rows(tmp_path / "rows.jsonl", chats(4))
    cache = f"import os; os.environ['LEMA_CACHE'] = {str(tmp_path / 'cache')!r}"
    options = [f"model_name_or_path={tiny_llama}", "quant=custom", f"train_file={rows}", "max_steps=2"]
    first = lema.ok(*options, "output_dir=first", before=cache)
    assert "weights in int8, by custom, made in" in first.out and "quantizing" in first.err
    second = lema.ok(*options, "output_dir=second", before=cache)
    assert "weights in int8, by custom, found in" in second.out and "quantizing" not in second.err
    first_losses, second_losses = (
        [json.loads(line)["loss"] for line in (tmp_path / run / "metrics.jsonl").read_text().splitlines()]
        for run in ("first", "second")
    )
    assert first_losses == second_losses
    summary = json.loads((tmp_path / "second/summary.json").read_text())
    assert summary["weights"].startswith("int8, by custom, in ") and summary["weights_bytes"] < 200_000
    # the LoRA weights are those of the base, whoever quantized it
    base = json.loads((tmp_path / "second/checkpoint-2/adapter_config.json").read_text())["base_model_name_or_path"]
    assert base == str(tiny_llama)
    plan = lema.ok(*options, "task=plan", before=cache)
    assert "quantized" in plan.out and "found in" in plan.out


def test_what_trains_stays_in_high_precision(tiny_llama: Path, tmp_path: Path) -> None:
    """Weights that train start from the base's own numbers, beside others in 4 bits, and their delta is the base's."""
    name = "model.layers.3.mlp.down_proj.weight"
    options = {
        "model_name_or_path": str(tiny_llama), "training_mode": "selective_full", "trainable_modules": ["down_proj"],
        "trainable_layers": ["last:1"], "weights_bits": 4, "quant_backend": "custom", "backend": "python",
        "learning_rate": 1e-30, "output_dir": str(tmp_path / "run"),
    }  # fmt: skip
    with LemaModel(LemaConfig(**options)) as model:
        model.initialize_training()
        trainer = model.get_trainer(total_steps=1)
        trainer.train_step(IDS, labels=IDS)
        trainer.save_checkpoint(tmp_path / "checkpoint")
    delta = load_file(tmp_path / "checkpoint/delta.safetensors")
    assert set(delta) == {name} and delta[name].abs().max() < 1e-20
    assert main(["task=merge", f"delta_path={tmp_path / 'checkpoint'}", f"output_dir={tmp_path / 'merged'}"]) == 0
    assert load_file(tmp_path / "merged/model.safetensors")[name].equal(
        load_file(tiny_llama / "model.safetensors")[name]
    )
    quantized = tmp_path / "quantized"
    assert quantize(tiny_llama, quantized, 8) == 0
    del options["weights_bits"], options["quant_backend"]
    with LemaModel(LemaConfig(**options | {"model_name_or_path": str(quantized)})) as model:
        said = one_line(CheckpointError, model.initialize_training)
    assert name in said and "is to train and is int8 in the file" in said


# -------------------------------------------------------------------------------------------------- who cannot, and why


@pytest.mark.parametrize(("backend", "package"), [("torchao", "torchao"), ("bitsandbytes", "bitsandbytes")])
def test_a_library_that_is_not_there_is_said_once_and_custom_takes_its_place(
    backend: str, package: str, bases: Any, monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder
) -> None:
    for module in [module for module in sys.modules if module.partition(".")[0] == package]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, package, None)
    base = bases("llama")
    found = logits(base, weights_bits=8, quant_backend=backend)
    said = [str(each.message) for each in recwarn if "quant_backend" in str(each.message)]
    assert len(said) == 1 and said[0].startswith(f"quant_backend={backend}: ") and f"pip install {package}" in said[0]
    assert said[0].endswith("custom (int8) takes its place")
    assert torch.equal(found, logits(base, weights_bits=8, quant_backend="custom"))
    # nor is it silent where the copy is found
    recwarn.clear()
    assert torch.equal(logits(base, weights_bits=8, quant_backend=backend), found)
    assert [str(each.message) for each in recwarn if "quant_backend" in str(each.message)] == said


def test_a_pattern_that_means_nothing_is_an_error_before_anything_is_written(bases: Any, cache: Path) -> None:
    said = one_line(ConfigError, lambda: logits(bases("llama"), weights_bits=8, quant_exclude=["q_prj"]))
    assert "'q_prj' is in no tensor's name" in said and not (cache / "quantized").exists()


def test_the_command_line_of_the_design(tmp_path: Path, lema: Any, make_rows: Any, chats: Any) -> None:
    """A small Mixtral of random weights trains, reports and saves, whoever quantizes."""
    rows = make_rows(tmp_path / "rows.jsonl", chats(3))
    cache = f"import os; os.environ['LEMA_CACHE'] = {str(tmp_path / 'cache')!r}"
    options = ["+model=mixtral", "quant=custom", "init=random", f"train_file={rows}", "max_steps=2", "lora_rank=2"]
    trained = lema.ok(*options, "output_dir=out", before=cache)
    assert "step 2/2" in trained.out and "by custom, made in" in trained.out
    assert (tmp_path / "out/checkpoint-2/adapter_model.safetensors").is_file()
    copy = next(path for path in (tmp_path / "cache/quantized").iterdir() if path.name.startswith("mixtral-int8"))
    stored = read_manifest(copy).tensors
    experts = [info.storage for name, info in stored.items() if ".experts." in name]
    assert set(experts) == {"int8"} and len(experts) == 2 * 8 * 3
    assert all(info.storage == "bfloat16" for name, info in stored.items() if name.endswith("mlp.gate.weight"))
