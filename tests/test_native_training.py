"""Training with the native kernel: the losses of plain torch to rounding, the resident run's bits under any window."""

from __future__ import annotations

import io

import pytest
import torch

import lema_cuda.library
from lema.doctor import print_report
from lema_core.errors import ConfigError
from lema_core.plugins import PluginManager
from lema_core.runtime.piece_run import Level
from lema_core.testing.forced import ForcedSchedule
from lema_cuda.library import refusals
from lema_cuda.testing import AMX


@pytest.fixture
def native() -> None:
    if reasons := refusals():
        pytest.skip("; ".join(reasons))


def losses(llamas, variant: str, **options) -> list[float]:
    model = llamas.with_lora(llamas.folder(variant, num_hidden_layers=2), learning_rate=1e-2, **options)
    trainer = model.get_trainer()
    generator = torch.Generator().manual_seed(3)
    found = []
    for _ in range(3):
        ids = torch.randint(0, 128, (2, 11), generator=generator)
        found.append(trainer.train_step(ids, ids, return_logits=False)[1])
    model.close()
    return found


@pytest.mark.parametrize("variant", ["untied", "bf16", "fp16"])
def test_losses_are_those_of_plain_torch(variant: str, llamas, native, native_instructions: str) -> None:
    python = losses(llamas, variant, backend="python")
    # AMX's sums share no rounding with those of plain torch: test_native_judge.py says which are nearer to fp64
    bound = 1e-5 if native_instructions == AMX else 1e-6
    assert losses(llamas, variant, backend="cpp") == pytest.approx(python, rel=bound)


@pytest.mark.parametrize("backend", ["python", "cpp"])
@pytest.mark.parametrize("threads", [1, 2])
def test_micro_batches_packed_together_equal_those_apart(backend: str, threads: int, llamas, native) -> None:
    """Bit for bit, through norms, rotary embeddings, attention, SiLU and AdamW; sizes that fill no register."""
    folder = llamas.folder("untied", num_hidden_layers=2, intermediate_size=90)
    ids = torch.randint(0, 128, (5, 37), generator=torch.Generator().manual_seed(3))
    found = []
    for groups in (((0,), (1,), (2,)), ((0, 1, 2),), ((0,), (1, 2))):
        options = {"backend": backend, "batch_size": 2, "learning_rate": 1e-2, "num_threads": threads}
        model = llamas.with_lora(folder, **options)
        trainer = model.get_trainer()
        costs = model.runner.scheduler.costs
        model.runner.scheduler = ForcedSchedule(costs, groups, [Level.RECOMPUTE] * costs.n_layers)
        losses = [trainer.train_step(ids, ids, return_logits=False)[1] for _ in range(2)]
        found.append((losses, [parameter.detach().clone() for parameter in model.get_trainable_parameters()]))
        model.close()
    for losses, parameters in found[1:]:
        assert losses == found[0][0]
        assert all(torch.equal(*pair) for pair in zip(parameters, found[0][1], strict=True))


@pytest.mark.parametrize("variant", ["tied", "bf16"])
def test_streamed_is_resident(variant: str, llamas, native, small_granules) -> None:
    resident = losses(llamas, variant, backend="cpp", strategy="resident")
    cut = llamas.cut(llamas.open(llamas.folder(variant, num_hidden_layers=2)), small_granules)
    for budget in (cut.smallest_bytes, cut.smallest_bytes + 3 * cut.layout.slot_bytes):
        assert losses(llamas, variant, backend="cpp", weights_ram=f"{budget}B") == resident


def test_auto_takes_the_native_kernel(llamas, native) -> None:
    assert llamas.open(llamas.folder()).kernel.name == "cpp"
    assert llamas.open(llamas.folder(), backend="python").kernel.name == "torch"


def test_switched_off(llamas, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LEMA_DISABLE_NATIVE", "1")
    assert llamas.open(llamas.folder()).kernel.name == "torch"
    with pytest.raises(ConfigError, match=r"^backend: 'cpp' cannot serve here: .*switched off by LEMA_DISABLE_NATIVE"):
        llamas.open(llamas.folder(), backend="cpp")
    print_report(report := io.StringIO())
    assert "no  switched off by LEMA_DISABLE_NATIVE" in report.getvalue()


def test_a_cpu_that_lacks_instructions(llamas, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lema_cuda.library, "cpu_missing", lambda: "FMA")
    assert llamas.open(llamas.folder()).kernel.name == "torch"
    with pytest.raises(ConfigError, match="this CPU has no FMA; cpp: for cuda only; use backend=auto"):
        llamas.open(llamas.folder(), backend="cpp")


def test_not_installed(llamas, monkeypatch: pytest.MonkeyPatch) -> None:
    manager = PluginManager()
    with monkeypatch.context() as patch:
        patch.setenv("LEMA_DISABLE_PLUGINS", "lema-cuda")
        manager.load_installed()
    for module in ("lema.model", "lema_core.ops.kernels"):
        monkeypatch.setattr(f"{module}.get_plugin_manager", lambda: manager)
    assert llamas.open(llamas.folder()).kernel.name == "torch"
    with pytest.raises(ConfigError, match=r"^backend: 'cpp' is not installed"):
        llamas.open(llamas.folder(), backend="cpp")
