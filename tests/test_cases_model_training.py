"""Cases about optimizer steps of a Llama, each named after its id: accumulation, masked labels, non-finite values."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from lema import LemaModel
from lema_core.errors import NonFiniteError
from lema_core.runtime.batch import TokenBatch
from lema_train.data.batching import BatchLoader, BatchPlan
from lema_train.data.rows import Dataset, Report, Sample
from lema_train.loop import LoopEvents, LoopOptions, run_training

IGNORED = -100


def token_ids(rows: int = 2, length: int = 8, seed: int = 7) -> torch.Tensor:
    return torch.randint(2, 128, (rows, length), generator=torch.Generator().manual_seed(seed))


@pytest.fixture
def known_losses(llamas, tmp_path) -> Path:
    """A Llama whose loss is 4 after token 2 when token 10 follows, and 1 after token 3 when token 11 follows.

    Blocks add nothing, so logits follow from the last token: the head's row of a target t scores c on its token, zero
    elsewhere, and -log(e^c / (127 + e^c)) is the loss.
    """
    folder = llamas.copy(tmp_path / "known", num_hidden_layers=1)
    file = folder / "model.safetensors"
    tensors = load_file(file)
    for name, tensor in tensors.items():
        tensor.fill_(1.0 if name.endswith("norm.weight") else 0.0)
    for axis, (token, target, loss) in enumerate([(2, 10, 4.0), (3, 11, 1.0)]):
        tensors["model.embed_tokens.weight"][token, axis] = 1000.0
        score = math.log(127 / math.expm1(loss))
        # RMSNorm makes 8 of a lone element among 64
        tensors["lm_head.weight"][target, axis] = score / 8
    save_file(tensors, file, metadata={"format": "pt"})
    return folder


@pytest.mark.parametrize("batch_size", [1, 2])
def test_b23_reported_loss_is_per_token(batch_size, known_losses, llamas) -> None:
    """1 supervised token with NLL 4 and 7 with NLL 1 each: 11 / 8 = 1.375, not (4 + 1) / 2, however it is cut."""
    ids = torch.tensor([[2, 10] + [0] * 13, [3, 11] * 7 + [0]])
    labels = torch.full_like(ids, IGNORED)
    labels[0, 1] = 10
    labels[1, 1:14:2] = 11
    model = llamas.open(known_losses, batch_size=batch_size)
    model.initialize_lora()
    assert model.get_trainer().train_step(ids, labels, return_logits=False)[1] == pytest.approx(1.375, abs=1e-5)


def test_b23_accumulated_gradients_are_those_of_one_padded_batch(llamas, oracle) -> None:
    """1 and 7 supervised tokens: two micro-batches against one padded batch of two, gradients within 1e-6."""
    ids = token_ids()
    labels = ids.clone()
    labels[0, 2:] = IGNORED
    one, two = (
        oracle.step(llamas.with_lora(llamas.folder("untied"), max_grad_norm=None, batch_size=size), ids, labels)
        for size in (2, 1)
    )
    assert one[0] == pytest.approx(two[0], abs=1e-6)
    assert all((one[1][name] - two[1][name]).abs().max() <= 1e-6 for name in one[1])


def test_b23_the_last_partial_group_is_applied(llamas, oracle, tmp_path) -> None:
    """5 micro-batches, accumulation 2: 3 steps, the last one normalised by its own tokens."""
    rows = [token_ids(1, length, seed=length)[0].tolist() for length in (4, 9, 5, 7, 6)]
    data = Dataset([Sample(row, row, line) for line, row in enumerate(rows, 1)], Report(tmp_path / "rows"))
    plan = BatchPlan(data.lengths, batch_size=1, gradient_accumulation_steps=2, shuffle=False)
    model = llamas.with_lora(llamas.folder("untied"), learning_rate=1e-2, max_grad_norm=None)
    trainer, metrics = model.get_trainer(), []
    before: list[dict[str, torch.Tensor]] = []

    def finished(step: dict) -> None:
        metrics.append(step)
        before.append({name: p.detach().clone() for name, p in model.lora.parameters().items()})

    options = LoopOptions(tmp_path / "out", plan.steps_per_epoch)
    run_training(trainer, BatchLoader(data, plan, fill_id=0), options, LoopEvents(step=finished))
    assert plan.steps_per_epoch == 3 == len(metrics)
    assert [step["tokens"] for step in metrics] == [13, 12, 6]
    # the last step alone, from where the second one ended
    alone = llamas.open(llamas.folder("untied"), max_grad_norm=None)
    alone.initialize_lora()
    alone.lora.copy_(before[1])
    assert metrics[2]["loss"] == pytest.approx(oracle.step(alone, torch.tensor([rows[4]]))[0], rel=1e-6)
    assert any(not torch.equal(before[1][name], before[2][name]) for name in before[1])


@pytest.fixture
def trained(llamas) -> Callable[..., tuple[LemaModel, object, list[str]]]:
    """A model that has made two steps, with its trainer and what the trainer says."""

    def build(**options) -> tuple[LemaModel, object, list[str]]:
        said: list[str] = []
        model = llamas.with_lora(llamas.folder("untied"), learning_rate=1e-2, **options)
        trainer = model.get_trainer(say=said.append)
        for step in range(2):
            trainer.train_step(token_ids(seed=step), return_logits=False)
        return model, trainer, said

    return build


def snapshot(model: LemaModel, trainer) -> dict[str, torch.Tensor]:
    """Copies of all weights and of the whole optimizer state."""
    values = {name: p.detach().clone() for name, p in model.lora.parameters().items()}
    for index, state in trainer.training.optimizer.state_dict()["state"].items():
        values |= {f"{index}.{key}": value.clone() for key, value in state.items()}
    return values


def assert_unchanged(model: LemaModel, trainer, before: dict[str, torch.Tensor]) -> None:
    after = snapshot(model, trainer)
    assert before.keys() == after.keys() and len(before) == 56 * 4
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert all(p.grad is None for p in model.get_trainable_parameters())


@pytest.mark.parametrize("optimizer", ["own", "torch"])
@pytest.mark.parametrize("labels", ["none", "first_only"])
def test_b24_a_step_without_supervised_tokens_changes_nothing(labels, optimizer, trained, llamas) -> None:
    """All labels -100, or only position 0's, which nothing predicts: weights and states stay, and it is said."""
    model, trainer, said = trained()
    if optimizer == "torch":
        trainer = model.get_trainer(torch.optim.AdamW(model.get_trainable_parameters(), 1e-2), say=said.append)
        trainer.train_step(token_ids(), return_logits=False)
    before = snapshot(model, trainer)
    ids = token_ids(3)
    masked = torch.full_like(ids, IGNORED)
    if labels == "first_only":
        masked[:, 0] = ids[:, 0]
    _, loss = trainer.train_step(ids, masked, return_logits=False)
    assert math.isnan(loss)
    assert_unchanged(model, trainer, before)
    assert "3 of 3 micro-batches have no supervised token" in said[-1]


