"""What merging a delta makes of a base: one rounding, every other byte the base's, and nothing of another base."""

from __future__ import annotations

import json
import re
import shutil
from collections import namedtuple
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from lema import LemaConfig
from lema._utils._conversion import merge_delta
from lema.merge_task import merge
from lema_core.checkpoint import read_manifest
from lema_core.errors import CheckpointError, ConfigError
from lema_train.base_identity import identify_base
from lema_train.delta import DELTA_FILE, write_delta

IDS = torch.arange(4, 44).reshape(2, 20)
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
PROJECTION = "model.layers.1.self_attn.q_proj.weight"
NORM = "model.layers.2.input_layernorm.weight"


@pytest.fixture(autouse=True)
def setting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.set_num_threads(1)
    monkeypatch.setenv("LEMA_CACHE", str(tmp_path / "cache"))


def tensors_of(folder: Path) -> dict[str, Tensor]:
    return {name: tensor for path in folder.glob("*.safetensors") for name, tensor in load_file(path).items()}


def bits(tensor: Tensor) -> bytes:
    return tensor.contiguous().view(torch.uint8).numpy().tobytes()


def make_delta(base: Path, folder: Path, values: dict[str, Tensor]) -> Path:
    """A checkpoint's folder with ``values`` as its delta, of the base as it is now."""
    folder.mkdir(exist_ok=True)
    rows = [(name, tensor.dtype, tuple(tensor.shape), lambda t=tensor: t) for name, tensor in values.items()]
    write_delta(folder / DELTA_FILE, rows, identify_base(read_manifest(base), str(base)))
    return folder


def random_delta(base: Path, *names: str) -> dict[str, Tensor]:
    """About as large as the weights."""
    generator = torch.Generator().manual_seed(0)
    weights = tensors_of(base)
    return {name: torch.randn(weights[name].shape, generator=generator) * 0.1 for name in names}


def logits(model: torch.nn.Module) -> Tensor:
    with torch.no_grad():
        return model(IDS).logits


def opened(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def live(base: Path, values: dict[str, Tensor]) -> Tensor:
    """Logits of transformers' model of the base with ``values`` added to its parameters in fp32."""
    model = opened(base)
    with torch.no_grad():
        for name, tensor in values.items():
            model.get_parameter(name).add_(tensor)
    return logits(model)


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_it_is_the_sum_rounded_once_and_every_other_byte_is_the_bases(
    tmp_path: Path, make_model: Any, make_tokenizer: Any, dtype: torch.dtype, shards: int
) -> None:
    base, out = make_tokenizer(make_model(tmp_path / "base", dtype=dtype, shards=shards)), tmp_path / "out"
    (base / "generation_config.json").write_text('{"top_k": 3}')
    values = random_delta(base, PROJECTION, NORM, EMBEDDING)
    delta = make_delta(base, tmp_path / "checkpoint-1", values)
    report = merge_delta(base, delta, out)
    before, after = tensors_of(base), tensors_of(out)
    assert after.keys() == before.keys() and (report.path, report.changed) == (out, 3)
    for name, tensor in before.items():
        expected = (tensor.float() + values[name]).to(dtype) if name in values else tensor
        assert after[name].dtype == dtype and bits(after[name]) == bits(expected), name
    assert {path.name for path in out.iterdir()} == {path.name for path in base.iterdir()}
    for path in base.iterdir():
        if path.suffix == ".safetensors":
            assert abs((out / path.name).stat().st_size / path.stat().st_size - 1) < 0.01
            with safe_open(out / path.name, "pt") as file:
                assert file.metadata()["format"] == "pt"
        elif path.name != "model.safetensors.index.json":
            assert (out / path.name).read_bytes() == path.read_bytes()
    if shards > 1:
        index = json.loads((out / "model.safetensors.index.json").read_text())
        assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in after.values())
    if dtype == torch.float32:
        torch.testing.assert_close(logits(opened(out)), live(base, values), rtol=0, atol=1e-5)
        assert (logits(opened(base)) - live(base, values)).abs().max() > 1e-2


