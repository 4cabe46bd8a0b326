"""B07 for a model's own weights: 10 steps are 5, a new model and 5, bit for bit, wherever things lie in memory."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import lema.model
from lema import LemaConfig, LemaModel
from lema_core.errors import CheckpointError, ConfigError, TransferError
from lema_core.store.model import cut_model
from lema_core.store.updates import WeightUpdates
from lema_train.checkpoint import read_checkpoint

STEPS = 10
MODES: dict[str, dict[str, Any]] = {
    "whole": {},
    "selective": {"trainable_modules": ["self_attn", "input_layernorm"], "trainable_layers": ["last:2"]},
    "emb and head": {"trainable_layers": ["emb", "head"]},
    "8 bits": {"opt_state_bits": 8, "grad_acc_bits": 8},
}
#: three granules at a time, states on disk, everything recomputed
ELSEWHERE = {"weights_ram": "130KB", "opt_state_ram": "1B", "grad_acc_ram": "1B", "gradient_checkpointing": True}
EXACT = ("step", "loss", "lr", "grad_norm", "tokens")
Steps = list[tuple[Any, ...]]


def rows(step: int) -> torch.Tensor:
    return torch.randint(2, 128, (2, 10), generator=torch.Generator().manual_seed(step))


class Runs:
    """Runs of one model folder, each in a LemaModel of its own."""

    def __init__(self, folder: Path, output: Path) -> None:
        self.folder = folder
        self.output = output

    def open(self, output: str, **options: Any) -> LemaModel:
        values: dict[str, Any] = {
            "training_mode": "selective_full", "batch_size": 1, "learning_rate": 1e-2, "lr_schedule": "cosine",
            "warmup_steps": 3, "weight_decay": 0.1, "max_seq_length": 10, "max_steps": STEPS, "seed": 3,
            "model_name_or_path": str(self.folder), "output_dir": str(self.output / output), "device": "cpu",
            # one way to run a step is quicker planned than the best of many
            "gradient_checkpointing": False,
        }  # fmt: skip
        return LemaModel(LemaConfig(**{**values, **options}))

    def steps(
        self,
        output: str,
        to: int,
        resume: Path | None = None,
        saves: Iterable[int] = (),
        between: Callable[[LemaModel], None] = lambda model: None,
        ids: Callable[[int], torch.Tensor] = rows,
        **options: Any,
    ) -> tuple[Steps, Path]:
        """Figures of the steps up to ``to``, and the checkpoint of the last."""
        figures: Steps = []
        with self.open(output, **options) as model:
            model.initialize_training()
            trainer = model.get_trainer()
            if resume is not None:
                trainer.load_checkpoint(resume)
            while trainer.step < to:
                trainer.train_step(ids(trainer.step), return_logits=False)
                figures.append(tuple(trainer.metrics[key] for key in EXACT))
                if trainer.step in saves:
                    trainer.save_checkpoint(self.output / output / f"checkpoint-{trainer.step}")
                between(model)
            return figures, trainer.save_checkpoint(self.output / output / f"checkpoint-{to}")

    def only_computed(self, checkpoint: Path) -> torch.Tensor:
        """Logits of the weights of a checkpoint, without room for training them."""
        config = LemaConfig(
            model_name_or_path=str(self.folder),
            output_dir=str(self.output / "looked"),
            device="cpu",
            weights_ram="150KB",
        )
        with LemaModel(config) as model:
            model.load_delta(checkpoint, trains=False)
            logits = model.logits(rows(50))
            assert model.stats().keys() == {"weights", "activations"}
        assert not (self.output / "looked").exists()
        return logits


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiny models are cut into dozens of granules, as big ones are."""
    monkeypatch.setattr(
        lema.model, "cut_model", lambda *given, **more: cut_model(*given, max_granule_bytes=24_000, **more)
    )


@pytest.fixture
def runs(llamas: Any, tmp_path: Path, small_pieces: None) -> Callable[..., Runs]:
    return lambda variant="tied", **changes: Runs(llamas.folder(variant, **changes), tmp_path)


