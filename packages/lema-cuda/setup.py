"""Builds csrc/ into ``lema_cuda/liblema.so`` with the C++ compiler of this machine, for a ``py3-none-PLATFORM`` wheel.

Where that fails the package is installed all the same: ``lema_cuda/build.json`` keeps the reason, which
``python -m lema task=doctor`` shows, and lema computes with plain torch.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

SOURCES = Path("csrc/cpu")
EDITABLE = Path("src/lema_cuda")
BUILD_RECORD = "build.json"
COMMON = (
    "-std=c++17",
    "-O3",
    "-fPIC",
    "-fvisibility=hidden",
    "-fno-exceptions",
    "-fno-rtti",
    # a multiply-add is fused where the code says so, and nowhere else
    "-ffp-contract=off",
    "-pthread",
    "-Wall",
    "-Wextra",
)
#: files of this ending are compiled for these instructions and entered only where the CPU has them
BY_ENDING = {"_avx2": ("-mavx2", "-mfma", "-mf16c")}
X86_64 = ("x86_64", "amd64")


class NotBuilt(Exception):
    """Why there is no library, in one line."""


def compiler() -> str:
    named = os.environ.get("CXX")
    for name in [named] if named else ["g++", "clang++"]:
        if found := shutil.which(name):
            return found
    raise NotBuilt(f"no C++ compiler {named} was found" if named else "no C++ compiler (g++ or clang++) was found")


def run(*command: str) -> str:
    child = subprocess.run(command, capture_output=True, text=True, check=False)
    if child.returncode:
        said = (child.stderr or child.stdout).strip().splitlines() or [f"exit status {child.returncode}"]
        error = next((line for line in said if "error" in line), said[0])
        raise NotBuilt(f"{Path(command[0]).name} failed: {error.strip()}")
    return child.stdout


def build_library(objects: Path, library: Path) -> str:
    """Compile every file of csrc/cpu and link them; returns the compiler's name and version."""
    if platform.machine().lower() not in X86_64:
        raise NotBuilt(f"there are kernels for x86-64 only, this machine is {platform.machine() or 'unknown'}")
    cxx = compiler()
    made = []
    for source in sorted(SOURCES.glob("*.cpp")):
        flags = next((flags for ending, flags in BY_ENDING.items() if source.stem.endswith(ending)), ())
        made.append(str(objects / f"{source.stem}.o"))
        run(cxx, *COMMON, *flags, "-c", str(source), "-o", made[-1])
    run(cxx, "-shared", "-pthread", *made, "-o", str(library))
    return run(cxx, "--version").splitlines()[0]


class BuildLibrary(build_ext):
    """One library without Python in it, instead of an extension module."""

    def get_ext_filename(self, fullname: str) -> str:
        return f"{fullname.replace('.', '/')}.so"

    def build_extension(self, ext: Extension) -> None:
        library = Path(self.get_ext_fullpath(ext.name)).absolute()
        objects = Path(self.build_temp)
        for folder in (library.parent, objects):
            folder.mkdir(parents=True, exist_ok=True)
        library.unlink(missing_ok=True)
        record: dict[str, str | None] = {"compiler": None, "reason": None}
        try:
            record["compiler"] = build_library(objects, library)
        except NotBuilt as error:
            record["reason"] = str(error)
            self.warn(f"liblema was not built: {error}")
        (library.parent / BUILD_RECORD).write_text(json.dumps(record) + "\n", encoding="utf-8")

    def copy_extensions_to_source(self) -> None:
        # of an editable install. A library that a process has open must be replaced, not overwritten.
        (EDITABLE / "liblema.so").unlink(missing_ok=True)
        super().copy_extensions_to_source()
        shutil.copy(Path(self.build_lib) / "lema_cuda" / BUILD_RECORD, EDITABLE / BUILD_RECORD)


class PlatformWheel(bdist_wheel):
    """No Python and no torch in the library: one wheel serves every version of both."""

    def finalize_options(self) -> None:
        super().finalize_options()
        self.root_is_pure = False

    def get_tag(self) -> tuple[str, str, str]:
        return "py3", "none", super().get_tag()[2]


setup(
    ext_modules=[Extension("lema_cuda.liblema", sources=[], optional=True)],
    cmdclass={"build_ext": BuildLibrary, "bdist_wheel": PlatformWheel},
)