def test_b24_a_masked_micro_batch_counts_as_left_out(trained) -> None:
    """One of four micro-batches all masked: the step is that of the other three, and the count is said."""
    ids = token_ids(4, seed=3)
    labels = ids.clone()
    labels[1] = IGNORED
    losses, weights = [], []
    for rows in ([0, 1, 2, 3], [0, 2, 3]):
        model, trainer, said = trained()
        losses.append(trainer.train_step(ids[rows], labels[rows], return_logits=False)[1])
        weights.append(snapshot(model, trainer))
        assert said == (
            ["step 3: 1 of 4 micro-batches have no supervised token; they are left out"] if 1 in rows else []
        )
    assert losses[0] == losses[1]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


def poison(model: LemaModel, name: str, value: float = math.nan) -> Callable[[], None]:
    """One element of this parameter's gradient becomes ``value`` from now on; returns what stops it."""

    runner, parameter = model.runner, model.lora.parameters()[name]
    compute = runner.train_step

    def spoilt(*arguments: Any) -> float:
        loss = compute(*arguments)
        parameter.grad.view(-1)[3] = value
        return loss

    runner.train_step = spoilt
    return lambda: delattr(runner, "train_step")


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("max_grad_norm", [1.0, None])
def test_b25_nan_in_the_layer_that_backward_reaches_last(value, max_grad_norm, trained) -> None:
    """NaN in layer 0's gradient only: no weight or moment of any layer changes, the log names tensor and step."""
    model, trainer, said = trained(max_grad_norm=max_grad_norm)
    before = snapshot(model, trainer)
    name = "model.layers.0.self_attn.v_proj.lora_A"
    stop = poison(model, name, value)
    _, loss = trainer.train_step(token_ids(seed=5), return_logits=False)
    assert math.isfinite(loss) and trainer.skipped_steps == 1
    assert_unchanged(model, trainer, before)
    assert said == [f"step 3: {name} is not finite; the step is skipped, no weight was changed"]
    stop()
    trainer.train_step(token_ids(seed=5), return_logits=False)
    assert any(not torch.equal(value, before[key]) for key, value in snapshot(model, trainer).items())


