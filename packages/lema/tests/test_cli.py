"""The command line: exit codes, one line per mistake, tracebacks only when asked for, and what --help shows."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import lema
from lema.cli import help_text, main
from lema.compose import group_choices
from lema.config import LemaConfig
from lema_core.errors import BudgetError, CheckpointError, ConfigError, DataError, LemaError, NonFiniteError
from lema_core.plugins import get_plugin_manager

RunTask = Callable[..., dict[str, Any]]
MODEL = "model_name_or_path=./model"


@pytest.fixture
def run_task(monkeypatch: pytest.MonkeyPatch) -> Callable[[RunTask], None]:
    """Put a function in the place of every task."""

    def use(function: RunTask) -> None:
        tasks: Any = SimpleNamespace(train=function, evaluate=function, generate=function)
        monkeypatch.setitem(sys.modules, "lema.tasks", tasks)
        monkeypatch.setattr(lema, "tasks", tasks, raising=False)

    return use


def _fails(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str]:
    """Exit code and what is on stderr, which must be one line of lema's."""
    code = main(argv)
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.startswith("lema: ") and captured.err.count("\n") == 1
    return code, captured.err


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["learning_rat=1e-4"], "did you mean 'learning_rate'?"),
        (["+learning_rat=1e-4"], "did you mean 'learning_rate'?"),
        (["+lr=1e-4"], "unknown option 'lr'"),
        (["+model=smolm2"], "did you mean 'smollm2_135m'?"),
        (["quant=torchoa"], "known: bitsandbytes, custom, none, quanto, torchao; did you mean 'torchao'?"),
        ([MODEL, "task=quantize", "output_dir=out"], "weights_bits=8 or weights_bits=4"),
        ([MODEL, "task=quantize", "weights_bits=8"], "a folder of its own: output_dir=FOLDER"),
        (["+qwen=big"], "unknown option 'qwen'"),
        (["learning_rate=abc"], "learning_rate: 'abc'"),
        (["--learning-rate=1e-4"], "write learning_rate=1e-4"),
        (["--learning_rate", "1e-4"], "write learning_rate=..."),
        (["--multirun", "seed=1"], "known: --help, --version, --config"),
        (["-m"], "unknown flag '-m'"),
        (["--config"], "--config"),
        (["--config", "nowhere.yaml"], "nowhere.yaml: No such file"),
        (["task=train"], "needs a model: +model=NAME (gpt2, lfm2"),
        ([MODEL], "needs rows: train_file"),
        ([MODEL, "task=generate"], "needs a prompt"),
        ([MODEL, "task=evaluate"], "needs rows: eval_file"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(
    argv: list[str], said: str, capsys: pytest.CaptureFixture[str], run_task: Callable[[RunTask], None]
) -> None:
    run_task(lambda config: pytest.fail("the task must not start"))
    code, line = _fails(capsys, *argv)
    assert code == 2 and line.startswith("lema: error: ") and said in line


def test_a_misspelt_key_in_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("learning_rat: 1e-4\n")
    code, line = _fails(capsys, f"--config={file}")
    assert code == 2 and "run.yaml" in line and "did you mean 'learning_rate'?" in line


def test_the_traceback_comes_with_debug_only(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["learning_rat=1", "debug=true"]) == 2
    error = capsys.readouterr().err
    assert "Traceback" in error and error.splitlines()[-1].startswith("lema: error: unknown option")


def test_debug_in_a_file_counts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], run_task: Callable[[RunTask], None]
) -> None:
    def fail(config: LemaConfig) -> dict[str, Any]:
        raise DataError("rows.jsonl:3: no text")

    run_task(fail)
    file = tmp_path / "run.yaml"
    file.write_text("debug: true\nmodel_name_or_path: m\ntrain_file: rows.jsonl\n")
    assert main(["--config", str(file)]) == 1
    assert "Traceback" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (ConfigError("a: b"), 2, "lema: error: a: b"),
        (CheckpointError("a\n  b"), 1, "lema: error: a b"),
        (BudgetError("a"), 1, "lema: error: a"),
        (NonFiniteError("a"), 1, "lema: error: a"),
        (KeyboardInterrupt(), 130, "lema: interrupted"),
        (RuntimeError("a defect"), 1, "lema: error: RuntimeError: a defect; debug=true shows where"),
    ],
)
def test_exit_codes(
    error: BaseException,
    code: int,
    line: str,
    capsys: pytest.CaptureFixture[str],
    run_task: Callable[[RunTask], None],
) -> None:
    def fail(config: LemaConfig) -> dict[str, Any]:
        raise error

    run_task(fail)
    assert _fails(capsys, MODEL, "train_file=x") == (code, line + "\n")


