"""Where the native code cannot serve, the kernel says why and plain torch serves."""

from __future__ import annotations

import ctypes
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import lema_cuda.library
from lema_core.errors import PluginError
from lema_core.plugins import PluginManager
from lema_cuda import plugin

PACKAGE = Path(__file__).parents[1]
BUILT = lema_cuda.library.LIBRARY
#: what a CPU is told of the products on CUDA devices
ON_CUDA = "cpp: for cuda only"


@pytest.fixture
def library_elsewhere(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """The module looks for library and record in tmp_path."""
    monkeypatch.setattr(lema_cuda.library, "LIBRARY", tmp_path / "liblema.so")
    monkeypatch.setattr(lema_cuda.library, "CUDA_LIBRARY", tmp_path / "liblema_cuda.so")
    monkeypatch.setattr(lema_cuda.library, "BUILD_RECORD", tmp_path / "build.json")
    for opening in (lema_cuda.library.open_library, lema_cuda.library.open_cuda_library):
        opening.cache_clear()
    yield tmp_path
    for opening in (lema_cuda.library.open_library, lema_cuda.library.open_cuda_library):
        opening.cache_clear()


def choice(name: str = "auto") -> tuple[str, list[str]]:
    """The kernel chosen on a CPU, and what is said about each."""
    from lema_core import builtin

    manager = PluginManager()
    assert manager.admit("lema-core", "core", lambda: builtin) and manager.admit("lema-cuda", "cuda", lambda: plugin)
    chosen, reasons = manager.choose_kernel("linear", None, "cpu", name)
    return chosen.name, reasons


def test_native_code_is_preferred_where_it_serves(native: object) -> None:
    assert choice() == ("cpp", ["cpp: chosen", ON_CUDA, "torch: usable, but cpp is preferred"])
    assert choice("torch")[0] == "torch"


def test_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LEMA_DISABLE_NATIVE", "1")
    assert choice() == (
        "torch",
        ["cpp: switched off by LEMA_DISABLE_NATIVE", ON_CUDA, "torch: chosen"],
    )
    with pytest.raises(PluginError, match="cpp: switched off by LEMA_DISABLE_NATIVE"):
        choice("cpp")


def test_products_on_a_cuda_device_without_a_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    from lema_core import builtin

    monkeypatch.setattr(plugin, "device_refusals", lambda device: [f"no driver for device {device}"])
    manager = PluginManager()
    assert manager.admit("lema-core", "core", lambda: builtin) and manager.admit("lema-cuda", "cuda", lambda: plugin)
    chosen, reasons = manager.choose_kernel("linear", None, "cuda")
    assert chosen.name == "torch" and "cpp: no driver for device 0" in reasons


def chosen_for_all() -> dict[str, str]:
    """Operation -> kernel, of a run on a CPU, and what copies to a CUDA device."""
    from lema_core import builtin

    manager = PluginManager()
    assert manager.admit("lema-core", "core", lambda: builtin) and manager.admit("lema-cuda", "cuda", lambda: plugin)
    # a codec packs weights itself where there is no native packer
    ops = {kernel.op for kernel in manager.kernels() if kernel.op != "quantize"}
    return {op: manager.choose_kernel(op, None, "cuda" if op == "copy" else "cpu")[0].name for op in ops}


def test_everything_native_is_switched_off_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LEMA_DISABLE_NATIVE", "1")
    assert set(chosen_for_all().values()) == {"torch"}


def test_an_old_cpu_reads_natively_and_computes_with_plain_torch(
    monkeypatch: pytest.MonkeyPatch, native: object
) -> None:
    monkeypatch.setattr(lema_cuda.library, "cpu_missing", lambda: "AVX2")
    chosen = chosen_for_all()
    assert chosen.pop("read") == "cpp"
    chosen.pop("copy")
    assert set(chosen.values()) == {"torch"}


def test_switched_off_with_zero_is_on(monkeypatch: pytest.MonkeyPatch, native: object) -> None:
    monkeypatch.setenv("LEMA_DISABLE_NATIVE", "0")
    assert choice()[0] == "cpp"


def test_a_cpu_that_lacks_instructions(monkeypatch: pytest.MonkeyPatch, native: object) -> None:
    monkeypatch.setattr(lema_cuda.library, "cpu_missing", lambda: "AVX2, FMA")
    name, reasons = choice()
    assert name == "torch" and reasons[0] == "cpp: needs AVX2, FMA and F16C, this CPU has no AVX2, FMA"


def test_what_the_cpu_lacks_is_what_the_system_says(native: object) -> None:
    flags = Path("/proc/cpuinfo")
    if not flags.exists():
        pytest.skip("needs /proc/cpuinfo")
    words = flags.read_text().split()
    assert lema_cuda.library.cpu_missing() == ", ".join(w for w in ("AVX2", "FMA", "F16C") if w.lower() not in words)


def test_no_library(library_elsewhere: Path) -> None:
    assert choice()[1][0] == f"cpp: {library_elsewhere}/liblema.so is missing, install lema-cuda again"
    (library_elsewhere / "build.json").write_text(
        json.dumps({"liblema": {"compiler": None, "reason": "no C++ compiler was found"}})
    )
    name, reasons = choice()
    assert name == "torch" and "liblema was not built: no C++ compiler was found" in reasons[0]


def test_no_cuda_library(library_elsewhere: Path) -> None:
    reason = {"compiler": None, "reason": "no CUDA compiler (nvcc) was found"}
    (library_elsewhere / "build.json").write_text(json.dumps({"liblema_cuda": reason}))
    expected = "liblema_cuda was not built: no CUDA compiler (nvcc) was found; mend that and install lema-cuda again"
    assert lema_cuda.library.cuda_refusals() == [expected]


def test_a_file_that_is_no_library(library_elsewhere: Path) -> None:
    (library_elsewhere / "liblema.so").write_bytes(b"\x7fELF, almost")
    assert "does not load" in choice()[1][0]


def test_a_library_with_another_abi(native: object, library_elsewhere: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copy(BUILT, library_elsewhere)
    monkeypatch.setattr(lema_cuda.library, "ABI_VERSION", 999)
    found = ctypes.CDLL(str(BUILT)).lema_abi_version()
    assert f"has ABI {found}, expected 999; install lema-cuda again" in choice()[1][0]


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """The package's source alone."""
    copy = tmp_path / "lema-cuda"
    shutil.copytree(
        PACKAGE,
        copy,
        ignore=shutil.ignore_patterns("build", "*.so", "build.json", "tests", "*.egg-info"),
    )
    return copy


def build(checkout: Path, cxx: str, nvcc: str = "no-such-nvcc") -> dict[str, dict[str, str | None]]:
    """The record of an editable build, which must succeed."""
    subprocess.run(
        [sys.executable, "setup.py", "-q", "build_ext", "--inplace"],
        cwd=checkout,
        env={**os.environ, "CXX": cxx, "CUDACXX": nvcc, "LEMA_CUDA_ARCHITECTURES": "75"},
        check=True,
        capture_output=True,
    )
    return json.loads((checkout / "src/lema_cuda/build.json").read_text())


def failing_compiler(path: Path) -> str:
    path.write_text("#!/bin/sh\necho 'x.cpp:1: error: too old' >&2\nexit 1\n")
    path.chmod(0o755)
    return str(path)


def test_installing_without_a_compiler_succeeds_and_keeps_the_reasons(checkout: Path) -> None:
    left = [checkout / f"src/lema_cuda/{name}.so" for name in ("liblema", "liblema_cuda")]
    for library in left:
        library.write_bytes(b"of an earlier build")
    record = build(checkout, "no-such-compiler")
    assert record["liblema"]["reason"] == "no C++ compiler no-such-compiler was found"
    assert record["liblema_cuda"]["reason"] == "no CUDA compiler no-such-nvcc was found"
    assert not any(library.exists() for library in left)


def test_installing_with_compilers_that_fail_keeps_what_they_said(checkout: Path, tmp_path: Path) -> None:
    cxx, nvcc = failing_compiler(tmp_path / "cxx"), failing_compiler(tmp_path / "nvcc")
    record = build(checkout, cxx, nvcc)
    assert record["liblema"]["reason"] == "cxx failed: x.cpp:1: error: too old"
    assert record["liblema_cuda"]["reason"] == "nvcc failed: x.cpp:1: error: too old"


def test_the_cuda_half_is_built_by_nvcc_and_loads_without_a_driver(checkout: Path) -> None:
    if not any(shutil.which(place) for place in ("nvcc", "/usr/local/cuda/bin/nvcc")):
        pytest.skip("needs nvcc")
    for source in (checkout / "csrc/cpu").glob("*.cpp"):  # the other half takes long
        source.unlink()
    record = build(checkout, "g++", shutil.which("nvcc") or "/usr/local/cuda/bin/nvcc")["liblema_cuda"]
    assert record["reason"] is None and "release" in record["compiler"]
    built = checkout / "src/lema_cuda/liblema_cuda.so"
    assert built.stat().st_size < 1_000_000
    kernels = re.findall(r"\.entry (lema_\w+)\(", built.read_bytes().decode("latin-1"))
    assert len(kernels) == len(set(kernels)) == 24
    opened = ctypes.CDLL(str(built))
    opened.lema_cuda_missing.restype = ctypes.c_char_p
    assert opened.lema_cuda_abi_version() == lema_cuda.library.ABI_VERSION
    assert isinstance(opened.lema_cuda_missing(), bytes)
