"""Runs on quantized checkpoints: the numbers that they decode to, the same bits in any window, the bytes planned."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lema import LemaConfig, LemaModel
from lema_core.checkpoint import read_manifest
from lema_core.errors import CheckpointError
from lema_core.testing.comparing import assert_all_close, assert_equal
from lema_core.testing.quantizing import quantize_folder

IDS = torch.arange(26).view(2, 13) * 7 % 128
BACKENDS = ("python", "cpp")
QUICK = ("int8", "int4-32", "nf4")
slow = pytest.mark.slow


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Path]]:
    """``folder(llamas, form)``: a Llama quantized in ``form``; ``plain=True``: in fp32 with the numbers of that."""
    made: dict[str, Path] = {}
    root = tmp_path_factory.mktemp("quantized")

    def get(llamas: Any, form: str, **how: Any) -> Path:
        key = f"{form} {sorted(how)}"
        if key not in made:
            source = llamas.folder("untied", num_hidden_layers=2, intermediate_size=128)
            made[key] = quantize_folder(source, root / key, form, **how)
        return made[key]

    yield get


def computed(model: LemaModel, oracle: Any) -> dict[str, Tensor]:
    loss, gradients, logits = oracle.step(model, IDS, IDS, logits=True)
    ids = model.generate_ids([[5, 6, 7], [1, 2]], 4)
    return {"loss": torch.tensor(loss), "logits": logits, "ids": torch.tensor(ids), **gradients}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("form", [*QUICK, pytest.param("int4-64", marks=slow), pytest.param("int4-128", marks=slow)])
def test_streamed_resident_and_peft(llamas, oracle, folder, small_granules, form: str, backend: str) -> None:
    """Gradients of LoRA, logits and ids: equal to the resident run's, and to PEFT's on what the weights decode to."""
    how = {"backend": backend, "max_grad_norm": None}
    path = folder(llamas, form)
    resident = computed(llamas.with_lora(path, strategy="resident", **how), oracle)
    model = llamas.with_lora(path, strategy="streaming", weights_ram="150KB", **how)
    streamed = computed(model, oracle)
    assert_equal("streamed", streamed, resident)
    assert model.run_plan.sizes.ram_slots < len(llamas.cut(model, small_granules).layout.granules)
    model.save_pretrained(lora := path.parent / f"lora {form} {backend}")
    peft = llamas.peft(folder(llamas, form, plain=True), lora)
    loss, gradients, logits = oracle.peft_step(peft, IDS, IDS)
    expected = {"loss": torch.tensor(loss), "logits": logits, **gradients}
    del streamed["ids"]
    assert_all_close("PEFT on the decoded numbers", streamed, expected, 2e-5)


@pytest.mark.parametrize("backend", BACKENDS)
def test_what_is_read_is_what_was_predicted(llamas, folder, small_granules, backend: str) -> None:
    """Of a step like others before it, to the byte; and no more is held than there are slots."""
    how = {"backend": backend, "weights_ram": "150KB", "strategy": "streaming", "batch_size": 2, "max_seq_length": 13}
    model = llamas.with_lora(folder(llamas, "int4-32"), **how)
    trainer = model.get_trainer()
    for _ in range(3):
        trainer.train_step(IDS, IDS, return_logits=False)
    stats, expected = model.stats()["weights"], model.run_plan.prediction.read_bytes
    assert stats.read_bytes - stats.demand_bytes == expected > 0
    assert stats.ram_peak_bytes <= stats.ram_window_bytes <= 150_000


def test_the_bytes_that_move_are_those_of_the_format(llamas, folder) -> None:
    """A step of a model that streams whole reads payload and scales and less than one sector a piece beside."""
    stored = {}
    for form in ("int8", "int4-32"):
        path = folder(llamas, form)
        model = llamas.with_lora(path, weights_ram="900KB")
        layout = llamas.cut(model).layout
        tensors = read_manifest(path).tensors
        wanted = sum(info.nbytes for name, info in tensors.items() if "embed" not in name)
        pieces = sum(len(part.stored) for parts in layout.parts.values() for part in parts)
        moved = sum(granule.nbytes for granule in layout.granules)
        assert wanted <= moved <= wanted + 8192 * pieces
        stored[form] = wanted
    assert stored["int4-32"] < 0.65 * stored["int8"]


def test_a_run_goes_on_from_its_checkpoint(llamas, folder, tmp_path: Path) -> None:
    path = folder(llamas, "nf4")
    how = {"output_dir": str(tmp_path / "out"), "learning_rate": 1e-2, "lora_dropout": 0.1}

    def train(model: LemaModel, steps: range, resume: Path | None = None) -> tuple[list[float], Path]:
        trainer = model.get_trainer()
        if resume is not None:
            trainer.load_checkpoint(resume)
        losses = [trainer.train_step(IDS.roll(step), IDS.roll(step), return_logits=False)[1] for step in steps]
        saved = trainer.save_checkpoint(tmp_path / f"checkpoint-{trainer.step}")
        return losses, saved

    straight, _ = train(llamas.with_lora(path, **how), range(4))
    first, saved = train(llamas.with_lora(path, **how), range(2))
    rest, _ = train(LemaModel.from_pretrained(saved, device="cpu", weights_ram="300KB"), range(2, 4), saved)
    assert [*first, *rest] == straight and len(set(straight)) == 4
    named = json.loads((saved / "adapter_config.json").read_text())["base_model_name_or_path"]
    assert named == str(path)


def test_weights_train_where_the_files_hold_them_whole(llamas, folder, tmp_path: Path) -> None:
    """Quantized layers below, one that was left out above; and a quantized one is refused by name."""
    path = folder(llamas, "int4-32", takes=_not_the_last_layer)
    how = {
        "training_mode": "selective_full", "trainable_modules": ["mlp"], "output_dir": str(tmp_path / "out"),
        "learning_rate": 1e-3, "device": "cpu",
    }  # fmt: skip

    def opened(source: Path, layers: str, **more: Any) -> LemaModel:
        return LemaModel(LemaConfig(model_name_or_path=str(source), trainable_layers=[layers], **how, **more))

    def losses(source: Path, **more: Any) -> list[float]:
        with opened(source, "last:1", **more) as model:
            model.initialize_training()
            trainer = model.get_trainer()
            return [trainer.train_step(IDS, IDS, return_logits=False)[1] for _ in range(3)]

    found = losses(path, weights_ram="900KB")
    assert found == losses(path)
    assert found == pytest.approx(losses(folder(llamas, "int4-32", takes=_not_the_last_layer, plain=True)), rel=1e-5)
    assert found[2] < found[0]
    with pytest.raises(CheckpointError, match=r"layers.0.mlp.\w+.weight' is to train.*int4-32.*LoRA"):
        opened(path, "0").initialize_training()


def _not_the_last_layer(name: str) -> bool:
    return "layers.1." not in name


def test_a_plan_measures_products_of_the_format(llamas, folder, tmp_path: Path) -> None:
    """Its products are measured in the format that weights have."""
    config = LemaConfig(model_name_or_path=str(folder(llamas, "int8")), device="cpu", output_dir=str(tmp_path))
    with LemaModel(config) as model:
        model.initialize_lora()
        run = model.plan()
        assert run.prediction.step_s > 0
        flight = model.flight_check()
        assert flight.hardware.compute_dtype == "float32"
        assert flight.file is None or "int8 of torch.float32" in flight.file.read_text()
