"""task=plan: figures that agree with the store that is opened then, for this machine and others, nothing being read."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lema import LemaConfig, LemaModel, tasks
from lema.cli import main
from lema.metrics import read_steps
from lema.plan_task import draw, print_plan, read_hardware, sections
from lema.planner import named_machine
from lema.prediction import measured, predicted, tier_memory
from lema_core.errors import ConfigError
from lema_core.planning.hardware import named_hardware
from lema_core.store.disk import DiskReader
from lema_core.store.states import StateStream
from lema_core.testing.simulated import SimulatedAccelerator


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture
def config(tiny_llama: Path, tmp_path: Path) -> Callable[..., LemaConfig]:
    def build(**options: Any) -> LemaConfig:
        given = {
            "task": "plan", "model_name_or_path": str(tiny_llama), "output_dir": str(tmp_path / "out"), "lora_rank": 2,
            "max_seq_length": 16, "device": "cpu", **options,
        }  # fmt: skip
        return LemaConfig(**given)

    return build


def _opened(config: LemaConfig, **how: Any) -> LemaModel:
    model = LemaModel(config, **how)
    model.initialize_lora()
    return model


def test_windows_are_those_of_the_store_that_is_opened_then(config: Callable[..., LemaConfig]) -> None:
    with _opened(config(weights_ram="300KB")) as model:
        planned = tier_memory(model.plan())
        assert set(planned) == {"ram"}
        assert planned["ram"].weights == model.stats()["weights"].ram_window_bytes
        assert planned["ram"].states == 12 * sum(p.numel() for p in model.get_trainable_parameters())


def test_a_device_of_its_own_has_its_own_peak(config: Callable[..., LemaConfig]) -> None:
    options = {"weights_ram": "400KB", "weights_vram": "300KB"}
    with _opened(config(**options), device=SimulatedAccelerator(capacity_bytes=2_000_000_000)) as model:
        planned = tier_memory(model.plan())
        stats = model.stats()["weights"]
        assert planned["ram"].weights == stats.ram_window_bytes
        assert planned["device"].weights == stats.device_window_bytes
        assert planned["ram"].activations == planned["ram"].states == 0 < planned["device"].activations


def test_a_named_machine_is_planned_for_without_reading_a_weight(
    config: Callable[..., LemaConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    def read(*_: Any) -> None:
        raise AssertionError("a weight was read")

    monkeypatch.setattr(DiskReader, "read", read)
    out = io.StringIO()
    print_plan(config(hardware="T4", batch_size=2, gradient_accumulation_steps=3), out)
    text = out.getvalue()
    for title in ("Run", "Machine", "Peak in device memory", "Peak in RAM", "A step", "Bytes that a step moves"):
        assert f"{title}:\n" in text
    assert "3 x 2 rows of 16 tokens" in text and "NVIDIA T4" in text and "float16" in text
    assert re.search(r"time +\S+ m?s, .* bound by (compute|memory|disk|link)\n", text)
    assert re.search(r"of device memory +nothing\n", text), "everything fits"


def test_more_memory_buys_what_it_saves(config: Callable[..., LemaConfig], tmp_path: Path) -> None:
    """A disk so slow that reading is all a step does: 1 GB more holds the model, and saves all of it."""
    file = tmp_path / "slow.yaml"
    file.write_text(
        "ram_bytes: 384MB\ndisk_bytes_per_s: 1MB/s\nmemory_bytes_per_s: 10GB/s\ngemm: {1: 1.0e9, 64: 1.0e10}\n"
        "compute_dtype: float32\nname: slow\n"
    )
    chosen = config(hardware=str(file), gradient_checkpointing=True)
    with _opened(chosen) as model:
        machine = named_machine(chosen, read_hardware(str(file)))
        most = model.plan(machine)
        assert most.prediction.read_bytes == 0
        kept = 300_000
        spare = machine.ram_limit - tier_memory(most)["ram"].total
        # of 1 GB, plan_budget leaves 64 MB alone
        run = model.plan(replace(machine, ram_limit=machine.ram_limit - spare + 64_000_000 - kept))
        found = {row.name: row.detail for row in sections(run, "tiny")["What 1 GB more would buy"]}
        assert run.prediction.bound_by == "disk" and run.prediction.read_bytes > 0
        saved = run.prediction.step_s - run.step_s(ram=run.machine.ram_limit + 1_000_000_000)
    assert saved == pytest.approx(run.prediction.read_bytes / 1e6, rel=0.2)
    assert list(found) == ["of RAM"] and found["of RAM"].startswith(f"{1000 * saved:.3g} ms" if saved < 1 else "")


def test_rows_say_how_long_a_step_is(
    config: Callable[..., LemaConfig], tmp_path: Path, make_rows: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = make_rows(tmp_path / "rows.jsonl", [{"input_ids": list(range(5, 5 + n))} for n in (4, 9, 6)])
    out = io.StringIO()
    print_plan(config(train_file=str(rows), hardware="h200"), out)
    assert "1 x 1 rows of 6 tokens and 5 targets in the mean; memory is for rows of 9" in out.getvalue()
    before = set(tmp_path.iterdir())
    print_plan(config(train_file="demo", hardware="h200", max_seq_length=256), out)
    assert set(tmp_path.iterdir()) == before, "the demo's rows are not left behind"


def test_from_the_command_line_with_a_plot(
    tiny_llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    options = [f"model_name_or_path={tiny_llama}", "task=plan", "hardware=rtx4090", f"output_dir={tmp_path / 'out'}"]
    assert main([*options, "plot=true", "max_seq_length=16"]) == 0
    assert capsys.readouterr().out.endswith(f"drawn in {tmp_path / 'out/plan.png'}\n")
    assert (tmp_path / "out/plan.png").read_bytes().startswith(b"\x89PNG")


def test_a_place_that_cannot_be_drawn_to(config: Callable[..., LemaConfig], tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    chosen = config(output_dir=str(tmp_path / "file/out"), hardware="t4", plot=True)
    with _opened(chosen) as model:
        run = model.plan(named_machine(chosen, named_hardware("t4")))
        with pytest.raises(ConfigError, match=r"output_dir: .*file/out: cannot be made"):
            draw(run, chosen)


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ("t5", "hardware: unknown name 't5'; known: h200, rtx4090, t4; or give a FILE.yaml"),
        ("rtx409", "did you mean 'rtx4090'?"),
        ("gone.yaml", "hardware gone.yaml: No such file"),
        ("no/such/file", "hardware no/such/file: No such file"),
    ],
)
def test_machines_that_nobody_knows(value: str, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_hardware(value)
    assert said in str(caught.value) and "\n" not in str(caught.value)


def test_a_machine_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("like: t4\nlink_bytes_per_s: 24GB/s\ngemm: {64: 1.0e13, 256: 2.0e13}\n")
    found = read_hardware(str(file))
    assert (found.link_bytes_per_s, found.gemm) == (24e9, ((64, 1e13), (256, 2e13)))
    assert found.device_bytes == named_hardware("t4").device_bytes
    file.write_text("like: t4\nlnk_bytes_per_s: 1\n")
    with pytest.raises(ConfigError, match=r"mine\.yaml: unknown field 'lnk_bytes_per_s'.*'link_bytes_per_s'"):
        read_hardware(str(file))


def test_a_terminal_gets_tables(config: Callable[..., LemaConfig], monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setenv("TERM", "xterm")
    out = Terminal()
    print_plan(config(hardware="t4"), out)
    assert "\x1b[" in out.getvalue() and "bound by" in out.getvalue()


def test_what_was_measured_leaves_out_the_first_step_but_not_its_peak() -> None:
    steps = [
        {
            "step_s": seconds, "wait_s": seconds / 10, "read_bytes": read + 7, "demand_bytes": 7,
            "written_bytes": read,
            "device_peak_bytes": 0, "ram_peak_bytes": peak, "rss_peak_bytes": 10 * peak,
        }
        for seconds, read, peak in ((9.0, 900, 70), (1.0, 100, 60), (3.0, 300, 60), (2.0, 200, 60))
    ]  # fmt: skip
    found = measured(iter(steps))
    assert found == {
        "step_s": 2.0, "wait_s": 0.2, "read_bytes": 200, "written_bytes": 200, "device_peak_bytes": 0,
        "ram_peak_bytes": 70, "process_peak_bytes": 700,
    }  # fmt: skip
    assert measured(steps[:1])["step_s"] == 9.0 and measured([]) is None


def test_a_plan_of_weights_that_train_says_what_their_states_move(
    config: Callable[..., LemaConfig], tmp_path: Path, make_rows: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bytes written as planned; reads, but for what is still in a slot when it is wanted again."""
    take = StateStream.take

    def take_from_a_fast_disk(stream: StateStream, *which: Any, **how: Any) -> Tensor:
        """What is taken again before its turn to be written has come is not written in between."""
        with stream._moved:
            stream._wait(lambda: not stream._to_write)
        return take(stream, *which, **how)

    monkeypatch.setattr(StateStream, "take", take_from_a_fast_disk)
    rows = make_rows(tmp_path / "rows.jsonl", [{"input_ids": [5, 6, 7, 8, 9, 10]}] * 6)
    options = {
        "training_mode": "selective_full",
        "lora_rank": 16,
        "weights_ram": "300KB",
        "opt_state_ram": "1B",
        "grad_acc_ram": "1B",
    }
    run = config(task="train", train_file=str(rows), max_steps=6, **options)
    out = io.StringIO()
    print_plan(config(task="plan", **options), out)
    assert "moments, gradients, new weights" in out.getvalue()
    summary = tasks.train(run)
    prediction, found = summary["prediction"], summary["measured"]
    assert found["written_bytes"] == prediction["written_bytes"] > 0
    assert 0.6 * prediction["read_bytes"] <= found["read_bytes"] <= prediction["read_bytes"]


