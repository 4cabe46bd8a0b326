"""train_step as a library user meets it: rows, masks, logits, and whose learning rate counts."""

from __future__ import annotations

import pytest
import torch

from lema_core.errors import DataError

CLOSE = 1e-5


def token_ids(rows: int = 5, length: int = 10, seed: int = 7) -> torch.Tensor:
    return torch.randint(0, 128, (rows, length), generator=torch.Generator().manual_seed(seed))


def uneven() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    ids = token_ids()
    mask = (torch.arange(10) < torch.tensor([[10], [3], [7], [10], [2]])).long()
    return ids, ids.masked_fill(mask == 0, -100), mask


def test_more_rows_than_batch_size_become_micro_batches(llamas, oracle, monkeypatch) -> None:
    ids, labels, mask = uneven()
    found = {}
    for batch_size in (5, 2, 1):
        model = llamas.with_lora(llamas.folder("untied"), max_grad_norm=None, batch_size=batch_size)
        counts = []
        compute = model.runner.train_step
        monkeypatch.setattr(
            model.runner,
            "train_step",
            lambda batches, *rest, compute=compute, counts=counts: (
                counts.append([batch.input_ids.shape[0] for batch in batches]) or compute(batches, *rest)
            ),
        )
        found[batch_size] = oracle.step(model, ids, labels, mask)
        assert counts == [{5: [5], 2: [2, 2, 1], 1: [1] * 5}[batch_size]]
    for batch_size in (2, 1):
        assert found[batch_size][0] == pytest.approx(found[5][0], rel=1e-6)
        assert max(oracle.errors(found[batch_size][1], found[5][1]).values()) <= CLOSE


def test_logits_are_of_before_the_update_and_asking_changes_nothing(llamas, oracle, tmp_path) -> None:
    ids, labels, mask = uneven()
    folder = llamas.folder("untied")
    losses = {}
    for ask in (True, False):
        model = llamas.with_lora(folder, learning_rate=1e-2, batch_size=2)
        lora = model.save_pretrained(tmp_path / f"lora_{ask}")
        trainer = model.get_trainer()
        losses[ask] = []
        for step in range(2):
            logits, loss = trainer.train_step(ids, labels, mask, return_logits=ask)
            losses[ask].append(loss)
            assert (logits is not None) == ask
            if ask and step == 0:
                expected = oracle.peft_step(llamas.peft(folder, lora), ids, labels, mask)
                assert logits.shape == (5, 10, 128) and logits.dtype == torch.float32 and not logits.requires_grad
                assert oracle.relative(logits[mask.bool()], expected[2][mask.bool()]) <= CLOSE
                assert loss == pytest.approx(expected[0], rel=CLOSE)
    assert losses[True] == losses[False] and losses[True][1] < losses[True][0]


def test_labels_default_to_the_ids_and_one_row_needs_no_rows_dimension(llamas, oracle) -> None:
    model = llamas.with_lora(llamas.folder("untied"), max_grad_norm=None)
    ids = token_ids(1)
    assert oracle.step(model, ids)[0] == oracle.step(model, ids, ids)[0] == oracle.step(model, ids[0], ids[0])[0]


@pytest.mark.parametrize("what", ["labels", "attention_mask"])
def test_other_shapes_are_refused(what, llamas) -> None:
    model = llamas.with_lora(llamas.folder("untied"))
    for wrong in (torch.ones(10, 5), torch.ones(5, 9), torch.ones(50)):
        with pytest.raises(DataError, match=rf"{what}: the shape of input_ids, \[5, 10\], expected"):
            model.get_trainer().train_step(token_ids(), **{what: wrong.long()})


def test_padding_is_not_supervised_even_without_labels(llamas, oracle) -> None:
    ids, labels, mask = uneven()
    model = llamas.with_lora(llamas.folder("untied"), max_grad_norm=None, batch_size=5)
    assert oracle.step(model, ids, None, mask)[0] == oracle.step(model, ids, labels, mask)[0]


def train(model, optimizer, steps: int = 4) -> list[float]:
    trainer = model.get_trainer(optimizer)
    rates = []
    for step in range(steps):
        trainer.train_step(token_ids(2, seed=step), return_logits=False)
        rates.append(trainer.metrics["lr"])
    return rates


def test_a_callers_optimizer_keeps_its_own_rate(llamas, oracle, tmp_path) -> None:
    """And trains as it does with PEFT: the config's learning_rate and weight_decay do not touch it."""
    folder = llamas.folder("untied")
    model = llamas.with_lora(folder, learning_rate=0.5, weight_decay=0.3, batch_size=2)
    peft_model = llamas.peft(folder, model.save_pretrained(tmp_path / "lora"))
    optimizer = torch.optim.AdamW(model.get_trainable_parameters(), lr=3e-3, weight_decay=0.1)
    assert train(model, optimizer) == [3e-3] * 4

    parameters = [p for p in peft_model.parameters() if p.requires_grad]
    reference = torch.optim.AdamW(parameters, lr=3e-3, weight_decay=0.1)
    for step in range(4):
        oracle.peft_step(peft_model, token_ids(2, seed=step))
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        reference.step()
    trained = {oracle.lema_name(n): p for n, p in peft_model.named_parameters() if p.requires_grad}
    assert max(oracle.errors(model.lora.parameters(), trained).values()) <= 1e-4


def test_a_callers_own_schedule_counts(llamas) -> None:
    model = llamas.with_lora(llamas.folder("untied"), learning_rate=0.5, batch_size=2)
    optimizer = torch.optim.AdamW(model.get_trainable_parameters(), lr=1e-3)
    trainer = model.get_trainer(optimizer)
    rates = []
    for step in range(3):
        optimizer.param_groups[0]["lr"] = 1e-3 / (step + 1)
        trainer.train_step(token_ids(2), return_logits=False)
        rates.append(trainer.metrics["lr"])
    assert rates == [1e-3, 1e-3 / 2, 1e-3 / 3]


def test_lr_schedule_drives_a_callers_optimizer_too(llamas) -> None:
    options = {"learning_rate": 4e-3, "lr_schedule": "linear", "warmup_steps": 2, "max_steps": 4, "batch_size": 2}
    model = llamas.with_lora(llamas.folder("untied"), **options)
    optimizer = torch.optim.AdamW(model.get_trainable_parameters(), lr=0.7)
    assert train(model, optimizer) == pytest.approx([0.0, 2e-3, 4e-3, 2e-3])


@pytest.mark.parametrize("kind", ["SGD", "Adagrad", "RMSprop"])
def test_other_optimizers_of_torch(kind, llamas, oracle, tmp_path) -> None:
    folder = llamas.folder("untied")
    model = llamas.with_lora(folder, max_grad_norm=None, batch_size=2)
    peft_model = llamas.peft(folder, model.save_pretrained(tmp_path / "lora"))
    train(model, getattr(torch.optim, kind)(model.get_trainable_parameters(), lr=1e-3), steps=2)
    reference = getattr(torch.optim, kind)([p for p in peft_model.parameters() if p.requires_grad], lr=1e-3)
    for step in range(2):
        oracle.peft_step(peft_model, token_ids(2, seed=step))
        reference.step()
    trained = {oracle.lema_name(n): p for n, p in peft_model.named_parameters() if p.requires_grad}
    assert max(oracle.errors(model.lora.parameters(), trained).values()) <= 1e-4