def test_b25_infinite_loss(trained) -> None:
    """LoRA weights that overflow: the loss is not finite, and no moment or weight changes."""
    model, trainer, said = trained()
    with torch.no_grad():
        model.lora.parameters()["model.layers.3.mlp.down_proj.lora_B"].fill_(3e38)
    before = snapshot(model, trainer)
    _, loss = trainer.train_step(token_ids(), return_logits=False)
    assert not math.isfinite(loss)
    assert_unchanged(model, trainer, before)
    assert said == ["step 3: the loss is not finite; the step is skipped, no weight was changed"]


def test_b25_five_in_a_row_end_the_run_and_checkpoints_are_finite(trained, llamas, tmp_path) -> None:
    """Five steps in a row: NonFiniteError; a finite step in between starts the count anew; nothing saved is NaN."""
    model, trainer, _ = trained(max_nonfinite_steps=5)
    name = "model.layers.0.mlp.up_proj.lora_B"
    stop = poison(model, name)
    for _ in range(4):
        trainer.train_step(token_ids(), return_logits=False)
    stop()
    trainer.train_step(token_ids(), return_logits=False)
    before = snapshot(model, trainer)
    poison(model, name)
    with pytest.raises(NonFiniteError, match=r"5 steps in a row were not finite \(step 12 is the last\)"):
        for _ in range(9):
            trainer.train_step(token_ids(), return_logits=False)
    assert trainer.step == 12 and trainer.skipped_steps == 9
    assert_unchanged(model, trainer, before)
    saved = trainer.save_checkpoint(tmp_path / "checkpoint-12")
    for file in saved.glob("*.safetensors"):
        assert all(tensor.isfinite().all() for tensor in load_file(file).values()), file
    resumed = llamas.open(model.folder, learning_rate=1e-2)
    resumed.initialize_lora()
    assert resumed.get_trainer().load_checkpoint(saved).skipped_steps == 9


def test_b25_evaluation_is_possible_after_a_skipped_step(trained) -> None:
    """The store is whole after a skipped step: logits and loss of the same model as before."""
    model, trainer, _ = trained()
    batch = TokenBatch.of(token_ids(), None, token_ids())
    logits, loss = model.logits(token_ids()), model.runner.loss(batch)
    poison(model, "model.layers.0.self_attn.q_proj.lora_A")
    trainer.train_step(token_ids(), return_logits=False)
    assert torch.equal(model.logits(token_ids()), logits) and model.runner.loss(batch) == loss
