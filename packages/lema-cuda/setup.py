"""Builds csrc/cpu into ``lema_cuda/liblema.so`` with the C++ compiler of this machine, and csrc/cuda into
``lema_cuda/liblema_cuda.so`` with nvcc, for a ``py3-none-PLATFORM`` wheel.

Where that fails the package is installed all the same: ``lema_cuda/build.json`` keeps the reason, which
``python -m lema task=doctor`` shows, and lema computes and copies with plain torch.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

CSRC = Path("csrc")
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
AVX2 = ("-mavx2", "-mfma", "-mf16c")
#: g++ 12 warns of its own headers of AVX-512, where registers begin with themselves
UNWARNED = ("-Wno-uninitialized", "-Wno-maybe-uninitialized")
AVX512 = (*AVX2, "-mavx512f", "-mavx512dq", "-mavx512bw", "-mavx512vl", *UNWARNED)
VNNI = (*AVX512, "-mavx512vnni")
AMX = (*AVX512, "-mavx512bf16", "-mamx-tile", "-mamx-bf16", "-mamx-int8")
BY_ENDING = {"_avx2": AVX2, "_avx512": AVX512, "_vnni": VNNI, "_amx": AMX}
X86_64 = ("x86_64", "amd64")
NVCC_HOST = (
    "-std=c++17",
    "-O2",
    "-Xcompiler=-fPIC,-fvisibility=hidden,-fno-exceptions,-fno-rtti,-Wall,-Wextra",
    "-cudart=none",
)
NVCC_DEVICE = (
    "-std=c++17",
    "-O3",
    # as above: a multiply-add is fused where the code says so
    "-fmad=false",
    # a wheel is compressed anyway, and drivers read no compression that is newer than they are
    "-no-compress",
)
#: binaries for these compute capabilities; 8.6, 8.7 and 8.9 run what is for 8.0, and newer ones translate the last when
#: kernels are first loaded
CUDA_ARCHITECTURES = "75 80 90"
ARCHITECTURES_VARIABLE = "LEMA_CUDA_ARCHITECTURES"
CUDA_HOMES = ("CUDA_HOME", "CUDA_PATH")


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


def knows(cxx: str, flags: tuple[str, ...]) -> bool:
    """Whether the compiler takes these flags: what is compiled for newer instructions is left out where it does not."""
    command = (cxx, *flags, "-x", "c++", "-E", os.devnull)
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


def build_cpu(objects: Path, library: Path) -> str:
    """Compile every file of csrc/cpu and link them; returns the compiler's name and version."""
    if platform.machine().lower() not in X86_64:
        raise NotBuilt(f"there are kernels for x86-64 only, this machine is {platform.machine() or 'unknown'}")
    cxx = compiler()

    by_ending = {ending: flags for ending, flags in BY_ENDING.items() if knows(cxx, flags)}

    def compile_one(source: Path) -> str:
        flags = next((flags for ending, flags in by_ending.items() if source.stem.endswith(ending)), ())
        made = str(objects / f"{source.stem}.o")
        run(cxx, *COMMON, *flags, "-c", str(source), "-o", made)
        return made

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        made = list(pool.map(compile_one, sorted((CSRC / "cpu").glob("*.cpp"))))
    run(cxx, "-shared", "-pthread", *made, "-o", str(library))
    return run(cxx, "--version").splitlines()[0]


def nvcc() -> str:
    named = os.environ.get("CUDACXX")
    homes = [os.environ[name] for name in CUDA_HOMES if os.environ.get(name)]
    places = [named] if named else ["nvcc", *(f"{home}/bin/nvcc" for home in [*homes, "/usr/local/cuda"])]
    for place in places:
        if found := shutil.which(place):
            return found
    raise NotBuilt(f"no CUDA compiler {named} was found" if named else "no CUDA compiler (nvcc) was found")


def build_cuda(objects: Path, library: Path) -> str:
    """Compile the device code for every architecture, and link it with every other file of csrc/cuda; returns nvcc's
    version."""
    compile_cuda, host = nvcc(), f"-ccbin={compiler()}"
    architectures = (os.environ.get(ARCHITECTURES_VARIABLE) or CUDA_ARCHITECTURES).split()
    targets = [f"-gencode=arch=compute_{each},code=sm_{each}" for each in architectures]
    targets.append(f"-gencode=arch=compute_{architectures[-1]},code=compute_{architectures[-1]}")
    device_code = (objects / "kernels.fatbin").absolute()
    kernels = str(CSRC / "cuda/kernels.cu")
    run(compile_cuda, *NVCC_DEVICE, *targets, host, "--threads=0", "-fatbin", kernels, "-o", str(device_code))
    (objects / "device_code.h").write_text(
        f"#define LEMA_DEVICE_CODE {json.dumps(str(device_code))}\n", encoding="utf-8"
    )
    sources = sorted(str(source) for source in (CSRC / "cuda").glob("*.cpp"))
    run(compile_cuda, *NVCC_HOST, f"-I{objects}", host, "-shared", *sources, "-o", str(library), "-ldl")
    return next(line for line in run(compile_cuda, "--version").splitlines() if "release" in line)


LIBRARIES: dict[str, Callable[[Path, Path], str]] = {"liblema": build_cpu, "liblema_cuda": build_cuda}


class BuildLibraries(build_ext):
    """Libraries without Python in them, instead of extension modules."""

    def get_ext_filename(self, fullname: str) -> str:
        return f"{fullname.replace('.', '/')}.so"

    def build_extensions(self) -> None:
        self._record: dict[str, dict[str, str | None]] = {}
        super().build_extensions()

    def build_extension(self, ext: Extension) -> None:
        library = Path(self.get_ext_fullpath(ext.name)).absolute()
        objects = Path(self.build_temp)
        for folder in (library.parent, objects):
            folder.mkdir(parents=True, exist_ok=True)
        library.unlink(missing_ok=True)
        compiler_name, reason = None, None
        try:
            compiler_name = LIBRARIES[library.stem](objects, library)
        except NotBuilt as error:
            reason = str(error)
            self.warn(f"{library.stem} was not built: {error}")
        self._record[library.stem] = {"compiler": compiler_name, "reason": reason}
        (library.parent / BUILD_RECORD).write_text(json.dumps(self._record, indent=2) + "\n", encoding="utf-8")

    def copy_extensions_to_source(self) -> None:
        # of an editable install. A library that a process has open must be replaced, not overwritten.
        for name in LIBRARIES:
            (EDITABLE / f"{name}.so").unlink(missing_ok=True)
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
    ext_modules=[Extension(f"lema_cuda.{name}", sources=[], optional=True) for name in LIBRARIES],
    cmdclass={"build_ext": BuildLibraries, "bdist_wheel": PlatformWheel},
)