def assert_same_files(one: Path, other: Path) -> None:
    for name in ("delta.safetensors", "optimizer.safetensors"):
        assert (one / name).read_bytes() == (other / name).read_bytes(), name


@pytest.mark.parametrize(
    "mode", ["whole", "8 bits", *(pytest.param(mode, marks=pytest.mark.slow) for mode in ("selective", "emb and head"))]
)
def test_b07_ten_steps_are_five_a_new_model_and_five(mode: str, runs: Callable[..., Runs]) -> None:
    """bf16 weights that move by more than they are; where things lie in memory is another after the resume."""
    made = runs("bf16", tie_word_embeddings=mode == "whole")
    straight, end = made.steps("straight", STEPS, **MODES[mode])
    first, middle = made.steps("broken", 5, **MODES[mode])
    second, other_end = made.steps("broken", STEPS, resume=middle, **MODES[mode], **ELSEWHERE)
    assert first + second == straight
    assert_same_files(end, other_end)
    states = read_checkpoint(middle)[1]
    if mode != "8 bits":
        # without these numbers the restored weights would be a rounding off
        assert any(name.endswith(".exact") for name in states)
    assert {path.name for path in (made.output / "broken").iterdir()} == {"checkpoint-5", "checkpoint-10"}


@pytest.mark.parametrize(
    ("variant", "layout"),
    [
        pytest.param("untied", ELSEWHERE, id="elsewhere"),
        pytest.param("tied", {}, id="all in RAM, tied"),
        pytest.param("untied", {}, id="all in RAM", marks=pytest.mark.slow),
        pytest.param("tied", ELSEWHERE, id="elsewhere, tied", marks=pytest.mark.slow),
    ],
)
def test_saving_evaluating_and_generating_between_steps_changes_nothing(
    variant: str, layout: dict[str, Any], runs: Callable[..., Runs]
) -> None:
    """B43 as well: what is pending is applied first, what was looked up before is not looked at again."""
    made = runs(variant)
    straight, end = made.steps("straight", 5, **layout)
    answers: list[Any] = []

    def between(model: LemaModel) -> None:
        answers.append([model.generate_ids([[5, 9], [7]], 3) for _ in range(2)])
        answers.append([model.logits(rows(50)) for _ in range(2)])

    saving, saved = made.steps("saving", 5, saves=(1, 2, 4), **layout)
    looking, looked = made.steps("looking", 5, between=between, **layout)
    assert saving == straight and looking == straight
    assert_same_files(end, saved)
    assert_same_files(end, looked)
    assert all(one == again for one, again in answers[::2])
    assert all(torch.equal(one, again) for one, again in answers[1::2])
    with LemaModel.from_pretrained(end, device="cpu") as model:
        assert torch.equal(model.logits(rows(50)), answers[-1][0])
    assert torch.equal(made.only_computed(end), answers[-1][0])


def test_experts_are_the_same_with_and_without_saving(llamas: Any, tmp_path: Path, small_pieces: None) -> None:
    """Experts that no token came to have an update too, and what a window holds of them is old after a save."""
    made = Runs(mixtral(tmp_path / "mixtral"), tmp_path)
    options = {"trainable_modules": ["experts"]}
    straight, end = made.steps("straight", 5, weights_ram="150KB", **options)
    saving, saved = made.steps("saving", 5, saves=(1, 2, 4), **options)
    assert saving == straight
    assert_same_files(end, saved)
    with LemaModel.from_pretrained(end, output_dir=str(tmp_path / "again")) as model:
        assert torch.equal(model.logits(rows(50)), made.only_computed(end))
    again, resumed = made.steps("resumed", 5, resume=made.output / "saving" / "checkpoint-2", **options)
    assert again == straight[2:]
    assert_same_files(end, resumed)


def mixtral(folder: Path) -> Path:
    from transformers import MixtralConfig, MixtralForCausalLM

    torch.manual_seed(0)
    config = MixtralConfig(
        vocab_size=128, hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, num_local_experts=6, num_experts_per_tok=1, max_position_embeddings=64,
    )  # fmt: skip
    MixtralForCausalLM(config).save_pretrained(folder)
    return folder


