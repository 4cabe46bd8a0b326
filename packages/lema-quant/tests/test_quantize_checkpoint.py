"""Quantized checkpoints of a toy model: the codecs' own bytes, whatever the cut; complete or not there."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from lema_core import atomic
from lema_core.checkpoint import read_manifest, read_tensor
from lema_core.errors import CheckpointError, ConfigError, LemaError
from lema_core.hookspecs import hookimpl
from lema_core.plugins import PluginManager
from lema_core.quantization.formats import wire_formats
from lema_core.records import Architecture, load_object
from lema_core.testing.toy import ToyAdapter, ToyConfig, write_toy
from lema_quant import plugin
from lema_quant.checkpoint import QuantizedCheckpoint, blocks, plan, quantize_checkpoint
from lema_quant.checkpoint.result import REPORT_FILE

#: a weight whose rows are two blocks of the smallest size that tests use
SMALL_BLOCK = 64


class Toy(ToyAdapter):
    """The toy model by a config.json."""

    @classmethod
    def from_hf_config(cls, hf_config: Mapping[str, Any]) -> Toy:
        tied = hf_config.get("tie_word_embeddings", hf_config["toy"].get("tied", False))
        return cls(ToyConfig(**{**hf_config["toy"], "tied": tied}))


class Architectures:
    @hookimpl
    def lema_architectures(self) -> Iterator[Architecture]:
        yield Architecture("toy", model_types=("toy",), adapter=f"{__name__}:Toy")


@pytest.fixture(autouse=True)
def plugins(monkeypatch: pytest.MonkeyPatch) -> PluginManager:
    """This package's backends and the toy alone."""
    manager = PluginManager()
    assert manager.admit("lema-quant", "quant", lambda: plugin) and manager.admit("toy", "toy", Architectures)
    monkeypatch.setattr(plan, "get_plugin_manager", lambda: manager)
    return manager


def toy(folder: Path, n_files: int = 1, dtype: torch.dtype = torch.bfloat16, **config: Any) -> Path:
    folder.mkdir()
    write_toy(folder, ToyConfig(**config), dtypes=(dtype,), n_files=n_files)
    (folder / "config.json").write_text(json.dumps({"model_type": "toy", "toy": config}))
    (folder / "tokenizer.json").write_text("{}")
    return folder


def quantized(folder: Path, out: Path, bits: int = 8, **options: Any) -> QuantizedCheckpoint:
    return quantize_checkpoint(folder, out, bits, options.pop("backend", "custom"), say=lambda line: None, **options)


def contents(folder: Path) -> dict[str, bytes]:
    files = {path.name: path.read_bytes() for path in folder.iterdir()}
    return {name: data for name, data in files.items() if name.endswith(".safetensors")}


def stored(folder: Path) -> dict[str, torch.Tensor]:
    """Every tensor of the files, as safetensors reads them."""
    return {name: tensor for path in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(path).items()}


