"""What the README tells people to type and to look at is there."""

from __future__ import annotations

import ast
import re
import types
from pathlib import Path

import pytest

from lema_core.plugins import PluginManager

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


def sessions() -> set[str]:
    module = ast.parse((ROOT / "noxfile.py").read_text())
    functions = [node for node in module.body if isinstance(node, ast.FunctionDef)]
    return {each.name for each in functions if any(ast.unparse(mark) == "nox.session" for mark in each.decorator_list)}


def test_every_session_it_names_exists() -> None:
    named = set(re.findall(r"nox -s ([a-z_]+)", README))
    assert {"demo", "tests", "dev"} <= named <= sessions()


@pytest.mark.parametrize("path", sorted({*re.findall(r"\]\(([^)#:]+)\)", README), *re.findall(r" \./(\S+)", README)}))
def test_every_path_it_names_exists(path: str) -> None:
    assert (ROOT / path).exists()


def test_every_project_is_in_its_table() -> None:
    for pyproject in ROOT.glob("p*/*/pyproject.toml"):
        folder = pyproject.parent.relative_to(ROOT).as_posix()
        assert f"| `{folder}` | `{pyproject.parent.name.replace('-', '_')}` |" in README


def test_its_plugin_is_a_plugin() -> None:
    code = next(block for block in re.findall(r"```python\n(.*?)```", README, re.DOTALL) if "hookimpl" in block)
    plugin = types.ModuleType("lema_qwen.plugin")
    exec(compile(code, "README.md", "exec"), vars(plugin))
    manager = PluginManager()
    assert manager.admit("lema-qwen", "qwen", lambda: plugin), manager.problems
    assert list(manager.architectures()) == ["qwen2"]


def test_it_never_sends_people_to_an_index_for_lema() -> None:
    assert not re.search(r"pip install ['\"]?lema", README)
