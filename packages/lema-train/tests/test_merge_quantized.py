"""Merging into a quantized base: into the numbers that it stands for, and only where that is asked for."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from lema_core.checkpoint import Manifest, read_manifest, read_tensor
from lema_core.checkpoint.manifest import INDEX_NAME
from lema_core.errors import CheckpointError
from lema_core.testing.quantizing import quantize_folder
from lema_core.testing.toy import ToyConfig, write_toy
from lema_train.merge import Change, Changes, low_rank_update
from lema_train.merge_places import Places
from lema_train.merge_plan import plan_merge
from lema_train.merge_write import write_merged

CONFIG = ToyConfig(n_layers=2)
CHANGED = "model.layers.1.up.weight", "model.layers.0.q.weight"


@pytest.fixture
def plain(tmp_path: Path) -> Path:
    folder = tmp_path / "plain"
    folder.mkdir()
    write_toy(folder, CONFIG)
    (folder / "config.json").write_text('{"torch_dtype": "float32"}')
    return folder


def changes(base: Manifest) -> Changes:
    generator = torch.Generator().manual_seed(0)
    found = {}
    for name in CHANGED:
        rows, columns = base.tensors[name].shape
        a, b = torch.randn(2, columns, generator=generator), torch.randn(rows, 2, generator=generator)
        edit = low_rank_update(lambda a=a: a, lambda b=b: b, 0.5, transposed=False)
        found[name] = (Change(0, rows, edit),)
    return Changes(found)


def merged(folder: Path, out: Path, dtype: torch.dtype | None, shard_bytes: int | None = None) -> Manifest:
    base = read_manifest(folder)
    write_merged(plan_merge(base, changes(base), dtype, shard_bytes), out, [])
    return read_manifest(out)


@pytest.mark.parametrize("form", ["int8", "int4-32"])
@pytest.mark.parametrize("shard_bytes", [None, 3000])
def test_equals_merging_into_the_decoded_numbers(
    plain: Path, tmp_path: Path, form: str, shard_bytes: int | None
) -> None:
    quantized = quantize_folder(plain, tmp_path / "quantized", form)
    decoded = quantize_folder(plain, tmp_path / "decoded", form, plain=True)
    found = merged(quantized, tmp_path / "one", torch.float32, shard_bytes)
    expected = merged(decoded, tmp_path / "other", torch.float32, shard_bytes)
    assert set(found.tensors) == set(expected.tensors)
    for name, info in found.tensors.items():
        assert info.quantized is None
        assert read_tensor(info).equal(read_tensor(expected.tensors[name])), name
    assert not read_tensor(found.tensors[CHANGED[0]]).equal(read_tensor(read_manifest(decoded).tensors[CHANGED[0]]))
    config = json.loads((tmp_path / "one" / "config.json").read_text())
    assert config == {"torch_dtype": "float32"}


def test_shards_with_scales_apart(plain: Path, tmp_path: Path) -> None:
    """Scales in a file of their own leave none behind."""
    quantized = quantize_folder(plain, tmp_path / "quantized", "int8")
    before = read_manifest(quantized)
    stored = {each.name: read_tensor(each) for info in before.tensors.values() for each in info.stored}
    expected = {name: read_tensor(info) for name, info in before.tensors.items()}
    (quantized / "model.safetensors").unlink()
    scales = {name for name in stored if name.endswith(".scale")}
    shards = {"a.safetensors": set(stored) - scales, "b.safetensors": scales}
    for file, names in shards.items():
        save_file({name: stored[name] for name in names}, quantized / file)
    weight_map = {name: file for file, names in shards.items() for name in names}
    (quantized / INDEX_NAME).write_text(json.dumps({"weight_map": weight_map}))
    found = merged(quantized, tmp_path / "out", torch.float32)
    assert set(found.tensors) == set(expected)
    assert all(read_tensor(found.tensors[name]).equal(expected[name]) for name in set(expected) - set(CHANGED))


def test_refused_without_a_type(plain: Path, tmp_path: Path) -> None:
    quantized = quantize_folder(plain, tmp_path / "quantized", "int4-64")
    with pytest.raises(CheckpointError, match=r"weight' is int4-64.*model_name_or_path.*merge_dtype"):
        merged(quantized, tmp_path / "out", None)


def test_places_of_rows_that_an_adapter_cuts_out(plain: Path, tmp_path: Path) -> None:
    base = read_manifest(quantize_folder(plain, tmp_path / "quantized", "int4-32"))
    info = base.tensors[CHANGED[0]]
    assert Places(base).of(info) == (CHANGED[0], 0)
    assert Places(base).of(info.rows("some", 7, 20)) == (CHANGED[0], 7)