def test_a_run_writes_the_prediction_beside_what_was_measured(
    config: Callable[..., LemaConfig], tmp_path: Path, make_rows: Any
) -> None:
    rows = make_rows(tmp_path / "rows.jsonl", [{"input_ids": [5, 6, 7, 8, 9, 10]}] * 4)
    run = config(task="train", train_file=str(rows), max_steps=4, weights_ram="300KB")
    summary = tasks.train(run)
    written = json.loads((tmp_path / "out/summary.json").read_text())
    assert written["prediction"] == summary["prediction"] and written["measured"] == summary["measured"]
    prediction, found = written["prediction"], written["measured"]
    assert set(found) <= set(prediction) and prediction["step_s"] > 0
    steps = list(read_steps(tmp_path / "out"))
    assert found["read_bytes"] == sorted(step["read_bytes"] - step["demand_bytes"] for step in steps[1:])[1]
    assert found["ram_peak_bytes"] <= prediction["ram_peak_bytes"] and prediction["read_bytes"] > 0
    with _opened(run) as model:
        model.expect_tokens(6)
        again = predicted(model.plan())
    assert {name: again[name] for name in ("read_bytes", "ram_peak_bytes")} == {
        name: prediction[name] for name in ("read_bytes", "ram_peak_bytes")
    }