def test_what_rounding_loses_is_told_and_fp32_keeps_it(tmp_path: Path, make_model: Any) -> None:
    """1 - 1e-3 in bf16 is 1 again; 1 - 1e-2 is not."""
    base = make_model(tmp_path / "base", dtype=torch.bfloat16)
    path = base / "model.safetensors"
    tensors = load_file(path)
    for name in (PROJECTION, NORM):
        tensors[name] = torch.ones_like(tensors[name])
    save_file(tensors, path, metadata={"format": "pt"})
    values = {PROJECTION: torch.full((64, 64), -1e-3), NORM: torch.full((64,), -1e-2)}
    values[PROJECTION][0] = 0.0
    values[NORM][:10] = -1e-3
    delta = make_delta(base, tmp_path / "checkpoint-1", values)
    said: list[str] = []
    report = merge_delta(base, delta, tmp_path / "out", say=said.append)
    assert (report.lost, report.updated) == (63 * 64 + 10, 63 * 64 + 64)
    assert tuple(report.rounded[PROJECTION]) == (63 * 64, 63 * 64) and tuple(report.rounded[NORM]) == (64, 10)
    assert said == [
        "4,042 of 4,096 numbers (98.7 %) changed by less than their type can tell apart and are the base's again, most "
        f"in {PROJECTION} 4,032 of 4,032, {NORM} 10 of 64; dtype=torch.float32 keeps such changes"
    ]
    assert torch.equal(tensors_of(tmp_path / "out")[PROJECTION], torch.ones(64, 64).bfloat16())
    said.clear()
    for dtype in (torch.float32, "float32"):
        merge_delta(base, delta, tmp_path / "out", dtype, say=said.append)
        merged = tensors_of(tmp_path / "out")
        assert {tensor.dtype for tensor in merged.values()} == {torch.float32}
        assert torch.equal(merged[PROJECTION], 1 + values[PROJECTION]) and said == []
        assert json.loads((tmp_path / "out/config.json").read_text())["torch_dtype"] == "float32"
    with pytest.raises(ConfigError, match="dtype: 'int8' is not allowed; allowed: float32, bfloat16, float16, or None"):
        merge_delta(base, delta, tmp_path / "out", "int8")


@pytest.mark.parametrize("in_files", ["embedding", "head", "both"])
def test_tied_weights_stay_one_tensor(tmp_path: Path, make_model: Any, in_files: str) -> None:
    base, out = make_model(tmp_path / "base", tie_word_embeddings=True), tmp_path / "out"
    path = base / "model.safetensors"
    tensors = load_file(path)
    if in_files != "embedding":
        tensors[HEAD] = tensors[EMBEDDING].clone()
    values = random_delta(base, EMBEDDING, PROJECTION)
    if in_files == "head":
        del tensors[EMBEDDING]
    save_file(tensors, path, metadata={"format": "pt"})
    merge_delta(base, make_delta(base, tmp_path / "checkpoint-1", values), out)
    merged = tensors_of(out)
    assert merged.keys() == tensors.keys() and json.loads((out / "config.json").read_text())["tie_word_embeddings"]
    for name in {EMBEDDING, HEAD} & merged.keys():
        assert torch.equal(merged[name], tensors[name] + values[EMBEDDING])
    model = opened(out)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    torch.testing.assert_close(logits(model), live(base, values), rtol=0, atol=1e-5)


def test_a_tied_head_of_other_values_in_the_files_is_untied_in_the_config_too(tmp_path: Path, make_model: Any) -> None:
    base, out = make_model(tmp_path / "base", tie_word_embeddings=True), tmp_path / "out"
    path = base / "model.safetensors"
    tensors = load_file(path)
    save_file(tensors | {HEAD: 2 * tensors[EMBEDDING]}, path, metadata={"format": "pt"})
    values = random_delta(base, EMBEDDING)
    delta = make_delta(base, tmp_path / "checkpoint-1", values)
    with pytest.warns(UserWarning, match="they are not tied"):
        merge_delta(base, delta, out)
    assert torch.equal(tensors_of(out)[EMBEDDING], tensors[EMBEDDING] + values[EMBEDDING])
    assert torch.equal(tensors_of(out)[HEAD], 2 * tensors[EMBEDDING])
    assert json.loads((out / "config.json").read_text())["tie_word_embeddings"] is False


