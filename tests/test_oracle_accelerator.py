"""Training the model's own weights on a device with memory of its own: bit for bit the run that computes from RAM."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from lema import LemaConfig, LemaModel
from lema.prediction import predicted
from lema_core.device import Device
from lema_core.errors import BudgetError, TransferError
from lema_core.runtime import schedule
from lema_core.runtime.runner import ModelRunner
from lema_core.store.trace import Trace
from lema_core.testing.simulated import SimulatedAccelerator

SIZES = {
    "vocab_size": 128, "hidden_size": 64, "intermediate_size": 112, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64,
}  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "llama": SIZES,
    "llama_tied": SIZES | {"tie_word_embeddings": True},
    "mixtral": SIZES | {"num_experts_per_tok": 2, "num_local_experts": 4},
}
#: nothing has a place in RAM or on the device that can pass through them
ON_DISK = {"opt_state_ram": "1B", "grad_acc_ram": "1B", "opt_state_vram": "1B", "grad_acc_vram": "1B"}
#: all of what trains beside weights has its place on the device
ON_DEVICE = {"opt_state_ram": "1B", "grad_acc_ram": "1B", "opt_state_vram": "1GB", "grad_acc_vram": "1GB"}
EIGHT_BITS = {"opt_state_bits": 8, "grad_acc_bits": 8}
#: each weight changes as soon as its gradient is complete
AT_ONCE: dict[str, Any] = {"max_grad_norm": None, "skip_nonfinite": False}
STEPS = 4


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return tmp_path_factory.mktemp("accelerated")


def folder_of(root: Path, name: str) -> Path:
    path = root / name
    if not path.exists():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(
            AutoConfig.for_model(name.removesuffix("_tied"), **MODELS[name]), dtype=torch.float32
        )
        model.save_pretrained(path)
    return path


def rows(step: int) -> Tensor:
    return torch.randint(1, 128, (2, 12), generator=torch.Generator().manual_seed(step))


class Run:
    """What a run showed: losses, norms, what it computed in between, and the files of its last checkpoint."""

    def __init__(self, folder: Path, output: Path, device: Device | None, **options: Any) -> None:
        self._values: dict[str, Any] = {
            "training_mode": "selective_full", "batch_size": 1, "gradient_accumulation_steps": 2, "seed": 1,
            "learning_rate": 1e-2, "lr_schedule": "cosine", "weight_decay": 0.1, "max_seq_length": 12,
            "max_steps": STEPS, "output_dir": str(output), "model_name_or_path": str(folder), "device": "cpu",
        } | options  # fmt: skip
        self._device = device
        self._output = output
        self.shown: list[Any] = []
        self.stats: list[dict[str, Any]] = []

    def open(self) -> LemaModel:
        return LemaModel(LemaConfig(**self._values), self._device)

    def steps(self, first: int = 0, last: int = STEPS, between: bool = False, again: bool = False) -> Run:
        """Steps ``first`` to ``last``. ``between``: it computes and saves after each. ``again``: one that is
        interrupted is made once more."""
        with self.open() as model:
            model.initialize_training()
            trainer = model.get_trainer()
            if first:
                trainer.load_checkpoint(self._output / f"checkpoint-{first}")
            for step in range(first, last):
                try:
                    loss = trainer.train_step(rows(step), return_logits=False)[1]
                except KeyboardInterrupt:
                    assert again
                    loss = trainer.train_step(rows(step), return_logits=False)[1]
                self.shown.append((loss, trainer.metrics["grad_norm"]))
                self.stats.append(model.stats())
                if between:
                    self.shown.append(model.logits(rows(99)).tolist())
                    self.shown.append(model.generate_ids([[3, 5, 7]], 4))
                    model.save_pretrained(self._output / "between")
            path = trainer.save_checkpoint(self._output / f"checkpoint-{last}")
            self.shown.append(model.logits(rows(99)).tolist())
            self.plan = model.run_plan
        self.files = {name: load_file(path / name) for name in ("delta.safetensors", "optimizer.safetensors")}
        return self

    def assert_like(self, other: Run) -> None:
        assert self.shown == other.shown
        for name, tensors in self.files.items():
            assert tensors.keys() == other.files[name].keys()
            assert all(torch.equal(tensor, other.files[name][key]) for key, tensor in tensors.items())


def windows(folder: Path, output: Path, granules: int, **options: Any) -> dict[str, str]:
    """Budgets of so many granules of each region, on the device and in RAM."""
    model = Run(folder, output, None, **options).open()
    model.initialize_training()
    cut = model._model
    slots = granules * (cut.layout.slot_bytes + (0 if cut.experts is None else cut.experts.slot_bytes))
    return {
        "weights_vram": f"{slots}B",
        "weights_ram": f"{slots + cut.default_rows() * cut.row_bytes + cut.bounce_bytes}B",
    }


LAST = {"trainable_layers": ["last:1", "head"]}
#: model, granules in each window (None: all), options of both runs, and those of where things lie
CASES: dict[str, tuple[str, int | None, dict[str, Any], dict[str, str]]] = {
    "all fits": ("llama_tied", None, {}, {}),
    "two granules, on disk": ("llama_tied", 2, {}, ON_DISK),
    "at once, two granules": ("llama_tied", 2, AT_ONCE, ON_DISK),
    "experts": ("mixtral", 2, {}, ON_DISK),
    "untied": ("llama", None, {}, {}),
    "three granules": ("llama_tied", 3, {}, {}),
    "four granules, selective": ("llama", 4, LAST, ON_DISK),
    "selective": ("llama", None, LAST, {}),
    "selective, a tied head": ("llama_tied", 2, LAST, ON_DISK),
    "experts of one layer": ("mixtral", 2, {"trainable_modules": ["experts"], "trainable_layers": [1]}, {}),
    "experts at once": ("mixtral", 2, AT_ONCE, {}),
    "at once": ("llama", None, AT_ONCE, {}),
    "at once, selective": ("llama", 2, AT_ONCE | LAST, {}),
    "8 bits": ("llama_tied", None, EIGHT_BITS, {}),
    "8 bits on disk": ("llama", 2, EIGHT_BITS, ON_DISK),
    "8 bits on the device": ("llama", 2, EIGHT_BITS, ON_DEVICE),
    "moments on the device": ("llama_tied", 2, {}, ON_DEVICE),
    "moments on the device, at once": ("mixtral", None, AT_ONCE, ON_DEVICE),
    "some gradients on the device": ("llama_tied", 2, {}, {"grad_acc_vram": "200KB", "opt_state_vram": "200KB"}),
    "some of all in RAM": ("llama", 2, {}, ON_DISK | {"grad_acc_ram": "200KB", "opt_state_ram": "200KB"}),
    "a backend": ("llama", 2, {"grad_accum_backend": "disk"}, {}),
}


QUICK = [("all fits", True), ("two granules, on disk", False), ("at once, two granules", True), ("experts", False)]
WAYS = [
    pytest.param(
        *way, id=f"{way[0]}, {'together' if way[1] else 'apart'}", marks=() if way in QUICK else pytest.mark.slow
    )
    for way in itertools.product(CASES, (True, False))
]


@pytest.mark.parametrize(("case", "grouped"), WAYS)
def test_a_run_is_that_of_the_cpu(
    case: str, grouped: bool, root: Path, tmp_path: Path, small_granules: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Micro-batches pass a layer together, or apart: then gradients leave the device and come again. Peaks are the
    predicted ones."""
    if not grouped:
        monkeypatch.setattr(schedule, "_pack", lambda sizes, most: tuple((i,) for i in range(len(sizes))))
    name, granules, options, places = CASES[case]
    folder = folder_of(root, name)
    cpu = Run(folder, tmp_path / "cpu", None, **options).steps()
    budgets = {} if granules is None else windows(folder, tmp_path / "size", granules, **options)
    device = SimulatedAccelerator(latency_s=1e-4, compute_lag_s=1e-4)
    found = Run(folder, tmp_path / "device", device, **budgets, **places, **options).steps()
    found.assert_like(cpu)
    assert device.overwrites_while_read == 0
    prediction, last = predicted(found.plan), found.stats[-1]
    assert prediction["device_peak_bytes"] == sum(each.device_peak_bytes for each in last.values())
    assert prediction["ram_peak_bytes"] == sum(each.ram_peak_bytes for each in last.values())


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("llama_tied", {}),
        pytest.param("llama_tied", EIGHT_BITS, marks=pytest.mark.slow),
        pytest.param("mixtral", AT_ONCE, marks=pytest.mark.slow),
    ],
)
def test_evaluating_generating_saving_and_going_on(
    name: str, options: dict[str, Any], root: Path, tmp_path: Path, small_granules: int
) -> None:
    folder = folder_of(root, name)
    cpu = Run(folder, tmp_path / "cpu", None, **options).steps(last=2, between=True)
    more = Run(folder, tmp_path / "cpu", None, **options).steps(2, 3)
    options = options | windows(folder, tmp_path / "size", 3, **options)
    Run(folder, tmp_path / "device", SimulatedAccelerator(), **options).steps(last=2, between=True).assert_like(cpu)
    Run(folder, tmp_path / "device", SimulatedAccelerator(), **options).steps(2, 3).assert_like(more)