def test_an_update_that_comes_late_loses_no_gradient(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, small_pieces: None
) -> None:
    """Nobody waits for an expert without a token: its gradient of this step comes after the last one's was used."""
    made = Runs(mixtral(tmp_path / "mixtral"), tmp_path)
    options = {"trainable_modules": ["experts"], "trainable_layers": [2], "ids": lambda step: rows(step)[:1, :3]}
    straight, end = made.steps("straight", 4, **options)
    change = WeightUpdates._change

    def late(*given: Any) -> None:
        time.sleep(0.02)
        change(*given)

    monkeypatch.setattr(WeightUpdates, "_change", late)
    slow, slow_end = made.steps("slow", 4, **options)
    assert slow == straight
    assert_same_files(end, slow_end)


def test_b07_betas_given_now_win_in_the_bias_correction_too(runs: Callable[..., Runs]) -> None:
    """One step from a checkpoint with other betas, against AdamW's formula on what both checkpoints hold."""
    made = runs("untied")
    options = {"lr_schedule": "constant", "warmup_steps": 0, "weight_decay": 0.0, "max_grad_norm": None}
    _, fifth = made.steps("out", 5, **options)
    _, sixth = made.steps("out", 6, resume=fifth, adam_beta1=0.5, adam_beta2=0.75, **options)
    moved = [load_file(folder / "delta.safetensors") for folder in (fifth, sixth)]
    states = [load_file(folder / "optimizer.safetensors") for folder in (fifth, sixth)]
    assert [int(each["updates_made:int"]) for each in states] == [5, 6]
    for name, before in moved[0].items():
        (m5, v5), (m6, v6) = ([each[f"{name}.{s}"].double() for s in ("exp_avg", "exp_avg_sq")] for each in states)
        gradient = (m6 - 0.5 * m5) / 0.5
        assert ((0.75 * v5 + 0.25 * gradient**2) - v6).norm() <= 1e-5 * v6.norm() + 1e-12, name
        update = 1e-2 / (1 - 0.5**6) * m6 / ((v6 / (1 - 0.75**6)).sqrt() + 1e-8)
        assert ((before.double() - moved[1][name].double()) - update).norm() <= 1e-4 * update.norm(), name


def test_from_pretrained_restores_weights_moments_and_step(runs: Callable[..., Runs]) -> None:
    made = runs("bf16")
    straight, end = made.steps("straight", STEPS)
    _, middle = made.steps("broken", 5)
    with LemaModel.from_pretrained(middle, output_dir=str(made.output / "again")) as model:
        trainer = model.get_trainer()
        figures = []
        while trainer.step < STEPS:
            trainer.train_step(rows(trainer.step), return_logits=False)
            figures.append(tuple(trainer.metrics[key] for key in EXACT))
        assert figures == straight[5:]
        assert_same_files(end, trainer.save_checkpoint(made.output / "again" / "checkpoint-10"))


def test_a_checkpoint_is_loaded_into_a_model_that_has_computed(runs: Callable[..., Runs]) -> None:
    """What its windows hold is old then, whatever was pending is dropped."""
    made = runs("untied")
    straight, end = made.steps("straight", 4, saves=(2,))
    with made.open("other") as model:
        model.initialize_training()
        before = model.logits(rows(50))
        trainer = model.get_trainer()
        trainer.train_step(rows(7), return_logits=False)
        trainer.load_checkpoint(made.output / "straight" / "checkpoint-2")
        again = [trainer.train_step(rows(step), return_logits=False)[1] for step in (2, 3)]
        assert again == [figures[1] for figures in straight[2:]]
        assert_same_files(end, trainer.save_checkpoint(made.output / "other" / "checkpoint-4"))
        assert not torch.equal(model.logits(rows(50)), before)