def test_an_empty_delta_copies_the_base(tmp_path: Path, make_model: Any) -> None:
    base = make_model(tmp_path / "base", dtype=torch.bfloat16)
    report = merge_delta(base, make_delta(base, tmp_path / "checkpoint-1", {}), tmp_path / "out")
    assert (report.changed, report.lost) == (0, 0)
    for name, tensor in tensors_of(base).items():
        assert bits(tensors_of(tmp_path / "out")[name]) == bits(tensor)
    assert torch.equal(logits(opened(tmp_path / "out")), logits(opened(base)))


# -- files alone


def test_a_file_makes_a_file_or_a_folder(tmp_path: Path, make_model: Any) -> None:
    base = make_model(tmp_path / "base", dtype=torch.float16)
    values = random_delta(base, PROJECTION)
    delta = make_delta(base, tmp_path / "checkpoint-1", values) / DELTA_FILE
    merged = tmp_path / "new/merged.safetensors"
    report = merge_delta(str(base / "model.safetensors"), str(delta), str(merged))
    assert [path.name for path in merged.parent.iterdir()] == ["merged.safetensors"] and report.path == merged
    merge_delta(base / "model.safetensors", delta, tmp_path / "folder")
    for found in (load_file(merged), tensors_of(tmp_path / "folder")):
        for name, tensor in tensors_of(base).items():
            expected = (tensor.float() + values[name]).half() if name in values else tensor
            assert bits(found[name]) == bits(expected)
    assert (tmp_path / "folder/config.json").exists()
    with pytest.raises(ConfigError, match="out: a folder expected, as the base"):
        merge_delta(base, delta, merged)


def test_a_shard_makes_a_shard(tmp_path: Path, make_model: Any) -> None:
    base = make_model(tmp_path / "base", shards=3)
    values = random_delta(base, *tensors_of(base))
    delta = make_delta(base, tmp_path / "checkpoint-1", values)
    for shard in sorted(base.glob("*.safetensors")):
        merge_delta(shard, delta, tmp_path / shard.name)
        before, after = load_file(shard), load_file(tmp_path / shard.name)
        assert after.keys() == before.keys()
        assert all(torch.equal(after[name], before[name] + values[name]) for name in after)


def test_a_file_that_is_read_is_never_written(tmp_path: Path, make_model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    base = make_model(tmp_path / "base")
    weights = base / "model.safetensors"
    delta = make_delta(base, tmp_path / "checkpoint-1", random_delta(base, PROJECTION)) / DELTA_FILE
    before = {path: path.read_bytes() for path in (weights, delta)}
    (tmp_path / "link.safetensors").symlink_to(delta)
    for out in (weights, tmp_path / "link.safetensors"):
        with pytest.raises(CheckpointError, match="which is read: give another file to write"):
            merge_delta(weights, delta, out)
    with pytest.raises(CheckpointError, match="is or holds"):
        merge_delta(weights, delta, base)
    with pytest.raises(CheckpointError, match="is or holds"):
        merge_delta(base, delta, delta.parent)
    (tmp_path / "folder.safetensors").mkdir()
    with pytest.raises(CheckpointError, match="a file to write expected, a folder found"):
        merge_delta(weights, delta, tmp_path / "folder.safetensors")
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(10**9, 10**9 - 1000, 1000))
    with pytest.raises(CheckpointError, match=r"out\.safetensors: \d+ bytes needed, 1000 bytes free"):
        merge_delta(weights, delta, tmp_path / "out.safetensors")
    assert {path: path.read_bytes() for path in (weights, delta)} == before
    assert not (tmp_path / "out.safetensors").exists()


# -- refusals


