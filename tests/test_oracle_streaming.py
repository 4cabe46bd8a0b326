"""The oracle: a streamed run equals the resident run bit for bit, whatever the budgets and the device."""

from __future__ import annotations

import hashlib
from collections.abc import Callable

import pytest
import torch

from lema_core.testing.simulated import SimulatedAccelerator


def fingerprint(model, oracle, folder) -> dict[str, str]:
    """sha256 of everything that a run computes: losses, gradients, saved weights, logits, generated ids."""
    generator = torch.Generator().manual_seed(5)
    digests = {}

    def take(name: str, *tensors: torch.Tensor) -> None:
        digests[name] = hashlib.sha256(b"".join(t.contiguous().numpy().tobytes() for t in tensors)).hexdigest()

    trainer = model.get_trainer()
    for step in range(2):
        ids = torch.randint(0, 128, (3, 14), generator=generator)
        mask = (torch.arange(14) < torch.tensor([[14], [6], [9]])).long()
        gradients: list[torch.Tensor] = []
        hooks = [
            parameter.register_post_accumulate_grad_hook(lambda p, kept=gradients: kept.append(p.grad.clone()))
            for parameter in model.get_trainable_parameters()
        ]
        logits, loss = trainer.train_step(ids, ids.masked_fill(mask == 0, -100), mask)
        for hook in hooks:
            hook.remove()
        assert gradients
        take(f"loss {step}", torch.tensor(loss, dtype=torch.float64))
        take(f"logits {step}", logits)
        take(f"gradients {step}", *gradients)
    saved = model.save_pretrained(folder)
    digests["file"] = hashlib.sha256((saved / "adapter_model.safetensors").read_bytes()).hexdigest()
    new_ids = model.generate_ids([[1, 2, 3], [4, 5, 6, 7, 8]], 3)
    take("generated", torch.tensor(new_ids))
    return digests


def folder_of(llamas, variant: str):
    return llamas.folder(variant, num_hidden_layers=2)


def options(**more) -> dict:
    return {
        "batch_size": 2,
        "learning_rate": 1e-2,
        "lora_dropout": 0.1,
        "max_grad_norm": 1.0,
        "lr_schedule": "cosine",
        "max_steps": 3,
        **more,
    }


@pytest.fixture
def resident(llamas, oracle, tmp_path) -> Callable[..., dict[str, str]]:
    def run(variant: str, **more) -> dict[str, str]:
        model = llamas.with_lora(folder_of(llamas, variant), **options(strategy="resident", **more))
        return fingerprint(model, oracle, tmp_path / "resident")

    return run


def budgets(cut) -> list[int]:
    """From the smallest legal to everything, in bytes."""
    slots = len(cut.layout.granules)
    some = sorted({2, 3, slots // 2, slots - 1})
    return [cut.smallest_bytes, *(cut.smallest_bytes + (n - 1) * cut.layout.slot_bytes for n in some), cut.total_bytes]


@pytest.mark.parametrize(("variant", "recompute"), [("untied", True), ("tied", False), ("bf16", True)])
def test_any_window_on_the_cpu(variant, recompute, llamas, oracle, resident, tmp_path, small_granules) -> None:
    expected = resident(variant, gradient_checkpointing=recompute)
    folder = folder_of(llamas, variant)
    cut = llamas.cut(llamas.open(folder), small_granules)
    windows = set()
    for number, budget in enumerate(budgets(cut)):
        given = options(weights_ram=f"{budget}B", gradient_checkpointing=recompute)
        model = llamas.with_lora(folder, **given)
        assert fingerprint(model, oracle, tmp_path / f"streamed{number}") == expected, budget
        windows.add(model.runner.store.sizes.ram_slots)
        model.close()
    assert 1 in windows and len(cut.layout.granules) in windows


@pytest.mark.parametrize(
    ("variant", "ram", "vram"),
    [
        ("untied", "smallest", "smallest"),
        ("tied", "some", "smallest"),
        ("biased", "smallest", "some"),
        ("bf16", "some", "some"),
        ("untied", "all", "some"),
        ("untied", "smallest", "all"),
    ],
)
def test_any_windows_on_an_accelerator(variant, ram, vram, llamas, oracle, resident, tmp_path, small_granules) -> None:
    expected = resident(variant)
    folder = folder_of(llamas, variant)
    cut = llamas.cut(llamas.open(folder), small_granules)
    some = cut.smallest_bytes + 5 * cut.layout.slot_bytes
    sizes = {"smallest": cut.smallest_bytes, "some": some, "all": cut.total_bytes}
    device = SimulatedAccelerator(latency_s=2e-4, compute_lag_s=3e-4)
    given = options(weights_ram=f"{sizes[ram]}B", weights_vram=f"{sizes[vram]}B")
    model = llamas.with_lora(folder, device, **given)
    assert fingerprint(model, oracle, tmp_path / "streamed") == expected
    assert device.copies > 0 and device.overwrites_while_read == 0


def test_a_layer_as_one_granule(llamas, oracle, resident, tmp_path) -> None:
    """Without small_granules: three granules, one per layer and one for norm and head."""
    expected = resident("sharded")
    folder = folder_of(llamas, "sharded")
    cut = llamas.cut(llamas.open(folder))
    for number, budget in enumerate((cut.smallest_bytes, cut.total_bytes)):
        model = llamas.with_lora(folder, **options(weights_ram=f"{budget}B"))
        assert fingerprint(model, oracle, tmp_path / f"streamed{number}") == expected
        model.close()
