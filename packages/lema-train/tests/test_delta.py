"""delta.safetensors: what is in it, which base it is for, and everything that must be refused."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from lema_core.adapter import TensorSpec
from lema_core.checkpoint import Manifest, read_manifest
from lema_core.errors import CheckpointError
from lema_train import base_identity
from lema_train.base_identity import BaseIdentity, FileIdentity, identify_base, sha256_of
from lema_train.delta import Delta, read_delta, write_delta

BASE = {
    "model.embed_tokens.weight": torch.arange(32.0).view(8, 4).bfloat16(),
    "model.layers.0.conv.weight": torch.ones(4, 1, 3),
    "model.norm.weight": torch.full((4,), 0.5, dtype=torch.float16),
}


class Three:
    """A model of three tensors."""

    def tensors(self) -> list[TensorSpec]:
        return [TensorSpec(name, tuple(tensor.shape), "norm") for name, tensor in BASE.items()]


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LEMA_CACHE", str(tmp_path / "cache"))
    base_identity._sha256_once.cache_clear()


def make_base(folder: Path, shards: int = 1, **config: Any) -> Manifest:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", **config}))
    if shards == 1:
        save_file(BASE, folder / "model.safetensors")
    else:
        weight_map = {name: f"{i % shards}.safetensors" for i, name in enumerate(BASE)}
        for file in set(weight_map.values()):
            save_file({name: BASE[name] for name in BASE if weight_map[name] == file}, folder / file)
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return read_manifest(folder)


def write(path: Path, base: Manifest, tensors: dict[str, Tensor]) -> Delta:
    rows = [(name, tensor.dtype, tuple(tensor.shape), lambda t=tensor: t) for name, tensor in tensors.items()]
    write_delta(path, rows, identify_base(base, "org/name"))
    return read_delta(path)


def random_delta() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(tensor.shape, generator=generator) for name, tensor in BASE.items()}


# -- the file


def test_it_says_what_it_is_for_and_other_readers_load_it(tmp_path: Path) -> None:
    base = make_base(tmp_path / "base", shards=3, tie_word_embeddings=True)
    values = random_delta()
    delta = write(tmp_path / "delta.safetensors", base, values)
    assert all(torch.equal(tensor, values[name]) for name, tensor in load_file(delta.path).items())
    with safe_open(delta.path, "pt") as file:
        metadata = file.metadata()
    assert metadata["format"] == "pt" and metadata["lema_delta_version"] == "1"
    found = json.loads(metadata["lema_base"])
    files = [tmp_path / "base" / f"{i}.safetensors" for i in range(3)]
    assert found == {
        "name": "org/name",
        "files": {
            path.name: {"bytes": path.stat().st_size, "sha256": hashlib.sha256(path.read_bytes()).hexdigest()}
            for path in files
        },
        "config": {"model_type": "llama", "tie_word_embeddings": True},
    }
    assert delta.identity == identify_base(base, "org/name")
    assert read_delta(tmp_path) == delta
    delta.check_fits(Three())
    delta.check_base(base)


def test_a_tensor_may_come_in_blocks_and_there_may_be_none(tmp_path: Path) -> None:
    base = make_base(tmp_path / "base")

    def blocks() -> Iterator[Tensor]:
        yield torch.ones(3, 4)
        yield torch.full((5, 4), 2.0)

    name = "model.embed_tokens.weight"
    write_delta(tmp_path / "blocks", [(name, torch.float32, (8, 4), blocks)], identify_base(base, "b"))
    assert load_file(tmp_path / "blocks")[name].sum() == 12 + 40
    empty = write(tmp_path / "empty", base, {})
    assert empty.tensors == {} and load_file(empty.path) == {}
    empty.check_fits(Three())
    empty.check_base(base)


def test_only_fp32_is_written(tmp_path: Path) -> None:
    base = make_base(tmp_path / "base")
    with pytest.raises(CheckpointError, match=r"'model\.norm\.weight': F32 expected, F16 found"):
        write(tmp_path / "delta", base, {"model.norm.weight": torch.zeros(4).half()})
    assert not (tmp_path / "delta").exists()


# -- reading


def test_blocks_of_rows_and_sums(tmp_path: Path) -> None:
    base = make_base(tmp_path / "base")
    values = random_delta()
    delta = write(tmp_path / "delta", base, {name: values[name] for name in list(values)[:2]})
    for name in BASE:
        rows = BASE[name].shape[0]
        for start, stop in ((0, rows), (1, 3), (rows - 1, rows), (2, 2)):
            original = BASE[name].float()[start:stop]
            block = delta.block(name, start, stop)
            updated = delta.updated(name, base.tensors[name], start, stop)
            if name in delta.tensors:
                assert torch.equal(block, values[name][start:stop])
                assert torch.equal(updated, original + values[name][start:stop])
            else:
                assert block is None and torch.equal(updated, original)
            assert updated.dtype == torch.float32 and updated.shape == original.shape


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_is_refused_by_name(tmp_path: Path, value: float) -> None:
    spoilt = torch.zeros(8, 4)
    spoilt[5, 2] = value
    delta = write(tmp_path / "delta", make_base(tmp_path / "base"), {"model.embed_tokens.weight": spoilt})
    assert delta.block("model.embed_tokens.weight", 0, 5) is not None
    with pytest.raises(CheckpointError, match=r"delta: tensor 'model\.embed_tokens\.weight' holds values that are inf"):
        delta.block("model.embed_tokens.weight", 4, 6)


def test_what_is_no_delta_is_said_with_what_it_is(tmp_path: Path) -> None:
    base = make_base(tmp_path / "base")

    def refusal(path: Path) -> str:
        with pytest.raises(CheckpointError) as caught:
            read_delta(path)
        assert "\n" not in str(caught.value)
        return str(caught.value)

    assert f"{tmp_path / 'no'}: no such file or folder" in refusal(tmp_path / "no")
    assert "no delta.safetensors in this folder; give a checkpoint of a run" in refusal(tmp_path)
    (tmp_path / "checkpoint-3").mkdir()
    write(tmp_path / "checkpoint-3/delta.safetensors", base, {})
    assert f"give one of its checkpoints, such as {tmp_path / 'checkpoint-3'}" in refusal(tmp_path)
    (tmp_path / "lora").mkdir()
    (tmp_path / "lora/adapter_config.json").write_text("{}")
    assert f"LoRA weights; give them as lora_path={tmp_path / 'lora'}" in refusal(tmp_path / "lora")
    assert "not a delta of lema: its metadata has no lema_delta_version" in refusal(base.folder / "model.safetensors")
    identity = identify_base(base, "b").to_json()
    for metadata, words in (
        ({"lema_delta_version": "2"}, "lema_delta_version 1 expected, 2 found"),
        ({"lema_delta_version": "1"}, "lema_base in its metadata does not describe a base model"),
        ({"lema_delta_version": "1", "lema_base": "[]"}, "does not describe a base model"),
        ({"lema_delta_version": "1", "lema_base": '{"name": "x"}'}, "does not describe a base model"),
        ({"lema_delta_version": "1", "lema_base": identity}, "tensor 'w': F32 expected, BF16 found"),
    ):
        save_file({"w": torch.zeros(1).bfloat16()}, tmp_path / "other", metadata=metadata)
        assert words in refusal(tmp_path / "other")
    whole = (tmp_path / "checkpoint-3/delta.safetensors").read_bytes()
    (tmp_path / "cut").write_bytes(whole[:-10])
    assert f"{tmp_path / 'cut'}: " in refusal(tmp_path / "cut")


def test_tensors_of_another_model_are_refused_by_name_and_both_shapes(tmp_path: Path) -> None:
    base = make_base(tmp_path / "base")
    resized = write(tmp_path / "resized", base, {"model.embed_tokens.weight": torch.zeros(10, 4)})
    with pytest.raises(CheckpointError, match=r"embed_tokens\.weight': shape \[8, 4\] expected .*\[10, 4\] found"):
        resized.check_fits(Three())
    other = write(tmp_path / "other", base, {"model.layers.1.conv.weight": torch.zeros(4, 1, 3)})
    with pytest.raises(CheckpointError, match=r"does not have: model\.layers\.1\.conv\.weight; did you mean "):
        other.check_fits(Three())


# -- which base


def wrong(delta: Delta, folder: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        delta.check_base(read_manifest(folder))
    message = str(caught.value)
    assert "\n" not in message and f"made from org/name, and {folder} is another base: " in message
    return message


def test_another_base_is_refused_with_what_differs(tmp_path: Path) -> None:
    folder = tmp_path / "base"
    delta = write(tmp_path / "delta", make_base(folder, shards=3), {})
    config = (folder / "config.json").read_text()
    for field, value in (("model_type", "mistral"), ("tie_word_embeddings", True)):
        (folder / "config.json").write_text(json.dumps(json.loads(config) | {field: value}))
        assert f"config.json: {field} " in wrong(delta, folder)
    (folder / "config.json").write_text(config)

    path = folder / "1.safetensors"
    good = path.read_bytes()
    path.write_bytes(good[:-1] + bytes([good[-1] ^ 1]))
    assert f"1.safetensors: sha256 {hashlib.sha256(good).hexdigest()[:16]}... expected, " in wrong(delta, folder)
    save_file({"model.layers.0.conv.weight": torch.ones(4, 1, 4)}, path)
    message = wrong(delta, folder)
    assert f"1.safetensors: {len(good)} bytes expected, {path.stat().st_size} bytes found" in message
    path.write_bytes(good)
    delta.check_base(read_manifest(folder))

    make_base(tmp_path / "single")
    assert "its weights are in model.safetensors, and not in 0.safetensors" in wrong(delta, tmp_path / "single")
    of_two = replace(delta, identity=replace(delta.identity, files=dict(list(delta.identity.files.items())[:2])))
    assert "its weights are also in 2.safetensors" in wrong(of_two, folder)


def test_a_single_file_may_have_another_name(tmp_path: Path) -> None:
    folder = tmp_path / "base"
    delta = write(tmp_path / "delta", make_base(folder), {})
    (folder / "model.safetensors").rename(folder / "weights.safetensors")
    delta.check_base(read_manifest(folder))


def test_a_file_is_read_once_until_it_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"one")
    reads: list[str] = []
    hashed = hashlib.sha256

    def counting(*given: bytes) -> Any:
        reads.append("")
        return hashed(*given)

    monkeypatch.setattr(base_identity.hashlib, "sha256", counting)
    said: list[str] = []
    monkeypatch.setattr(base_identity, "_LARGE_BYTES", 1)

    def found() -> str:
        reads.clear()
        said.clear()
        value = sha256_of(path, said.append)
        assert value == hashed(path.read_bytes()).hexdigest()
        assert said == [f"reading {path} once for its sha256: 0.0 GB"] * len(reads)
        return str(len(reads))

    assert found() == "1" and found() == "0"
    base_identity._sha256_once.cache_clear()  # another process
    assert found() == "0"
    times = path.stat().st_atime_ns, path.stat().st_mtime_ns
    path.write_bytes(b"two")
    os.utime(path, ns=times)
    assert found() == "1" and found() == "0"
    for kept in (tmp_path / "cache/sha256").iterdir():
        kept.write_text("{")
    base_identity._sha256_once.cache_clear()
    assert found() == "1"


def test_without_a_cache_it_is_read_once_in_a_process(tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("no folder")
    path = tmp_path / "file"
    path.write_bytes(b"one")
    with pytest.warns(UserWarning, match="is not kept: .*LEMA_CACHE says where it goes"):
        value = sha256_of(path)
    assert value == sha256_of(path) == hashlib.sha256(b"one").hexdigest()
    with pytest.raises(CheckpointError, match="no such: cannot be read: No such file"):
        sha256_of(tmp_path / "no such")


def test_an_identity_is_json(tmp_path: Path) -> None:
    identity = BaseIdentity("ä", {"x": FileIdentity(3, "00")}, {"model_type": "gpt2", "tie_word_embeddings": None})
    assert BaseIdentity.from_json(identity.to_json()) == identity