def refusal(base: Path, delta: Path, out: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        merge_delta(base, delta, out)
    assert "\n" not in str(caught.value) and not out.exists()
    return str(caught.value)


def test_another_base_is_refused(tmp_path: Path, make_model: Any) -> None:
    base, out = make_model(tmp_path / "base"), tmp_path / "out"
    delta = make_delta(base, tmp_path / "checkpoint-1", random_delta(base, PROJECTION))
    other = make_model(tmp_path / "other", seed=7)
    assert f"made from {base}, and {other} is another base: model.safetensors: sha256" in refusal(other, delta, out)
    assert "sha256" in refusal(other / "model.safetensors", delta, tmp_path / "out.safetensors")
    wider = make_model(tmp_path / "wider", dtype=torch.bfloat16)
    assert re.search(r"model\.safetensors: \d+ bytes expected, \d+ bytes found", refusal(wider, delta, out))
    assert "not in model.safetensors" in refusal(make_model(tmp_path / "sharded", shards=3), delta, out)
    smaller = make_model(tmp_path / "smaller", num_hidden_layers=1)
    assert f"does not have: {PROJECTION}" in refusal(smaller, delta, out)


def test_added_tokens_are_refused_with_both_shapes(tmp_path: Path, make_model: Any) -> None:
    trained, base = make_model(tmp_path / "trained", vocab_size=130), make_model(tmp_path / "base")
    delta = make_delta(trained, tmp_path / "checkpoint-1", random_delta(trained, EMBEDDING))
    message = refusal(base, delta, tmp_path / "out")
    assert f"'{EMBEDDING}': shape [128, 64] expected from the base model, [130, 64] found" in message


def test_a_delta_that_is_not_finite_or_of_an_untied_model_is_refused(tmp_path: Path, make_model: Any) -> None:
    base = make_model(tmp_path / "base", tie_word_embeddings=True)
    values = random_delta(base, PROJECTION)
    values[PROJECTION][3, 3] = float("nan")
    delta = make_delta(base, tmp_path / "checkpoint-1", values)
    message = refusal(base, delta, tmp_path / "out")
    assert f"{delta / DELTA_FILE}: tensor '{PROJECTION}' holds values that are infinite or NaN" in message
    make_delta(base, delta, {HEAD: torch.ones(128, 64)})
    assert f"holds {HEAD}, which is one with {EMBEDDING}" in refusal(base, delta, tmp_path / "out")


# -- on the command line


def test_task_merge_takes_a_checkpoint_with_a_delta(lema: Any, make_model: Any, make_tokenizer: Any) -> None:
    base = make_tokenizer(make_model(lema.cwd / "base", dtype=torch.bfloat16))
    values = random_delta(base, PROJECTION)
    checkpoint = make_delta(base, lema.cwd / "checkpoint-4", values)
    child = lema.ok("task=merge", "delta_path=checkpoint-4", "output_dir=merged")
    assert re.search(rf"^merged +{lema.cwd / 'merged'}$", child.out, re.MULTILINE)
    assert re.search(rf"^delta +{Path('checkpoint-4') / DELTA_FILE}$", child.out, re.MULTILINE)
    found = tensors_of(lema.cwd / "merged")[PROJECTION]
    assert torch.equal(found, (tensors_of(base)[PROJECTION].float() + values[PROJECTION]).bfloat16())
    error = lema.error("task=merge", "lora_path=checkpoint-4", "output_dir=merged")
    assert "whole weights and no LoRA weights: give them as delta_path=checkpoint-4" in error
    values[PROJECTION] *= 1e-3
    make_delta(base, checkpoint, values)
    options = {"delta_path": str(checkpoint / DELTA_FILE), "output_dir": str(lema.cwd / "small"), "task": "merge"}
    summary = merge(LemaConfig(**options, max_shard_size="100KB"))
    assert 0 < summary["numbers_lost"] <= summary["numbers_updated"] <= 64 * 64
    assert len(list((lema.cwd / "small").glob("*.safetensors"))) > 1
    options["output_dir"] = str(lema.cwd / "fp32")
    assert merge(LemaConfig(**options, merge_dtype="float32"))["numbers_lost"] is None
