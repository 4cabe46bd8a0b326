"""Training methods that plugins bring: through LemaModel and the command line, saved, and gone on with."""

from __future__ import annotations

import inspect
import json
import sys
import textwrap
import time
import types
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import MixtralConfig, MixtralForCausalLM

from lema import LemaConfig, LemaModel
from lema.cli import main
from lema_core import hookspecs
from lema_core.adapter import ModelAdapter
from lema_core.errors import CheckpointError, ConfigError
from lema_core.ops.low_rank import LowRankUpdate
from lema_core.plugins import get_plugin_manager
from lema_core.records import TrainingMethod
from lema_core.runtime.runner import TrainPass
from lema_core.store.updates import WeightUpdates
from lema_core.training import Outcome, SavedRun, Training

BlockTraining = pytest.importorskip("lema_badam.method").BlockTraining

EXACT = ("step", "loss", "grad_norm")
#: blocks of one layer, four steps each: five steps end within a turn
TURNS = {"switch_block_every": 4}
CAPPED = {"opt_state_ram": "1B", "grad_acc_ram": "1B"}
EIGHT_BITS = {"opt_state_bits": 8, "grad_acc_bits": 8}


def rows(step: int) -> torch.Tensor:
    return torch.randint(1, 128, (2, 12), generator=torch.Generator().manual_seed(step))


class Runs:
    """Runs of ten steps with ``options``, each in a LemaModel of its own."""

    def __init__(self, llamas: Any, output: Path, folder: Path | None = None, **options: Any) -> None:
        self._llamas = llamas
        self._output = output
        self._options = {"training_mode": "badam", "learning_rate": 1e-2, "max_steps": 10, "seed": 1, **options}
        self._folder = folder or llamas.folder()

    def open(self, name: str, **options: Any) -> LemaModel:
        values = {**self._options, "output_dir": str(self._output / name), "max_seq_length": 12, **options}
        model = self._llamas.open(self._folder, **values)
        model.initialize_training()
        return model

    def steps(
        self, name: str, to: int, resume: Path | None = None, tokens: int = 12, **options: Any
    ) -> tuple[list[tuple[float, ...]], Path]:
        """Figures of the steps up to ``to``, and the checkpoint of the last."""
        found = []
        with self.open(name, **options) as model:
            trainer = model.get_trainer()
            if resume is not None:
                trainer.load_checkpoint(resume)
            while trainer.step < to:
                trainer.train_step(rows(trainer.step)[:, :tokens], return_logits=False)
                found.append(tuple(trainer.metrics[key] for key in EXACT))
            return found, trainer.save_checkpoint(self._output / name / f"checkpoint-{to}")


def same_files(one: Path, other: Path) -> bool:
    files = "delta.safetensors", "optimizer.safetensors"
    pairs = [(load_file(one / file), load_file(other / file)) for file in files]
    return all(a.keys() == b.keys() and all(torch.equal(value, b[name]) for name, value in a.items()) for a, b in pairs)


@pytest.mark.parametrize(
    ("stop", "options"),
    [
        pytest.param(5, EIGHT_BITS, id="within a turn, 8 bits"),
        pytest.param(5, {}, id="within a turn", marks=pytest.mark.slow),
        pytest.param(8, EIGHT_BITS, id="between turns, 8 bits", marks=pytest.mark.slow),
        pytest.param(8, {}, id="between turns", marks=pytest.mark.slow),
    ],
)
def test_a_run_that_goes_on_is_the_run_that_never_stopped(
    stop: int, options: dict[str, Any], llamas: Any, small_granules: int, tmp_path: Path
) -> None:
    runs = Runs(llamas, tmp_path, method_options=TURNS, **options)
    whole, expected = runs.steps("whole", 10)
    first, checkpoint = runs.steps("first", stop, **CAPPED)
    second, found = runs.steps("second", 10, checkpoint)
    assert first + second == whole
    assert same_files(found, expected)


def test_a_checkpoint_has_the_moments_of_the_block_under_way(llamas: Any, tmp_path: Path) -> None:
    runs = Runs(llamas, tmp_path, method_options=TURNS)
    with runs.open("block") as model:
        block = set(model.training.active(4))
    _, within = runs.steps("within", 5)
    assert moments_in(within) == {f"{name}.{state}" for name in block for state in ("exp_avg", "exp_avg_sq")}
    _, between = runs.steps("between", 8)
    assert moments_in(between) == set()
    state = json.loads((within / "trainer_state.json").read_text())
    assert state["optimizer"] == "BAdam" and state["config"]["method_options"] == TURNS


def moments_in(checkpoint: Path) -> set[str]:
    return {name for name in load_file(checkpoint / "optimizer.safetensors") if ".exp_avg" in name}


def test_other_turns_are_refused_within_one(llamas: Any, tmp_path: Path) -> None:
    """Where a turn ends, a run may go on with others; within, there are no moments for another block."""
    runs = Runs(llamas, tmp_path, method_options={**TURNS, "switch_mode": "ascending"})
    _, checkpoint = runs.steps("first", 5)
    with pytest.raises(CheckpointError, match=r"no optimizer state .*: resume with the .*method_options"):
        runs.steps("other", 6, checkpoint, method_options={"switch_block_every": 4, "switch_mode": "descending"})
    found, _ = runs.steps("more often", 6, checkpoint, method_options={"switch_block_every": 5})
    assert len(found) == 1