def _refusal(error: type[LemaError], *arguments: Any, **options: Any) -> str:
    with pytest.raises(error) as caught:
        quantized(*arguments, **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


# ------------------------------------------------------------------------------------------------------ what is written


@pytest.mark.parametrize(("bits", "format"), [(8, "int8"), (4, "int4-32"), (4, "int4-128"), (4, "nf4")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_codecs_bytes_and_the_rest_as_it_was(tmp_path: Path, bits: int, format: str, dtype: torch.dtype) -> None:
    base = toy(tmp_path / "base", dtype=dtype, hidden_size=64, feed_forward=128)
    made = quantized(base, tmp_path / "out", bits, format=format)
    before, after = stored(base), stored(tmp_path / "out")
    names = {record.format: record.codec for record in plugin.lema_quant_backends() if record.name == "custom"}
    for report in made.report.tensors:
        weight = before.pop(report.name)
        multiplied = weight.ndim == 2 and not report.name.startswith(("model.tokens", "model.positions"))
        assert (report.format is not None) == multiplied and report.shape == tuple(weight.shape)
        if not multiplied:
            assert torch.equal(after.pop(report.name), weight) and report.reason
            continue
        expected = "int8" if report.name == "head.weight" else format
        codec = load_object(names[expected])()
        parts = [torch.empty(part.shape, dtype=part.dtype) for part in codec.format.parts(weight.shape)]
        codec.encode(weight, tuple(parts))
        assert report.format == expected and report.backend == "custom"
        for part, kind in zip(parts, codec.format.parts(weight.shape), strict=True):
            assert torch.equal(after.pop(report.name + kind.suffix), part)
        decoded = torch.empty(weight.shape)
        codec.format.decode(tuple(parts), decoded)
        lost = (decoded.double() - weight.double()).norm() / weight.double().norm()
        assert report.error == pytest.approx(lost.item(), rel=1e-6)
        assert report.bytes_after == sum(part.nbytes for part in parts)
    assert not before and not after


@pytest.mark.parametrize("bits", [8, 4])
def test_the_same_bytes_whatever_the_cut(tmp_path: Path, bits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    base = toy(tmp_path / "base", n_files=2)
    quantized(base, tmp_path / "whole", bits)
    monkeypatch.setattr(blocks, "_BLOCK", SMALL_BLOCK)
    cut = quantized(base, tmp_path / "cut", bits)
    assert contents(tmp_path / "whole") == contents(tmp_path / "cut")
    assert max(shape[0] * shape[1] for shape in (each.shape for each in cut.report.tensors) if len(shape) == 2) > 100


def test_the_folder_is_a_model_that_is_read_back(tmp_path: Path) -> None:
    base = toy(tmp_path / "base", n_files=3)
    made = quantized(base, tmp_path / "out", 4)
    names = {path.name for path in (tmp_path / "out").iterdir()}
    shards = {path.name for path in base.glob("*.safetensors")}
    assert names == shards | {"model.safetensors.index.json", "config.json", "tokenizer.json", REPORT_FILE}
    config = json.loads((tmp_path / "out/config.json").read_text())
    assert config.pop("quantization_config") == {
        "quant_method": "lema", "version": 1, "bits": 4, "format": "int4-32", "backend": "custom", "group_size": 32,
    }  # fmt: skip
    assert config == json.loads((base / "config.json").read_text())
    index = json.loads((tmp_path / "out/model.safetensors.index.json").read_text())
    assert set(index["weight_map"]) == set(stored(tmp_path / "out"))
    assert index["metadata"]["total_size"] == made.report.bytes_after
    for file in (tmp_path / "out").glob("*.safetensors"):
        with safe_open(file, "pt") as opened:
            assert opened.metadata()["format"] == "pt"
    manifest, original = read_manifest(tmp_path / "out"), stored(base)
    assert set(manifest.tensors) == set(original)
    for name, info in manifest.tensors.items():
        decoded, weight = read_tensor(info), original[name].float()
        limit = {"int4-32": 0.12, "int8": 0.01, "bfloat16": 0.0}[info.storage]
        assert (decoded.float() - weight).norm() <= limit * weight.norm()
    report = json.loads((tmp_path / f"out/{REPORT_FILE}").read_text())
    assert report["bytes_after"] == made.report.bytes_after and len(report["tensors"]) == len(original)


@pytest.mark.parametrize(
    "sizes",
    [
        {"hidden_size": 33, "n_heads": 3, "n_kv_heads": 1, "feed_forward": 1},
        {"hidden_size": 130, "n_heads": 1, "n_kv_heads": 1, "feed_forward": 127},
        {"hidden_size": 1, "n_heads": 1, "n_kv_heads": 1, "feed_forward": 33, "vocab_size": 1},
    ],
)
@pytest.mark.parametrize("options", [{"bits": 8}, {"bits": 4}, {"bits": 4, "format": "int4-128"}])
def test_odd_shapes(tmp_path: Path, sizes: dict[str, int], options: dict[str, Any]) -> None:
    """Shapes come back exactly, nothing stays unquantized in silence, and last columns lose no more than others."""
    base = toy(tmp_path / "base", n_layers=1, dtype=torch.float32, **sizes)
    made = quantized(base, tmp_path / "out", **options)
    manifest, original = read_manifest(tmp_path / "out"), stored(base)
    by_name = {report.name: report for report in made.report.tensors}
    assert set(by_name) == set(original)
    for name, weight in original.items():
        info = manifest.tensors[name]
        assert info.shape == tuple(weight.shape)
        if weight.ndim < 2 or "tokens" in name or "positions" in name:
            assert by_name[name].reason and info.quantized is None
            continue
        bits = 8 if name == "head.weight" else options["bits"]
        assert info.quantized.format.bits == bits and by_name[name].format == info.storage
        lost = (read_tensor(info) - weight).abs()
        # in 4 bits the largest number of a group may be clipped, for the sake of the others
        assert bool((lost <= weight.abs().amax(1, keepdim=True) * (0.5 / 127 if bits == 8 else 0.2) * 1.01).all())
        assert lost.norm() <= (0.01 if bits == 8 else 0.13) * weight.norm()


@pytest.mark.parametrize("bits", [8, 4])
def test_a_tied_tensor_is_stored_once_and_in_8_bits(tmp_path: Path, bits: int) -> None:
    base = toy(tmp_path / "base", tied=True)
    file = next(base.glob("*.safetensors"))
    before = load_file(file)
    save_file({**before, "head.weight": before["model.tokens.weight"].clone()}, file, metadata={"format": "pt"})
    made = quantized(base, tmp_path / "out", bits)
    after = stored(tmp_path / "out")
    assert "head.weight" not in after and after["model.tokens.weight"].dtype == torch.int8
    assert [each.format for each in made.report.tensors if each.name == "model.tokens.weight"] == ["int8"]


def test_a_tied_tensor_with_values_of_its_own_is_tied_no_more(tmp_path: Path) -> None:
    base = toy(tmp_path / "base", tied=True)
    file = next(base.glob("*.safetensors"))
    before = load_file(file)
    save_file({**before, "head.weight": before["model.tokens.weight"] + 1}, file, metadata={"format": "pt"})
    with pytest.warns(UserWarning, match="different values"):
        quantized(base, tmp_path / "out")
    assert json.loads((tmp_path / "out/config.json").read_text())["tie_word_embeddings"] is False
    after = stored(tmp_path / "out")
    assert after["head.weight"].dtype == torch.int8 and after["model.tokens.weight"].dtype == torch.bfloat16


def test_what_is_excluded_stays(tmp_path: Path) -> None:
    base = toy(tmp_path / "base")
    made = quantized(base, tmp_path / "out", 4, exclude=("layers.0.*.weight", ".down."))
    for report in made.report.tensors:
        if "layers.0" in report.name or ".down." in report.name:
            assert report.format is None
        elif report.name.endswith((".q.weight", ".up.weight")):
            assert report.format == "int4-32"


def test_one_large_column_is_warned_of(tmp_path: Path) -> None:
    base = toy(tmp_path / "base", dtype=torch.float32, hidden_size=64)
    file = next(base.glob("*.safetensors"))
    tensors = load_file(file)
    tensors["model.layers.1.up.weight"][:, 5] = 200
    save_file(tensors, file, metadata={"format": "pt"})
    made = quantized(base, tmp_path / "out", 4)
    assert made.report.warnings and all("model.layers.1.up.weight" in line for line in made.report.warnings)
    assert json.loads((tmp_path / f"out/{REPORT_FILE}").read_text())["warnings"] == made.report.warnings


# --------------------------------------------------------------------------------------------------- complete or absent


class Stopped(BaseException):
    """As a signal: no Exception."""


def stop_at(monkeypatch: pytest.MonkeyPatch, file: int) -> None:
    """Writing ends in the middle of the file of that number, counted from 0."""
    real, count = blocks.write_safetensors, 0

    def stopped(path: Path, tensors: list[Any], metadata: Mapping[str, str]) -> None:
        nonlocal count
        count += 1
        if count <= file:
            return real(path, tensors, metadata)

        def raises() -> torch.Tensor:
            raise Stopped

        return real(path, [*tensors[:-1], (*tensors[-1][:3], raises)], metadata)

    monkeypatch.setattr(blocks, "write_safetensors", stopped)


def test_an_interrupted_run_is_gone_on_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base, out = toy(tmp_path / "base", n_files=3), tmp_path / "out"
    quantized(base, tmp_path / "whole")
    with monkeypatch.context() as patch, pytest.raises(Stopped):
        stop_at(patch, 2)
        quantized(base, out)
    working = tmp_path / ".out.quantizing"
    files = sorted(path.name for path in working.glob("*.safetensors*"))
    assert not out.exists() and len(files) == 2
    kept = {name: (working / name).stat().st_ino for name in files}
    made = quantized(base, out)
    assert made.reused_files == 2 and not working.exists()
    assert {name: (out / name).stat().st_ino for name in files} == kept
    assert contents(out) == contents(tmp_path / "whole")
    assert made.report == quantized(base, tmp_path / "whole").report


@pytest.mark.parametrize("change", ["bits", "base", "file"])
def test_other_options_another_base_or_a_changed_file_begin_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    base, out = toy(tmp_path / "base", n_files=3), tmp_path / "out"
    with monkeypatch.context() as patch, pytest.raises(Stopped):
        stop_at(patch, 2)
        quantized(base, out)
    first = next(iter(sorted((tmp_path / ".out.quantizing").glob("*.safetensors"))))
    if change == "base":
        file = next(base.glob("*.safetensors"))
        shutil.copyfile(file, tmp_path / "copy")
        (tmp_path / "copy").replace(file)
    if change == "file":
        data = bytearray(first.read_bytes())
        data[-1] ^= 1
        first.write_bytes(data)
    bits = 4 if change == "bits" else 8
    made = quantized(base, out, bits)
    quantized(base, tmp_path / "whole", bits)
    assert made.reused_files == (1 if change == "file" else 0)
    assert contents(out) == contents(tmp_path / "whole") and not (tmp_path / ".out.quantizing").exists()


def test_what_is_there_already_is_not_made_again_and_another_is_replaced(tmp_path: Path) -> None:
    base, out = toy(tmp_path / "base"), tmp_path / "out"
    first = quantized(base, out)
    files = {path: path.stat().st_ino for path in out.iterdir()}
    again = quantized(base, out)
    assert (first.made, again.made) == (True, False) and again.report == first.report
    assert {path: path.stat().st_ino for path in out.iterdir()} == files
    other = quantized(base, out, 4)
    assert other.made and json.loads((out / "config.json").read_text())["quantization_config"]["bits"] == 4
    (out / "notes.md").write_text("mine")
    assert "notes.md" in _refusal(CheckpointError, base, out, 8)


def test_two_at_once_make_it_once(tmp_path: Path) -> None:
    base = toy(tmp_path / "base", n_files=2)
    made: list[QuantizedCheckpoint] = []
    threads = [Thread(target=lambda: made.append(quantized(base, tmp_path / "out"))) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(each.made for each in made) == [False, False, True]
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


# ------------------------------------------------------------------------------------------------------------- refusals


def test_quantizing_twice_is_refused(tmp_path: Path) -> None:
    quantized(toy(tmp_path / "base"), tmp_path / "out")
    for bits in (8, 4):
        said = _refusal(CheckpointError, tmp_path / "out", tmp_path / "again", bits)
        assert "quantized already (int8, by custom)" in said and not (tmp_path / "again").exists()


def test_another_librarys_checkpoint_is_refused(tmp_path: Path) -> None:
    base = toy(tmp_path / "base")
    config = json.loads((base / "config.json").read_text()) | {"quantization_config": {"quant_method": "gptq"}}
    (base / "config.json").write_text(json.dumps(config))
    assert "'gptq'" in _refusal(CheckpointError, base, tmp_path / "out")


@pytest.mark.parametrize("name", ["model.layers.1.up.weight", "model.layers.0.norm_1.weight"])
@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
def test_what_is_not_finite_is_named_and_nothing_is_left(tmp_path: Path, name: str, value: float) -> None:
    base = toy(tmp_path / "base")
    file = next(base.glob("*.safetensors"))
    tensors = load_file(file)
    tensors[name].view(-1)[-1] = value
    save_file(tensors, file, metadata={"format": "pt"})
    said = _refusal(CheckpointError, base, tmp_path / "out")
    assert f"tensor {name!r}" in said
    if "up" in name:
        assert "row 39, column 15" in said
    assert [path.name for path in tmp_path.iterdir()] == ["base"]


def test_room_is_asked_for_before_anything_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base = toy(tmp_path / "base")
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(atomic.shutil, "disk_usage", lambda path: usage._replace(free=1000))
    monkeypatch.setattr(blocks, "write_safetensors", lambda *_: pytest.fail("written without room"))
    said = _refusal(CheckpointError, base, tmp_path / "out")
    assert "bytes needed, 1000 bytes free" in said and [path.name for path in tmp_path.iterdir()] == ["base"]


def test_the_base_is_never_written_over(tmp_path: Path) -> None:
    base = toy(tmp_path / "base")
    for out in (base, tmp_path):
        assert "is or holds" in _refusal(CheckpointError, base, out)


def test_patterns_and_formats_that_mean_nothing(tmp_path: Path) -> None:
    base = toy(tmp_path / "base")
    refused: Callable[..., str] = lambda **options: _refusal(ConfigError, base, tmp_path / "out", **options)  # noqa: E731
    assert "'model.layer.0' is in no tensor's name" in refused(exclude=("model.layer.0",))
    assert "known:" in refused(format="int5") and "known:" in refused(backend="custm")
    assert set(wire_formats()) >= {"int8", "int4-32", "nf4"}
