"""Quantized tensors in files: payload and scales are one, and what is not as it should be is refused by name."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from lema_core.adapter import TensorSpec
from lema_core.checkpoint import bind_tensors, read_elements, read_file_manifest, read_manifest, read_tensor
from lema_core.checkpoint.quantized import METADATA_KEY
from lema_core.errors import CheckpointError
from lema_core.low_memory import load_checkpoint_with_low_memory
from lema_core.testing.quantizing import encoded, quantize_folder
from lema_core.testing.toy import ToyAdapter, ToyConfig, write_toy

CONFIG = ToyConfig(n_layers=1, vocab_size=10)
UP = "model.layers.0.up.weight"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A float toy."""
    plain = tmp_path / "plain"
    plain.mkdir()
    write_toy(plain, CONFIG)
    (plain / "config.json").write_text("{}")
    return plain


def quantized(plain: Path, form: str = "int8", **how: Any) -> Path:
    return quantize_folder(plain, plain.parent / f"{form} {len(list(plain.parent.iterdir()))}", form, **how)


def contents(folder: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Tensors as they lie in the one file, and what its metadata says of them."""
    from safetensors import safe_open

    with safe_open(folder / "model.safetensors", "pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        return tensors, json.loads((file.metadata() or {}).get(METADATA_KEY, "{}"))


def spoilt(folder: Path, how: Callable[[dict[str, Tensor], dict[str, Any]], None]) -> Path:
    tensors, entries = contents(folder)
    how(tensors, entries)
    metadata = {"format": "pt"} | ({METADATA_KEY: json.dumps(entries)} if entries else {})
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors", metadata)
    return folder


def refused(folder: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        for info in bind_tensors(read_manifest(folder), ToyAdapter(CONFIG)).values():
            read_tensor(info)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("form", ["int8", "int4-32", "int4-128"])
def test_payload_and_scales_are_one_tensor_that_reads_decoded(folder: Path, form: str) -> None:
    path = quantized(folder, form)
    before, after = read_manifest(folder).tensors, read_manifest(path).tensors
    assert set(before) == set(after)
    for name, info in after.items():
        assert info.shape == before[name].shape
        if info.quantized is None:
            assert read_tensor(info).equal(read_tensor(before[name]))
            continue
        assert info.dtype == torch.float32 and info.storage == form
        assert info.nbytes == info.quantized.format.nbytes(info.shape)
        parts = encoded(read_tensor(before[name]), form)
        expected = torch.empty(info.shape)
        info.quantized.format.decode(parts, expected)
        assert read_tensor(info).equal(expected)
        assert read_elements(info, 5, 23).equal(expected.flatten()[5:28])
        assert info.rows("some", 1, 3).nbytes * info.shape[0] == info.nbytes * 2
        assert read_tensor(info.rows("some", 1, 3)).equal(expected[1:3])
    assert read_file_manifest(path / "model.safetensors").tensors == after


def test_int8_is_known_by_its_scales_alone(folder: Path) -> None:
    path = quantized(folder)
    expected = {name: read_tensor(info) for name, info in read_manifest(path).tensors.items()}
    spoilt(path, lambda tensors, entries: entries.clear())
    found = read_manifest(path).tensors
    assert found[UP].quantized.format.name == "int8"
    assert all(read_tensor(found[name]).equal(expected[name]) for name in expected)


def test_scales_may_lie_in_another_file(folder: Path) -> None:
    path = quantized(folder, "int4-64")
    expected = read_tensor(read_manifest(path).tensors[UP])
    tensors, entries = contents(path)
    (path / "model.safetensors").unlink()
    scales = {name: tensor for name, tensor in tensors.items() if name.endswith(".scale")}
    save_file(scales, path / "b.safetensors")
    rest = {name: tensor for name, tensor in tensors.items() if name not in scales}
    save_file(rest, path / "a.safetensors", {METADATA_KEY: json.dumps(entries)})
    found = read_manifest(path)
    assert read_tensor(found.tensors[UP]).equal(expected)
    assert [each.name for each in found.paths] == ["a.safetensors", "b.safetensors"]


def _set(name: str, value: Callable[[Tensor], Tensor]) -> Callable[[dict[str, Tensor], Any], None]:
    return lambda tensors, entries: tensors.__setitem__(name, value(tensors[name]))


def _at(value: float) -> Callable[[Tensor], Tensor]:
    def changed(scale: Tensor) -> Tensor:
        scale[3] = value
        return scale

    return changed


SPOILT: Mapping[str, tuple[str, Callable[[dict[str, Tensor], Any], Any], tuple[str, ...]]] = {
    "no scales": ("int8", lambda tensors, _: tensors.pop(f"{UP}.scale"), (UP, "scale", "not in the files")),
    "no scales, no metadata": (
        "int8",
        lambda tensors, entries: (tensors.pop(f"{UP}.scale"), entries.clear()),
        (UP, "scale", "not in the files"),
    ),
    "wrong length": ("int8", _set(f"{UP}.scale", lambda s: s[:-1]), (UP, "F32 [40] expected, F32 [39] found")),
    "wrong groups": ("int4-32", _set(f"{UP}.scale", lambda s: s.repeat(1, 2)), (UP, "[40, 1] expected", "[40, 2]")),
    "wrong dtype": ("int8", _set(f"{UP}.scale", lambda s: s.bfloat16()), (UP, "F32 [40] expected, BF16 [40] found")),
    "NaN": ("int8", _set(f"{UP}.scale", _at(float("nan"))), (UP, "infinite or NaN")),
    "infinite": ("int4-32", _set(f"{UP}.scale", _at(float("inf"))), (UP, "infinite or NaN")),
    "negative": ("int8", _set(f"{UP}.scale", _at(-0.5)), (UP, "below zero")),
    "plain numbers": ("int8", _set(UP, lambda q: q.float()), (UP, "int8", "plain numbers", "F32 [40, 16] found")),
    "no shape": ("int4-32", lambda _, entries: entries[UP].pop("shape"), (UP, "int4-32", "no shape")),
    "no metadata": ("int4-32", lambda _, entries: entries.clear(), ("weight", "packed numbers", METADATA_KEY)),
    "another shape": ("int4-32", lambda _, entries: entries[UP].update(shape=[40, 15]), (UP, "[40, 15]", "[40, 16]")),
    "unknown format": ("int8", lambda _, entries: entries[UP].update(format="int-8"), (UP, "int-8", "int8")),
    "not there": ("int8", lambda _, entries: entries.update(gone=entries[UP]), ("gone", "do not hold it")),
    "a norm": (
        "int8",
        lambda tensors, _: tensors.update(
            {"model.norm.weight": torch.ones(1, 16, dtype=torch.int8), "model.norm.weight.scale": torch.ones(1)}
        ),
        ("model.norm.weight", "[16] expected"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", SPOILT)
def test_what_is_wrong_is_refused_with_tensor_and_reason(folder: Path, case: str) -> None:
    form, how, words = SPOILT[case]
    said = refused(spoilt(quantized(folder, form), how))
    assert all(word in said for word in words), said


CONFIGS = {
    "fp8": {"quant_method": "fp8", "activation_scheme": "dynamic"},
    "gptq": {"quant_method": "gptq", "bits": 4},
    "awq": {"quant_method": "awq"},
    "bitsandbytes": {"quant_method": "bitsandbytes", "load_in_4bit": True},
    "nothing": {"bits": 8},
    "another version": {"quant_method": "lema", "version": 2, "format": "int8"},
}


@pytest.mark.parametrize("case", CONFIGS)
def test_other_quantization_configs_are_refused(folder: Path, case: str) -> None:
    config = CONFIGS[case]
    (folder / "config.json").write_text(json.dumps({"quantization_config": config}))
    said = refused(folder)
    named = repr(config.get("quant_method")) if case != "another version" else "version 1 expected, 2 found"
    assert named in said and "config.json" in said, said


def test_a_config_that_says_quantized_over_plain_numbers(folder: Path) -> None:
    config = {"quantization_config": {"quant_method": "lema", "version": 1, "bits": 8, "format": "int8"}}
    path = quantized(folder)
    (folder / "config.json").write_text(json.dumps(config))
    said = refused(folder)
    assert "'int8'" in said and "no tensor of the files is quantized" in said and "weight'" in said, said
    shutil.copy(folder / "config.json", path)
    assert read_manifest(path).tensors[UP].quantized is not None


def test_a_part_that_is_cut_out_by_bytes_is_refused_and_one_by_rows_is_not(folder: Path) -> None:
    """Adapters cut tensors apart that files join."""

    class Joined(ToyAdapter):
        by_rows = True

        def tensors(self) -> list[TensorSpec]:
            specs = [spec for spec in super().tensors() if spec.name != UP]
            return [*specs, *(TensorSpec(f"{UP}.{half}", (20, 16), "linear", 0) for half in "ab")]

        def unfolded(self, found: Any) -> Any:
            info = found[UP]
            if self.by_rows:
                halves = {f"{UP}.a": info.rows(f"{UP}[a]", 0, 20), f"{UP}.b": info.rows(f"{UP}[b]", 20, 40)}
            else:
                from dataclasses import replace

                halves = {f"{UP}.{half}": replace(info, shape=(20, 16)) for half in "ab"}
            return {name: info for name, info in found.items() if name != UP} | halves

    path, adapter = quantized(folder), Joined(CONFIG)
    bound = bind_tensors(read_manifest(path), adapter)
    whole = read_tensor(read_manifest(path).tensors[UP])
    assert torch.cat([read_tensor(bound[f"{UP}.{half}"]) for half in "ab"]).equal(whole)
    adapter.by_rows = False
    with pytest.raises(CheckpointError, match=r"up.weight.*cannot be cut out"):
        bind_tensors(read_manifest(path), adapter)


def test_a_module_does_not_get_packed_numbers(folder: Path) -> None:
    module = torch.nn.Linear(16, 40)
    with pytest.raises(CheckpointError, match=r"int8, which only lema computes with"):
        load_checkpoint_with_low_memory(module, quantized(folder), strict=False)
