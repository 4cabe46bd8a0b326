"""Ten optimizer steps against the same loop written with PEFT and torch.optim.AdamW."""

from __future__ import annotations

import pytest
import torch

STEPS, WARMUP, LR = 10, 3, 5e-3


def step_inputs(step: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Six rows of 3 to 14 tokens, padded on the right; ids, labels, mask."""
    generator = torch.Generator().manual_seed(step)
    lengths = torch.randint(3, 15, (6,), generator=generator)
    ids = torch.randint(0, 128, (6, int(lengths.max())), generator=generator)
    mask = (torch.arange(ids.shape[1]) < lengths[:, None]).long()
    return ids, ids.masked_fill(mask == 0, -100), mask


def peft_losses(
    peft_model, weight_decay: float, lora_plus: bool = False
) -> tuple[list[float], list[float], list[float]]:
    """Losses, learning rates and gradient norms of the plain loop."""
    from transformers import get_cosine_schedule_with_warmup

    parameters = [p for p in peft_model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=LR, weight_decay=weight_decay)
    schedule = get_cosine_schedule_with_warmup(optimizer, WARMUP, STEPS)
    losses, rates, norms = [], [], []
    for step in range(STEPS):
        ids, labels, mask = step_inputs(step)
        n_targets = (labels[:, 1:] != -100).sum()
        total = 0.0
        for start in range(0, 6, 2):
            rows = slice(start, start + 2)
            logits = peft_model(input_ids=ids[rows], attention_mask=mask[rows]).logits[:, :-1]
            loss = (
                torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels[rows, 1:].flatten(), reduction="sum")
                / n_targets
            )
            loss.backward()
            total += loss.item()
        norms.append(float(torch.nn.utils.clip_grad_norm_(parameters, 1.0)))
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        losses.append(total)
    return losses, rates, norms


@pytest.mark.parametrize(("start", "weight_decay"), [("zero_B", 0.0), ("random", 0.1)])
def test_ten_steps_with_accumulation_padding_clipping_and_cosine(start, weight_decay, llamas, oracle, tmp_path) -> None:
    folder = llamas.folder("tied")
    options = {
        "batch_size": 2,
        "learning_rate": LR,
        "lr_schedule": "cosine",
        "warmup_steps": WARMUP,
        "max_steps": STEPS,
        "weight_decay": weight_decay,
        "max_grad_norm": 1.0,
    }
    model = llamas.open(folder, **options)
    model.initialize_lora()
    if start == "random":
        oracle.randomize(model)
    peft_model = llamas.peft(folder, model.save_pretrained(tmp_path / "start"))
    expected, rates, norms = peft_losses(peft_model, weight_decay)

    trainer = model.get_trainer()
    losses, own_rates, own_norms = [], [], []
    for step in range(STEPS):
        ids, labels, mask = step_inputs(step)
        losses.append(trainer.train_step(ids, labels, mask, return_logits=False)[1])
        own_rates.append(trainer.metrics["lr"])
        own_norms.append(trainer.metrics["grad_norm"])

    assert max(norms) > 1.0, "clipping must take part"
    assert expected[-1] != pytest.approx(peft_losses_without_training(llamas, folder, tmp_path), rel=1e-2)
    assert losses == pytest.approx(expected, rel=1e-5)
    assert own_rates == pytest.approx(rates, rel=1e-12)
    assert own_norms == pytest.approx(norms, rel=1e-4)
    trained = {oracle.lema_name(n): p for n, p in peft_model.named_parameters() if p.requires_grad}
    errors = oracle.errors(model.lora.parameters(), trained)
    assert max(errors.values()) <= 1e-4, max(errors, key=errors.get)


def peft_losses_without_training(llamas, folder, tmp_path) -> float:
    """The last step's loss at the start: training must have changed it."""
    peft_model = llamas.peft(folder, tmp_path / "start", trainable=False)
    ids, labels, mask = step_inputs(STEPS - 1)
    with torch.no_grad():
        logits = peft_model(input_ids=ids, attention_mask=mask).logits[:, :-1]
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten()).item()