def test_every_error_of_lema_has_an_exit_code_that_is_not_success() -> None:
    assert all(each.exit_code in (1, 2) for each in LemaError.__subclasses__())


@pytest.mark.parametrize("task", ["train", "evaluate", "generate"])
def test_a_task_gets_the_config_and_its_summary_is_printed(
    task: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], run_task: Callable[[RunTask], None]
) -> None:
    seen: list[LemaConfig] = []

    def succeed(config: LemaConfig) -> dict[str, Any]:
        seen.append(config)
        return {"loss": 1.25, "output_dir": Path("out")}

    run_task(succeed)
    assert main([MODEL, f"task={task}", "prompt=hi", "train_file=t", "eval_file=e", "max_steps=3"]) == 0
    assert (seen[0].task, seen[0].max_steps, seen[0].model_name_or_path) == (task, 3, "./model")
    assert capsys.readouterr().out.splitlines() == ["loss        1.25", f"output_dir  {Path('out').absolute()}"]


@pytest.mark.parametrize("ref", ["./no/such/dir", "/abs/missing"])
def test_a_wrong_path_to_a_model_is_named(
    ref: str, capsys: pytest.CaptureFixture[str], run_task: Callable[[RunTask], None]
) -> None:
    run_task(lambda config: {"model": get_plugin_manager().locate_checkpoint(config.model_name_or_path)})
    code, line = _fails(capsys, f"model_name_or_path={ref}", "train_file=x")
    assert code == 1 and str(Path(ref)) in line


def test_help_names_every_option_with_its_default_and_every_choice() -> None:
    text = help_text(100)
    for name in LemaConfig.options():
        assert f"  {name}=" in text
    for group, choices in group_choices().items():
        for name in choices:
            assert f"  +{group}={name}" in text
    assert "learning_rate=0.0001" in text and "strategy=streaming" in text and "max_steps=null" in text
    assert all(len(line) <= 120 for line in text.splitlines())


@pytest.mark.parametrize("argv", [[], ["--help"], ["-h"], ["seed=3", "--help"]])
def test_help_is_shown(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(argv) == 0
    assert capsys.readouterr().out.startswith("usage: python -m lema +model=NAME")


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("lema 0.")


def test_from_outside(tmp_path: Path) -> None:
    """The program itself, in another folder: exit code, one line, nothing written, no torch for a mistyped flag."""
    code = "import sys\nfrom lema.cli import main\nsys.modules['torch'] = None\nsys.exit(main(sys.argv[1:]))"
    program = [sys.executable, "-c", code]
    result = subprocess.run([*program, "--learning_rat=1"], cwd=tmp_path, capture_output=True, text=True)
    assert (result.returncode, result.stdout) == (2, "") and result.stderr.count("\n") == 1
    whole = [sys.executable, "-m", "lema", "+model=smolm2"]
    result = subprocess.run(whole, cwd=tmp_path, capture_output=True, text=True)
    assert (result.returncode, result.stdout) == (2, "") and "did you mean" in result.stderr
    assert result.stderr.count("\n") == 1 and list(tmp_path.iterdir()) == []