def test_what_trained_is_computed_with_on_an_accelerator(root: Path, tmp_path: Path, small_granules: int) -> None:
    """A delta, without room for gradients and moments."""
    folder = folder_of(root, "llama_tied")
    Run(folder, tmp_path / "cpu", None).steps(last=1)
    found = []
    for device, budgets in ((None, {}), (SimulatedAccelerator(), windows(folder, tmp_path / "size", 2))):
        with Run(folder, tmp_path / "eval", device, **budgets).open() as model:
            model.load_delta(tmp_path / "cpu" / "checkpoint-1", trains=False)
            found.append((model.logits(rows(99)).tolist(), model.generate_ids([[3, 5, 7]], 4)))
            assert "grads" not in model.stats()
    assert found[0] == found[1]


@pytest.mark.parametrize("options", [{}, pytest.param(AT_ONCE, marks=pytest.mark.slow)])
def test_blocks_in_turn(options: dict[str, Any], root: Path, tmp_path: Path) -> None:
    pytest.importorskip("lema_badam")
    folder = folder_of(root, "llama")
    options = {"training_mode": "badam", "method_options": {"switch_block_every": 1}, **options}
    cpu = Run(folder, tmp_path / "cpu", None, **options).steps()
    options |= ON_DISK | windows(folder, tmp_path / "size", 2, **options)
    Run(folder, tmp_path / "device", SimulatedAccelerator(compute_lag_s=1e-4), **options).steps().assert_like(cpu)