def test_a_checkpoint_opens_as_what_it_was(llamas: Any, tmp_path: Path) -> None:
    runs = Runs(llamas, tmp_path, method_options=TURNS)
    whole, _ = runs.steps("whole", 7)
    _, checkpoint = runs.steps("first", 5)
    with LemaModel.from_pretrained(checkpoint, output_dir=str(tmp_path / "opened")) as model:
        assert model.config.training_mode == "badam"
        trainer = model.get_trainer()
        found = [trainer.train_step(rows(step), return_logits=False)[1] for step in (5, 6)]
    assert found == [loss for _, loss, _ in whole[5:]]


def test_what_a_method_cannot_take_is_said(llamas: Any, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="method_options: unknown option 'swich_mode'; did you mean 'switch_mode'"):
        Runs(llamas, tmp_path, method_options={"swich_mode": "random"}).open("typo")
    for mode in ("lora", "selective_full"):
        with pytest.raises(ConfigError, match=f"method_options: .* training_mode is {mode}; leave one"):
            LemaConfig(training_mode=mode, method_options=TURNS)
    with Runs(llamas, tmp_path).open("own optimizer") as model:
        with pytest.raises(ConfigError, match="no parameters for an optimizer"):
            model.get_trainable_parameters()
        with pytest.raises(ConfigError, match=r"by BAdam: call get_trainer\(\) without an optimizer"):
            model.get_trainer(torch.optim.SGD([torch.zeros(1, requires_grad=True)], 1.0))


def test_memory_is_set_aside_for_the_largest_turn(llamas: Any, tmp_path: Path) -> None:
    """Whatever block begins, what the blocks above the lowest keep is counted."""
    shapes = []
    for mode in ("ascending", "descending"):
        with Runs(llamas, tmp_path, method_options={"switch_mode": mode}).open(mode) as model:
            shapes.append(model.plan().work.shape)
    assert shapes[0] == shapes[1] and shapes[0].first_layer == 0 and shapes[0].embeds


