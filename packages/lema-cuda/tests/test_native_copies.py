"""Copies to a CUDA device: on one where there is one, everywhere on a driver that the tests bring."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from lema_core.device import CudaDevice, Device, map_ram
from lema_core.testing.device_suite import DeviceSuite
from lema_cuda import library
from lema_cuda.copy import NativeCopies

HERE = Path(__file__).parent
NO_DEVICE = not torch.cuda.is_available()


@pytest.fixture(autouse=True)
def _cuda_library() -> None:
    try:
        library.open_cuda_library()
    except library.PluginError as error:
        pytest.skip(str(error))


@pytest.mark.gpu
@pytest.mark.skipif(NO_DEVICE, reason="needs a CUDA device")
class TestCudaDeviceWithNativeCopies(DeviceSuite):
    def make_device(self) -> Device:
        return CudaDevice(copies=NativeCopies)


@pytest.mark.gpu
@pytest.mark.skipif(NO_DEVICE, reason="needs a CUDA device")
def test_copies_are_the_bytes_and_overlap_with_compute() -> None:
    device = torch.device("cuda:0")
    copies = NativeCopies(device)
    source = map_ram(64 << 20).copy_(torch.randint(0, 256, (64 << 20,), dtype=torch.uint8))
    copies.register(source)
    target = torch.zeros(64 << 20, dtype=torch.uint8, device=device)
    done = copies.copy(target, source, copies.record())
    copies.compute_wait(done)
    assert torch.equal(target.cpu(), source) and copies.is_over(done)
    copies.close()


@pytest.mark.skipif(not NO_DEVICE, reason="the message of a machine without CUDA")
def test_a_machine_without_a_driver_is_told_and_nothing_fails() -> None:
    (reason,) = library.cuda_refusals()
    assert reason.startswith(("no NVIDIA driver: libcuda.so.1: ", "the NVIDIA driver says: "))
    with pytest.raises(RuntimeError, match=r"opening CUDA failed: unknown error \(CUDA error 3\)"):
        NativeCopies(torch.device("cuda:0"))


def test_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LEMA_DISABLE_NATIVE", "1")
    assert library.cuda_refusals() == ["switched off by LEMA_DISABLE_NATIVE"]


@pytest.fixture(scope="module")
def fake_driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a libcuda.so.1 that needs no device."""
    folder = tmp_path_factory.mktemp("driver")
    cuda = os.environ.get("CUDA_HOME") or "/usr/local/cuda"
    command = ["g++", "-std=c++17", "-fPIC", "-shared", f"-I{cuda}/include", str(HERE / "fake_driver.cpp")]
    try:
        subprocess.run([*command, "-o", str(folder / "libcuda.so.1")], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("needs g++ and cuda.h to make a driver")
    return folder


def test_on_a_driver_of_the_tests_own(fake_driver: Path) -> None:
    environment = {**os.environ, "LD_LIBRARY_PATH": str(fake_driver), "OMP_NUM_THREADS": "1"}
    child = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(HERE / "fake_driver_cases.py")],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    assert child.returncode == 0, child.stdout
    assert "8 passed" in child.stdout