def test_a_step_that_failed_leaves_nothing_behind(
    root: Path, tmp_path: Path, small_granules: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Interrupted in a backward pass, with gradients on their way, and made again."""
    folder = folder_of(root, "llama_tied")
    cpu = Run(folder, tmp_path / "cpu", None).steps()
    backward, calls = ModelRunner._backward, []

    def interrupted(runner: ModelRunner, group: Any, layer: int, *rest: Any) -> None:
        calls.append(layer)
        if len(calls) == 4:
            raise KeyboardInterrupt
        backward(runner, group, layer, *rest)

    monkeypatch.setattr(ModelRunner, "_backward", interrupted)
    options = ON_DISK | windows(folder, tmp_path / "size", 3)
    found = Run(folder, tmp_path / "device", SimulatedAccelerator(compute_lag_s=1e-4), **options)
    assert found.steps(again=True).shown == cpu.shown and len(calls) > 4
    found.assert_like(cpu)


@pytest.mark.parametrize("name", ["grad_acc", "opt_state"])
def test_more_than_the_device_has_is_refused_by_name(name: str, root: Path, tmp_path: Path) -> None:
    run = Run(folder_of(root, "llama"), tmp_path, SimulatedAccelerator(80_575_000), **{f"{name}_vram": "1GB"})
    with run.open() as model:
        model.initialize_training()
        with pytest.raises(BudgetError, match=rf"{name}_vram: [\d,]+ bytes are wanted .*; lower {name}_vram"):
            model.plan()


def test_where_ram_is_the_devices_the_smaller_of_two_limits_holds(root: Path, tmp_path: Path) -> None:
    run = Run(folder_of(root, "llama"), tmp_path, None, grad_acc_vram="1B", opt_state_vram="1B", opt_state_ram="1GB")
    with run.open() as model:
        model.initialize_training()
        states = model.plan().states()
    assert (states.grads_bytes, states.optim_bytes) == (1, 1)


def test_a_gradient_whose_copy_failed_is_named(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    copy = SimulatedAccelerator._copy

    def failing(device: SimulatedAccelerator, target: Tensor, source: Tensor) -> None:
        if copied_from is not None and copied_from(source):
            raise RuntimeError("the link is down")
        copy(device, target, source)

    copied_from: Any = None
    monkeypatch.setattr(SimulatedAccelerator, "_copy", failing)
    options = ON_DISK | windows(folder_of(root, "llama"), tmp_path / "size", 2)
    with Run(folder_of(root, "llama"), tmp_path, SimulatedAccelerator(), **options).open() as model:
        model.initialize_training()
        trainer = model.get_trainer()
        slab = model.runner.store.gradients.on_device._slab
        copied_from = lambda source: source.data_ptr() == slab.data_ptr()  # noqa: E731
        with pytest.raises(
            TransferError, match=r"the gradient of .*: copying from the device failed: the link is down"
        ):
            for step in range(2):
                trainer.train_step(rows(step), return_logits=False)


@pytest.mark.parametrize("device", [None, SimulatedAccelerator])
def test_a_pass_that_uses_few_weights_updates_all(device: Any, root: Path, tmp_path: Path, small_granules: int) -> None:
    """What it does not use is newer in its slot than in its file by then."""
    logits = []
    for partly in (False, True):
        with Run(folder_of(root, "llama"), tmp_path / str(partly), device and device()).open() as model:
            model.initialize_training()
            trainer, store = model.get_trainer(), model.runner.store
            for step in range(2):
                trainer.train_step(rows(step), return_logits=False)
            if partly:
                part = store.parts("lm_head.weight")[0]
                store.begin_step(Trace("a part", (part.granule,)))
                with store.borrow(part):
                    pass
                store.end_step()
                assert not store.updates.pending
            logits.append(model.logits(rows(99)))
    assert torch.equal(*logits)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_cuda(root: Path, tmp_path: Path, small_granules: int) -> None:
    """Where things lie changes no bit, and other orders of sums than the CPU's as little as they should."""
    folder = folder_of(root, "llama_tied")
    cpu = Run(folder, tmp_path / "cpu", None).steps()
    plain = Run(folder, tmp_path / "cuda", None, device="cuda").steps(between=True)
    losses = [shown[0] for shown in plain.shown if isinstance(shown, tuple)]
    assert losses == pytest.approx([shown[0] for shown in cpu.shown if isinstance(shown, tuple)], rel=1e-4)
    for number, places in enumerate((ON_DISK, ON_DEVICE)):
        options = places | windows(folder, tmp_path / "size", 3)
        output = tmp_path / str(number)
        Run(folder, output, None, device="cuda", **options).steps(between=True).assert_like(plain)
