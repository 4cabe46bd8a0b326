"""Gradients of a model that is computed in fp16 are kept in range by a factor on the loss."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from torch import Tensor

from lema import LemaModel
from lema_core.device import CpuDevice
from lema_train.loss_scale import LossScale


class HalfDevice(CpuDevice):
    """A CPU that computes in fp16, as GPUs without bf16 do."""

    def compute_dtype(self, storage: torch.dtype) -> torch.dtype:
        return torch.float16


def ids(seed: int) -> Tensor:
    return torch.randint(1, 128, (2, 12), generator=torch.Generator().manual_seed(seed))


def trained(model: LemaModel, steps: int = 4) -> tuple[list[float], list[str], object]:
    said: list[str] = []
    trainer = model.get_trainer(say=said.append)
    losses = [trainer.train_step(ids(step), return_logits=False)[1] for step in range(steps)]
    return losses, said, trainer


def test_it_halves_and_grows() -> None:
    scale = LossScale(None, needed=True)
    assert scale.value == 65536 and scale.may_shrink
    scale.after(finite=False)
    assert scale.value == 32768
    for _ in range(2000):
        scale.after(finite=True)
    assert scale.value == 65536 and scale.steps == 0


@pytest.mark.parametrize(
    ("fixed", "needed", "value"), [(None, False, 1.0), (128.0, True, 128.0), (128.0, False, 128.0)]
)
def test_where_it_is_given_or_not_needed_it_stays(fixed: float | None, needed: bool, value: float) -> None:
    scale = LossScale(fixed, needed)
    scale.after(finite=False)
    assert scale.value == value and not scale.may_shrink


def test_fp16_compute_gives_the_steps_of_fp32(llamas) -> None:
    """LoRA weights stay fp32; losses and norms as without the factor, to fp16's rounding."""
    folder = llamas.folder("untied")
    plain = trained(llamas.with_lora(folder, learning_rate=1e-2, backend="python"))
    model = llamas.with_lora(folder, device=HalfDevice(), learning_rate=1e-2, backend="python")
    losses, _, trainer = trained(model)
    assert losses == pytest.approx(plain[0], rel=5e-3)
    assert trainer.metrics["grad_norm"] == pytest.approx(plain[2].metrics["grad_norm"], rel=5e-2)
    assert all(p.dtype == torch.float32 and bool(p.isfinite().all()) for p in model.get_trainable_parameters())


def test_b56_overflow_skips_the_step_and_the_next_is_finite(llamas, tmp_path: Path) -> None:
    """A factor too large for the first step: it is halved until gradients are finite; a resumed run goes on with it."""
    folder = llamas.folder("untied")
    model = llamas.with_lora(folder, device=HalfDevice(), learning_rate=1e-2, backend="python")
    trainer = model.get_trainer(say=(said := []).append)
    trainer._scale.value = 2.0**24
    before = {n: p.detach().clone() for n, p in model.lora.parameters().items()}
    _, loss = trainer.train_step(ids(0), return_logits=False)
    assert math.isfinite(loss) and trainer.skipped_steps == 1
    assert all(torch.equal(p, before[n]) for n, p in model.lora.parameters().items())
    assert "not finite in fp16" in said[0] and "the loss scale is 8.38861e+06 now" in said[0]
    while trainer.skipped_steps == trainer.step:
        trainer.train_step(ids(0), return_logits=False)
    assert any(not torch.equal(p, before[n]) for n, p in model.lora.parameters().items())
    trainer.save_checkpoint(tmp_path / "checkpoint-9")
    again = llamas.with_lora(folder, device=HalfDevice(), backend="python").get_trainer()
    again.load_checkpoint(tmp_path / "checkpoint-9")
    assert again._scale.value == trainer._scale.value < 2.0**24


def test_weights_take_gradients_at_their_own_size(llamas, tmp_path: Path) -> None:
    """A given factor on the loss changes nothing of a training of the model's own weights."""
    norms = []
    for scale in (1.0, 1024.0):
        model = llamas.open(
            llamas.folder("tied"),
            lora_rank=16,
            training_mode="selective_full",
            loss_scale=scale,
            output_dir=str(tmp_path),
        )
        losses, _, trainer = trained_weights(model)
        norms.append((losses, trainer.metrics["grad_norm"]))
    assert norms[0][0] == pytest.approx(norms[1][0], rel=1e-6)
    assert norms[0][1] == pytest.approx(norms[1][1], rel=1e-5)


def trained_weights(model: LemaModel) -> tuple[list[float], list[str], object]:
    model.initialize_training()
    return trained(model)