@pytest.mark.parametrize("model_type", [pytest.param("llama", marks=pytest.mark.slow), "mixtral"])
@pytest.mark.parametrize(
    "capped", [pytest.param({}, marks=pytest.mark.slow, id="in RAM"), pytest.param(CAPPED, id="on disk")]
)
def test_sharing_room_changes_no_bit(
    capped: dict[str, str],
    model_type: str,
    llamas: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each block begins while experts that no token came to wait for what the block before it decided."""
    folder = llamas.folder() if model_type == "llama" else write_mixtral(tmp_path / "model")
    options = {"method_options": {"switch_block_every": 1}, "trainable_layers": ["first:2"]}
    runs = Runs(llamas, tmp_path, folder, **options, **capped)
    with monkeypatch.context() as patched:
        patched.setattr(BlockTraining, "turns", ())
        expected, before = runs.steps("apart", 6, tokens=2)
    change = WeightUpdates._change

    def slowly(updates: WeightUpdates, *arguments: Any) -> None:
        if len(updates._pending) < 4:
            time.sleep(0.15)
        change(updates, *arguments)

    monkeypatch.setattr(WeightUpdates, "_change", slowly)
    found, after = runs.steps("together", 6, tokens=2)
    assert found == expected
    assert same_files(after, before)


def write_mixtral(folder: Path) -> Path:
    torch.manual_seed(0)
    config = MixtralConfig(
        vocab_size=128, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, num_local_experts=24, num_experts_per_tok=1, max_position_embeddings=64,
    )  # fmt: skip
    MixtralForCausalLM(config).save_pretrained(folder)
    return folder


def test_on_the_command_line(
    llamas: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """In this process: another one would import torch for each command."""
    monkeypatch.chdir(tmp_path)
    ids = [{"input_ids": rows(step)[0].tolist()} for step in range(6)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ids))
    arguments = (
        f"model_name_or_path={llamas.folder()}", "train_file=rows.jsonl", "training_mode=badam", "device=cpu",
        "method_options={switch_block_every:2,switch_mode:ascending}", "save_steps=3", "output_dir=out",
    )  # fmt: skip
    assert main([*arguments, "max_steps=3"]) == 0
    assert "one of 6 blocks at a time, 2 steps each, in ascending order" in "".join(capfd.readouterr())
    assert main([*arguments, "max_steps=6", "resume=auto"]) == 0
    steps = [json.loads(line) for line in (tmp_path / "out/metrics.jsonl").read_text().splitlines()]
    assert [step["step"] for step in steps] == [1, 2, 3, 4, 5, 6]
    delta = load_file(tmp_path / "out/checkpoint-6/delta.safetensors")
    moved = {name for name, value in delta.items() if value.any()}
    assert moved and all(
        name.startswith(("model.embed_tokens", "model.layers.0.", "model.layers.1.")) for name in moved
    )
    capfd.readouterr()
    assert main([*arguments, "method_options={layers_per_blok:2}", "output_dir=other"]) == 2
    said = capfd.readouterr().err
    assert "did you mean 'layers_per_block'?" in said and "Traceback" not in said


def test_the_method_in_the_hooks_example_trains(llamas: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    example = inspect.getdoc(hookspecs.lema_training_methods).partition("Example::\n")[2]
    module = types.ModuleType("lema_norms.method")
    exec(compile(textwrap.dedent(example), "<example>", "exec"), vars(module))
    monkeypatch.setitem(sys.modules, "lema_norms.method", module)
    manager = get_plugin_manager()
    (record,) = module.lema_training_methods()
    methods = {**manager.training_methods(), record.name: record}
    monkeypatch.setattr(manager, "training_methods", lambda: methods)
    assert isinstance(record, TrainingMethod)
    with Runs(llamas, tmp_path, training_mode="norms").open("norms") as model:
        assert model.training.describe() == "9 norms train"
        trainer = model.get_trainer()
        losses = [trainer.train_step(rows(0), return_logits=False)[1] for _ in range(3)]
        model.save_pretrained(tmp_path / "norms" / "saved")
    assert losses[2] < losses[1] < losses[0]
    assert all("norm" in name for name in load_file(tmp_path / "norms" / "saved" / "delta.safetensors"))


class OnlyB(Training):
    """LoRA whose A stays as it was drawn (Zhang et al. 2023, arXiv:2308.03303), on q_proj: updates beside the weights,
    with files of its own and whatever optimizer it is given."""

    def __init__(self, adapter: ModelAdapter) -> None:
        specs = [spec for spec in adapter.linear_modules() if spec.module.endswith("q_proj")]
        generator = torch.Generator().manual_seed(0)
        self.updates = {
            spec.module: LowRankUpdate(
                torch.randn(2, spec.shape[1], generator=generator).requires_grad_(),
                torch.zeros(spec.shape[0], 2).requires_grad_(),
                1.0,
                0.0,
            )
            for spec in specs
        }

    @classmethod
    def create(cls, adapter: ModelAdapter, options: Any, device: torch.device, kernel: object) -> OnlyB:
        return cls(adapter)

    def describe(self) -> str:
        return f"B of {len(self.updates)} modules trains"

    @property
    def numbers(self) -> int:
        return sum(parameter.numel() for parameter in self.parameters())

    @property
    def rate(self) -> float:
        return self.optimizer.param_groups[0]["lr"]

    def parameters(self) -> list[Any]:
        return [update.lora_B for update in self.updates.values()]

    def files(self, adapter: ModelAdapter, base_name: str) -> BFiles:
        return BFiles(self)

    def train_pass(self, step: int, seed: int) -> TrainPass:
        return TrainPass(0, seed)

    def begin_step(self, step: int, lr: float | None = None, waits: bool = True) -> None:
        self.discard_step()

    def finish_step(self, lr: float | None, max_norm: float | None, loss_scale: float) -> Outcome:
        self.optimizer.param_groups[0]["lr"] = lr
        self.optimizer.step()
        return Outcome(sum(float(parameter.grad.norm()) for parameter in self.parameters()))

    def discard_step(self) -> None:
        for update in self.updates.values():
            update.lora_A.grad = update.lora_B.grad = None


@dataclass
class BFiles:
    training: OnlyB

    @property
    def weights_nbytes(self) -> int:
        return 4 * self.training.numbers

    @property
    def nbytes(self) -> int:
        return self.weights_nbytes

    def write_weights(self, folder: Path) -> None:
        tensors = {name: update.lora_B.detach() for name, update in self.training.updates.items()}
        save_file(tensors, folder / "b.safetensors")

    def states(self, step: int) -> list[Any]:
        return []

    def read(self, folder: Path, states: object, saved: SavedRun) -> None:
        for name, value in load_file(folder / "b.safetensors").items():
            self.training.updates[name].lora_B.data.copy_(value)


def test_updates_that_are_not_lora_train_and_are_saved(
    llamas: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manager = get_plugin_manager()
    methods = {**manager.training_methods(), "only_b": TrainingMethod("only_b", method=f"{__name__}:OnlyB")}
    monkeypatch.setattr(manager, "training_methods", lambda: methods)
    runs = Runs(llamas, tmp_path, training_mode="only_b", lr_schedule="constant")
    found = []
    for resume in (None, tmp_path / "saved"):
        with runs.open(f"resume {resume is not None}") as model:
            assert model.lora is None and len(model.get_trainable_parameters()) == 4
            trainer = model.get_trainer(torch.optim.SGD(model.get_trainable_parameters(), 1.0))
            if resume is not None:
                trainer.load_checkpoint(resume)
            found += [trainer.train_step(rows(0), return_logits=False)[1] for _ in range(2)]
            trainer.save_checkpoint(tmp_path / "saved")
            model.save_pretrained(tmp_path / "weights")
    assert sorted(found, reverse=True) == found and len(set(found)) == 4
    assert sorted(path.name for path in (tmp_path / "weights").iterdir()) == ["b.safetensors"]