def test_an_interrupt_in_a_save_changes_nothing(runs: Callable[..., Runs], monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C in a notebook while what is pending is applied: it is, once, and the next save is whole."""
    made = runs("untied")
    _, end = made.steps("straight", 3)
    change, waits = WeightUpdates._change, threading.Condition.wait_for

    def slow(*given: Any) -> None:
        time.sleep(0.002)
        change(*given)

    def interrupted(self: threading.Condition, *given: Any) -> Any:
        monkeypatch.setattr(threading.Condition, "wait_for", waits)
        raise KeyboardInterrupt

    with made.open("other") as model:
        model.initialize_training()
        trainer = model.get_trainer()
        for step in range(3):
            trainer.train_step(rows(step), return_logits=False)
        updates = model.runner.store.updates
        monkeypatch.setattr(WeightUpdates, "_change", slow)
        put = updates._jobs.put
        monkeypatch.setattr(
            updates,
            "_jobs",
            SimpleNamespace(
                put=lambda job: (put(job), monkeypatch.setattr(threading.Condition, "wait_for", interrupted))
            ),
        )
        with pytest.raises(KeyboardInterrupt):
            trainer.save_checkpoint(made.output / "other" / "checkpoint-3")
        assert list((made.output / "other").iterdir()) == [] and updates.pending
        monkeypatch.undo()
        assert_same_files(end, trainer.save_checkpoint(made.output / "other" / "checkpoint-3"))


def test_b07_another_selection_or_number_of_bits_is_refused(runs: Callable[..., Runs], llamas: Any) -> None:
    made = runs("untied")
    _, whole = made.steps("whole", 1)
    _, eight = made.steps("eight", 1, **MODES["8 bits"])
    with pytest.raises(CheckpointError, match=r"39 tensors trained in it, .* are to train now; .*trainable_modules"):
        made.steps("other", 2, resume=whole, **MODES["selective"])
    for folder, options in ((whole, MODES["8 bits"]), (eight, {})):
        with pytest.raises(CheckpointError, match="opt_state_bits of the run that wrote it"):
            made.steps("other", 2, resume=folder, **options)
    with pytest.raises(CheckpointError, match="another base"):
        Runs(llamas.folder("tied"), made.output).steps("other", 2, resume=whole)
    lora = llamas.with_lora(made.folder)
    with pytest.raises(
        ConfigError, match="written by a run with training_mode=selective_full, and training_mode is lora"
    ):
        lora.get_trainer().load_checkpoint(whole)
    saved = lora.get_trainer().save_checkpoint(made.output / "lora" / "checkpoint-0")
    with pytest.raises(
        ConfigError, match="written by a run with training_mode=lora, and training_mode is selective_full"
    ):
        made.steps("other", 2, resume=saved)


def test_b54_only_json_and_safetensors_are_there(runs: Callable[..., Runs]) -> None:
    made = runs("bf16")
    _, folder = made.steps("out", 2, opt_state_bits=8)
    assert {path.name for path in folder.iterdir()} == {
        "delta.safetensors", "optimizer.safetensors", "trainer_state.json"
    }  # fmt: skip
    state = json.loads((folder / "trainer_state.json").read_text())
    assert (state["step"], state["format_version"]) == (2, 1)
    assert set(state["files"]) == {"delta.safetensors", "optimizer.safetensors"}
    for path in folder.glob("*.safetensors"):
        load_file(path)


def test_a_failed_update_is_not_saved(runs: Callable[..., Runs], monkeypatch: pytest.MonkeyPatch) -> None:
    """What is left of it is nobody's weights."""
    made = runs("untied")
    with made.open("out", **ELSEWHERE) as model:
        model.initialize_training()
        trainer = model.get_trainer()
        trainer.train_step(rows(0), return_logits=False)

        def full(*given: Any) -> None:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(type(model.runner.store.updates.masters.file), "write", full)
        with pytest.raises(
            TransferError, match=r"out: .* cannot be written there: No space left on device: .* needed, .* free"
        ):
            trainer.train_step(rows(1), return_logits=False)
        monkeypatch.undo()
        with pytest.raises(TransferError):
            trainer.save_checkpoint(made.output / "out" / "checkpoint-2")
        assert list((made.output / "out").iterdir()) == []
