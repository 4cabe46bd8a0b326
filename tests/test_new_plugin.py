"""tools/new_plugin.py: what it makes is a plugin, and passes its own tests."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
TOOL = ROOT / "tools/new_plugin.py"


def run_tool(*arguments: str) -> subprocess.CompletedProcess[str]:
    # -I -S: nothing but the standard library
    return subprocess.run([sys.executable, "-I", "-S", str(TOOL), *arguments], capture_output=True, text=True)


def installed(plugin: Path, site: Path) -> dict[str, str]:
    """The environment in which ``plugin`` is installed as pip would leave an editable one."""
    pyproject = (plugin / "pyproject.toml").read_text()
    (name,) = re.findall(r'^name = "(.+)"$', pyproject, re.MULTILINE)
    (entry,) = re.findall(r'\[project\.entry-points\.lema\]\n(\S+ = )"(\S+)"', pyproject)
    info = site / f"{name.replace('-', '_')}-0.1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 0.1.0\n")
    (info / "entry_points.txt").write_text(f"[lema]\n{''.join(entry)}\n")
    path = os.pathsep.join([str(plugin / "src"), str(site), os.environ.get("PYTHONPATH", "")])
    return {**os.environ, "PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1"}


@pytest.fixture(scope="module")
def plugin(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("plugins")
    made = run_tool("deep-thought", "--into", str(folder))
    assert made.returncode == 0 and not made.stderr, made.stderr
    return folder / "lema-deep-thought"


def run_tests(plugin: Path, site: Path, *arguments: str) -> str:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments, str(plugin)]
    run = subprocess.run(command, capture_output=True, text=True, env=installed(plugin, site), cwd=plugin)
    assert run.returncode == 0, run.stdout + run.stderr
    return run.stdout


def test_it_is_found_and_computes(plugin: Path, tmp_path: Path) -> None:
    """The quickest of its own tests; test_its_tests_pass runs all."""
    chosen = "plugin or (plain and (every_tensor or logits_and_loss))"
    assert " passed" in run_tests(plugin, tmp_path, "-k", chosen)


@pytest.mark.slow
def test_its_tests_pass(plugin: Path, tmp_path: Path) -> None:
    assert " passed" in run_tests(plugin, tmp_path)


def test_its_files(plugin: Path) -> None:
    """None of the example's is left out by mistake, no name of the example's package stays, README tells the truth."""
    files = {str(path.relative_to(plugin)): path.read_text() for path in plugin.rglob("*") if path.is_file()}
    assert sorted(files) == [
        "CHANGELOG.md",
        "README.md",
        "pyproject.toml",
        "src/lema_deep_thought/__init__.py",
        "src/lema_deep_thought/conf/__init__.py",
        "src/lema_deep_thought/conf/model/deep_thought.yaml",
        "src/lema_deep_thought/deep_thought.py",
        "src/lema_deep_thought/plugin.py",
        "src/lema_deep_thought/py.typed",
        "tests/test_deep_thought_plugin.py",
        "tests/test_deep_thought_suite.py",
    ]
    for name, text in files.items():
        stale = re.findall(r"lema.qwen|qwen2_5|qwen3|Qwen2(?:Adapter|Config)|\{\w+\}/", text)
        assert not stale, f"{name}: {stale}"
    for path in re.findall(r"`((?:src|tests)/\S+)`", files["README.md"]):
        assert path in files


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("lema-falcon", "give the name without lema"),
        ("Falcon", "small letters"),
        ("deep_thought", "small letters"),
        ("deep--thought", "small letters"),
        ("9b", "a letter first"),
        ("../falcon", "small letters"),
        ("class", "cannot name a module"),
        ("plugin", "cannot name a module"),
        ("core", "packages/lema-core exists already"),
        ("taken", "lema-taken exists already"),
    ],
)
def test_names_that_are_refused(name: str, words: str, tmp_path: Path) -> None:
    """In one line, and nothing is written."""
    (tmp_path / "lema-taken").mkdir()
    before = sorted(tmp_path.rglob("*"))
    refused = run_tool(name, "--into", str(tmp_path))
    assert refused.returncode == 2 and not refused.stdout
    assert words in refused.stderr and refused.stderr.count("\n") == 1
    assert sorted(tmp_path.rglob("*")) == before


def test_the_default_is_the_plugins_folder() -> None:
    refused = run_tool("qwen")
    assert refused.returncode == 2 and str(ROOT / "plugins/lema-qwen") in refused.stderr
