"""Who may import whom, over everything under packages/ and plugins/ that is there."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from importlib import metadata
from itertools import chain
from pathlib import Path

import pytest

from lema_core.plugins import PluginManager, get_plugin_manager
from lema_core.records import load_object

ROOT = Path(__file__).parents[1]
PROJECTS = {path.parent.name: path.parent for path in sorted(ROOT.glob("p*/*/pyproject.toml"))}
PLUGINS = [name for name, path in PROJECTS.items() if path.parent.name == "plugins"]


def normalise(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def module_of(project: str) -> str:
    return project.replace("-", "_")


def imports_of(file: Path) -> set[str]:
    """Top-level names of the absolute imports in a file, wherever in it they stand."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            found.add(node.module.partition(".")[0])
    return found


def outside_imports(project: str) -> set[str]:
    """What a project's code imports, less the standard library and itself."""
    found = set().union(*(imports_of(file) for file in (PROJECTS[project] / "src").rglob("*.py")))
    return found - set(sys.stdlib_module_names) - {module_of(project)}


def test_import_contracts_hold() -> None:
    pytest.importorskip("importlinter")
    run = "from importlinter.cli import lint_imports_command as run; run()"
    child = subprocess.run([sys.executable, "-c", run], cwd=ROOT, capture_output=True, text=True, check=False)
    assert child.returncode == 0, child.stdout + child.stderr


@pytest.mark.parametrize("project", sorted(PROJECTS))
def test_what_is_imported_is_declared(project: str) -> None:
    tomllib = pytest.importorskip("tomllib")
    pyproject = tomllib.loads((PROJECTS[project] / "pyproject.toml").read_text())
    extras = pyproject["project"].get("optional-dependencies", {}).values()
    needed = chain(pyproject["project"]["dependencies"], *extras)
    declared = {normalise(re.match(r"[\w.-]+", each)[0]) for each in needed}
    distributions = metadata.packages_distributions()
    undeclared = {
        module
        for module in outside_imports(project)
        if not declared & {normalise(each) for each in distributions.get(module, [module])}
    }
    assert not undeclared, f"{project} imports {sorted(undeclared)}, which its pyproject.toml does not declare"


@pytest.mark.parametrize("plugin", PLUGINS)
def test_plugins_import_lema_core_and_nothing_else_of_lema(plugin: str) -> None:
    own = {module_of(name) for name in PROJECTS} - {"lema_core"}
    assert not outside_imports(plugin) & own


def test_core_depends_on_three_packages() -> None:
    assert outside_imports("lema-core") <= {"torch", "safetensors", "pluggy"}


def test_importing_lema_loads_no_oracle() -> None:
    heavy = ("transformers", "peft", "accelerate", "huggingface_hub", "torchao", "pandas", "scipy")
    code = f"import sys, lema; print([name for name in {heavy} if name in sys.modules])"
    child = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert child.stdout.strip() == "[]"


def test_everything_installed_here_loads() -> None:
    manager = get_plugin_manager()
    assert not manager.problems
    assert set(PROJECTS) <= set(manager.packages)


def records_with_code(manager: PluginManager) -> dict[str, str]:
    named = {f"architecture {each.name}": each.adapter for each in manager.architectures().values()}
    named |= {f"kernel {each.name} for {each.op}": each.impl for each in manager.kernels()}
    named |= {f"training method {each.name}": each.method for each in manager.training_methods().values()}
    named |= {f"state codec {each.name}": each.codec for each in manager.state_codecs().values()}
    return named


def test_every_record_names_code_that_exists() -> None:
    for what, path in records_with_code(get_plugin_manager()).items():
        assert callable(load_object(path)), what
