"""Plugins as pip would leave them: a distribution in a folder of sys.path, seen by a fresh interpreter.

Each faulty one must be left out with one warning that names it, and must not keep a good neighbour from loading.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from textwrap import dedent

import pytest

GOOD = """
    from lema_core.hookspecs import hookimpl
    from lema_core.records import Architecture

    @hookimpl
    def lema_architectures():
        yield Architecture({name!r}, model_types=({name!r},), adapter="nowhere:Nothing")
"""

IMPORTS = "from lema_core.hookspecs import hookimpl\nfrom lema_core.records import Architecture, TrainingMethod\n"

FAULTS = {
    "import": ("raise RuntimeError('broken\\nat line two')", "RuntimeError: broken at line two"),
    "missing dependency": ("import no_such_module_anywhere", "No module named 'no_such_module_anywhere'"),
    "exits": ("import sys; sys.exit(3)", "SystemExit: 3"),
    "syntax": ("def broken(:", "SyntaxError"),
    "unknown hook": (IMPORTS + "@hookimpl\ndef lema_architecturs(): return []", "lema_architecturs"),
    "unknown argument": (IMPORTS + "@hookimpl\ndef lema_run_started(konfig): pass", "konfig"),
    "no hook": ("def lema_architectures(): return []", "implements no hook"),
    "hook raises": (IMPORTS + "@hookimpl\ndef lema_architectures(): raise KeyError('oops')", "KeyError: 'oops'"),
    "no record": (
        IMPORTS + "@hookimpl\ndef lema_architectures(): return ['llama']",
        "yields 'llama', expected Architecture",
    ),
    "other record": (
        IMPORTS + "@hookimpl\ndef lema_architectures(): return [TrainingMethod('x', 'y:Z')]",
        "expected Architecture",
    ),
    "no iterable": (
        IMPORTS + "@hookimpl\ndef lema_architectures(): return Architecture('x', (), 'y:Z')",
        "expected an iterable of Architecture",
    ),
    "string for tuple": (
        IMPORTS + "@hookimpl\ndef lema_architectures(): return [Architecture('x', ('xx'), 'y:Z')]",
        "model_types 'xx', expected a tuple",
    ),
    "taken name": (
        IMPORTS + "@hookimpl\ndef lema_architectures(): return [Architecture('good', (), 'y:Z')]",
        "architecture 'good', which a-good has already",
    ),
    "taken model type": (
        IMPORTS + "@hookimpl\ndef lema_architectures(): return [Architecture('other', ('good',), 'y:Z')]",
        "for model_type 'good', which a-good has already",
    ),
    "own name twice": (
        IMPORTS + "@hookimpl\ndef lema_architectures(): return [Architecture('x', (), 'y:Z')] * 2",
        "architecture 'x', which faulty-own-name-twice has already",
    ),
}

PROBE = """
import json
from lema_core.plugins import get_plugin_manager

manager = get_plugin_manager()
assert get_plugin_manager() is manager
print(json.dumps({
    "packages": manager.packages,
    "architectures": list(manager.architectures()),
    "problems": [[each.package, each.error] for each in manager.problems],
}))
"""


def install(folder: Path, package: str, code: str) -> None:
    """What pip leaves of a package with one module and one entry point."""
    module = package.replace("-", "_")
    (folder / f"{module}.py").write_text(dedent(code))
    info = folder / f"{module}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[lema]\nplugin = {module}\n")


def probe(folder: Path, **environment: str) -> tuple[dict[str, list], str]:
    child = subprocess.run(
        [sys.executable, "-c", PROBE],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), *sys.path]), **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert child.returncode == 0, child.stderr
    return json.loads(child.stdout), child.stderr


def package_of(fault: str) -> str:
    return "faulty-" + fault.replace(" ", "-")


@pytest.fixture(scope="module")
def all_faults_at_once(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, list], str]:
    folder = tmp_path_factory.mktemp("site-packages")
    install(folder, "a-good", GOOD.format(name="good"))
    install(folder, "z-good", GOOD.format(name="also_good"))
    for fault, (code, _) in FAULTS.items():
        install(folder, package_of(fault), code)
    return probe(folder)


@pytest.mark.parametrize("fault", sorted(FAULTS))
def test_faulty_plugin_is_left_out_with_one_warning(
    fault: str, all_faults_at_once: tuple[dict[str, list], str]
) -> None:
    answer, stderr = all_faults_at_once
    package = package_of(fault)
    errors = [error for problem_package, error in answer["problems"] if problem_package == package]
    assert len(errors) == 1
    assert FAULTS[fault][1] in errors[0]
    assert "\n" not in errors[0]
    assert package not in answer["packages"]
    warnings = [line for line in stderr.splitlines() if f"package {package} " in line]
    assert len(warnings) == 1
    assert errors[0] in warnings[0]


def test_neighbours_of_faulty_plugins_load(all_faults_at_once: tuple[dict[str, list], str]) -> None:
    answer, stderr = all_faults_at_once
    assert {"good", "also_good"} <= set(answer["architectures"])
    assert {"a-good", "z-good"} <= set(answer["packages"])
    assert len([package for package, _ in answer["problems"] if package.startswith("faulty-")]) == len(FAULTS)
    assert "Traceback" not in stderr


def test_order_is_own_packages_first_then_by_name(tmp_path: Path) -> None:
    for package in ("zebra", "a-good", "Middle_One"):
        install(tmp_path, package, GOOD.format(name=package))
    packages = probe(tmp_path)[0]["packages"]
    own = [
        package
        for package in ("lema-core", "lema-models", "lema-cuda", "lema-quant", "lema-train", "lema")
        if package in packages
    ]
    assert own[0] == "lema-core"
    assert packages[: len(own)] == own
    assert packages[len(own) :] == sorted(packages[len(own) :])
    assert {"a-good", "middle-one", "zebra"} <= set(packages[len(own) :])


def test_plugins_can_be_switched_off_by_name(tmp_path: Path) -> None:
    install(tmp_path, "faulty", "raise RuntimeError('broken')")
    install(tmp_path, "a-good", GOOD.format(name="good"))
    answer, stderr = probe(tmp_path, LEMA_DISABLE_PLUGINS="Faulty, a_good")
    assert not {"faulty", "a-good"} & set(answer["packages"])
    assert "faulty" not in stderr


def test_nothing_heavy_is_imported_to_list_plugins() -> None:
    """Naming models must not load them."""
    code = dedent("""
        import sys
        from lema_core.plugins import get_plugin_manager

        get_plugin_manager()
        heavy = "transformers", "peft", "lema_models.llama", "lema_train.lora"
        print([name for name in heavy if name in sys.modules])
    """)
    child = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert child.stdout.strip() == "[]"
