"""Weights that train, in files and back: exact to the bit, whatever they moved by and however moments are kept."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from lema_core.checkpoint import Manifest, read_header, read_tensor, write_safetensors
from lema_core.device import CpuDevice, map_ram
from lema_core.errors import CheckpointError
from lema_core.ops.adamw import TorchAdamW
from lema_core.store.fixed import fixed_weights
from lema_core.store.gradients import numbers_of
from lema_core.store.granules import WorkingSpace
from lema_core.store.model import StreamedModel, cut_model
from lema_core.store.state_plan import StateCodecs, StatePlan
from lema_core.store.store import TensorStore
from lema_core.testing.toy import ToyAdapter, ToyConfig, write_toy
from lema_core.training import AdamWOptions, WeightTraining
from lema_train import base_identity
from lema_train.delta import read_delta
from lema_train.state import TrainerState
from lema_train.weight_files import WeightFiles, weight_values

FP32 = StateCodecs()
TIED = ToyConfig(n_layers=2, tied=True, biased=False)
UNTIED = ToyConfig(n_layers=2)


class Training(WeightTraining):
    def describe(self) -> str:
        return "toy"


class Halves:
    """A codec as coarse as fp16."""

    def __init__(self, kind: str) -> None:
        self.kind = kind

    def nbytes(self, n: int) -> int:
        return 2 * n

    def encode(self, values: Tensor, encoded: Tensor) -> None:
        encoded.view(torch.float16).copy_(values)

    def decode(self, encoded: Tensor, values: Tensor) -> None:
        values.copy_(encoded.view(torch.float16))


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LEMA_CACHE", str(tmp_path / "cache"))
    base_identity._sha256_once.cache_clear()


class Toy:
    """A toy model in bf16 and fp32, of which some tensors train."""

    def __init__(self, folder: Path, config: ToyConfig, trained: list[str] | None = None, seed: int = 1) -> None:
        self.folder = folder / f"base-{seed}"
        self.folder.mkdir(exist_ok=True)
        (self.folder / "config.json").write_text(json.dumps({"model_type": "toy"}))
        self.tensors = write_toy(self.folder, config, seed, (torch.bfloat16, torch.float32))
        self.adapter = ToyAdapter(config)
        self.names = trained or [spec.name for spec in self.adapter.tensors() if spec.tied_to is None]
        self.base = Manifest(self.folder, self.tensors)
        self.model = self.cut()

    def cut(self) -> StreamedModel:
        space = WorkingSpace(self.folder / "weights in training")
        return cut_model(self.adapter, self.tensors, 1500, self.names, space)

    def open(self, codecs: StateCodecs = FP32) -> tuple[TensorStore, Training, WeightFiles]:
        sizes = self.model.sizes(self.model.smallest_bytes, None, True)
        store = TensorStore(self.model, CpuDevice(), sizes, states=StatePlan(self.folder, 0, 0, codecs=codecs))
        training = Training(self.adapter, self.names, AdamWOptions(), 0.1, TorchAdamW())
        training.opened(store)
        store.set_weights(weight_values(self.model, None))
        return store, training, WeightFiles(training, store, self.base, "toy")

    def weights(self, store: TensorStore) -> dict[str, Tensor]:
        return {
            name: torch.cat([store.updates.weights_of(part).clone() for part in self.model.parts(name)])
            for name in self.names
        }


def move(store: TensorStore, training: Training, step: int) -> None:
    """A step whose gradients are random, so that many numbers move by more than they are."""
    training.begin_step(step)
    generator = torch.Generator().manual_seed(step)
    for each in store.model.trained:
        for part in each.parts:
            with store.gradients.borrow(part) as gradient:
                gradient.copy_(torch.randn(part.shape, generator=generator))
    for layer in (*range(store.model.layout.granules[-1].layer or 8), None):
        store.gradients.complete(layer)
    training.finish_step(None, None, 1.0)
    store.updates.flush()


def save(files: WeightFiles, folder: Path, step: int) -> dict[str, Any]:
    folder.mkdir()
    files.write_weights(folder)
    write_safetensors(folder / "optimizer.safetensors", files.states(step))
    return dict(read_header(folder / "optimizer.safetensors").tensors)


def state(step: int) -> TrainerState:
    return TrainerState(step, 9, 0, 0, 0, 0.1, "constant", 0, "AdamW")


@pytest.fixture(params=[TIED, UNTIED], ids=["tied", "untied"])
def toy(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Toy]:
    yield Toy(tmp_path, request.param)


@pytest.mark.parametrize("codecs", [FP32, StateCodecs(Halves("exp_avg"), Halves("exp_avg_sq"), Halves("grads"))])
def test_what_is_read_is_what_was_written_and_goes_on_alike(codecs: StateCodecs, toy: Toy, tmp_path: Path) -> None:
    store, training, files = toy.open(codecs)
    for step in range(3):
        move(store, training, step)
    infos = save(files, tmp_path / "one", 3)
    assert any(name.endswith(".exact") for name in infos)
    other, again, other_files = toy.open(codecs)
    other_files.read(tmp_path / "one", infos, state(3))
    assert again.updates_made == 3
    save(other_files, tmp_path / "two", 3)
    for step in (3, 4):
        move(store, training, step)
        move(other, again, step)
    for name, values in toy.weights(store).items():
        assert torch.equal(values, toy.weights(other)[name]), name
    save(files, tmp_path / "three", 5)
    save(other_files, tmp_path / "four", 5)
    for one, two in (("one", "two"), ("three", "four")):
        for file in ("delta.safetensors", "optimizer.safetensors"):
            assert (tmp_path / one / file).read_bytes() == (tmp_path / two / file).read_bytes(), (one, file)
    store.close()
    other.close()


def test_the_delta_is_the_difference_and_exact_numbers_are_what_it_misses(toy: Toy, tmp_path: Path) -> None:
    store, training, files = toy.open()
    for step in range(3):
        move(store, training, step)
    now = toy.weights(store)
    infos = save(files, tmp_path / "one", 3)
    states = load_file(tmp_path / "one" / "optimizer.safetensors")
    for name, delta in load_file(tmp_path / "one" / "delta.safetensors").items():
        start = read_tensor(toy.tensors[name]).float()
        assert torch.equal(delta, now[name].view_as(start) - start)
        wrong = ((start + delta).flatten() != now[name]).nonzero().flatten()
        assert torch.equal(states.get(f"{name}.exact_at", torch.tensor([], dtype=torch.int64)), wrong)
        if len(wrong):
            assert torch.equal(states[f"{name}.exact"], now[name][wrong])
        assert states[f"{name}.exp_avg"].shape == delta.shape and states[f"{name}.exp_avg_sq"].min() >= 0
    store.close()
    # the same, to compute with and not to train
    file = fixed_weights(toy.model, toy.folder, weight_values(toy.model, read_delta(tmp_path / "one"), infos))
    fixed = TensorStore(toy.model, CpuDevice(), toy.model.sizes(None, None, True), fixed=file)
    for each in toy.model.trained:
        memory = map_ram(each.granule.nbytes)
        file.read(each.file_offset, memoryview(memory.numpy())[: each.granule.nbytes])
        for part in each.parts:
            first, count = part.start * math.prod(part.shape[1:]), math.prod(part.shape)
            found = numbers_of(part, memory[: each.granule.nbytes].view(torch.float32))
            assert torch.equal(found, now[toy.model.canonical(part.tensor)][first : first + count])
    fixed.close()


def test_another_base_and_other_tensors_are_refused(tmp_path: Path) -> None:
    toy = Toy(tmp_path, UNTIED)
    store, training, files = toy.open()
    move(store, training, 0)
    infos = save(files, tmp_path / "one", 1)
    store.close()
    other = Toy(tmp_path, UNTIED, seed=2)
    store, _, files = other.open()
    with pytest.raises(CheckpointError, match=r"made from toy, and .* is another base: toy-0.safetensors: sha256"):
        files.read(tmp_path / "one", infos, state(1))
    store.close()
    some = Toy(tmp_path, UNTIED, toy.names[:3])
    store, _, files = some.open()
    with pytest.raises(CheckpointError, match=rf"{len(toy.names)} tensors trained in it, 3 are to train now"):
        files.read(tmp_path / "one", infos, state(1))
    store.close()
    store, _, files = toy.open(StateCodecs(Halves("exp_avg"), Halves("exp_avg_sq")))
    with pytest.raises(CheckpointError, match=r"no optimizer state 0.states.* opt_state_bits of the run that wrote it"):
        files.read(tmp_path / "one", infos, state(1))
    store.close()
