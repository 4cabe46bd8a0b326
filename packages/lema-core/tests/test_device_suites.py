"""The suite that device authors inherit, on the devices at hand."""

from __future__ import annotations

import pytest
import torch

from lema_core.device import CpuDevice, CudaDevice, Device, map_ram, open_device
from lema_core.errors import BudgetError, ConfigError
from lema_core.testing.device_suite import DeviceSuite
from lema_core.testing.simulated import SimulatedAccelerator


class TestCpuDevice(DeviceSuite):
    def make_device(self) -> Device:
        return CpuDevice()


class TestSimulatedAccelerator(DeviceSuite):
    def make_device(self) -> Device:
        return SimulatedAccelerator()


class TestSlowSimulatedAccelerator(DeviceSuite):
    """Bandwidth, latency and compute that lags behind."""

    def make_device(self) -> Device:
        return SimulatedAccelerator(capacity_bytes=1 << 30, bytes_per_s=2e9, latency_s=1e-3, compute_lag_s=2e-3)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
class TestCudaDevice(DeviceSuite):
    def make_device(self) -> Device:
        return CudaDevice()


def test_devices_are_opened_by_name() -> None:
    assert isinstance(open_device("cpu"), CpuDevice)
    device = open_device("auto")
    assert device.shares_ram == (not torch.cuda.is_available())
    device.close()
    with pytest.raises(ConfigError, match=r"device=tpu: this version computes on cpu and cuda"):
        open_device("tpu")


@pytest.mark.skipif(torch.cuda.is_available(), reason="the message of a machine without CUDA")
@pytest.mark.parametrize("name", ["cuda", "cuda:1"])
def test_cuda_without_a_cuda_device_says_what_to_do(name: str) -> None:
    with pytest.raises(ConfigError, match=rf"device={name}: torch finds no CUDA device; use device=cpu"):
        open_device(name)


def test_ram_is_zero_private_and_on_a_huge_page_border() -> None:
    ram = map_ram(5000)
    assert ram.data_ptr() % (2 << 20) == 0 and not ram.any() and ram.shape == (5000,)
    with pytest.raises(BudgetError, match=r"bytes of RAM are needed, the system refuses"):
        map_ram(1 << 62)
