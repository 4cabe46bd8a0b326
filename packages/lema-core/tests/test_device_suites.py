"""The suite that device authors inherit, on the devices at hand."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from lema_core.device import CpuDevice, CudaDevice, Device, map_ram, open_device
from lema_core.errors import BudgetError, ConfigError
from lema_core.runtime.batch import TokenBatch
from lema_core.runtime.runner import TrainPass
from lema_core.testing.device_suite import DeviceSuite
from lema_core.testing.simulated import SimulatedAccelerator
from lema_core.testing.toy import ToyConfig, granules_of, linear_names, open_toy, toy_updates, write_toy


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


def train_once(folder: Path, device: Device, slots: int | None) -> list[torch.Tensor]:
    """Loss, gradients and logits of the toy with so many slots per tier, on the CPU."""
    config = ToyConfig(dropout=0.3)
    tensors = write_toy(folder, config)
    cut = granules_of(config, tensors, 1500)
    in_ram = on_device = None
    if slots is not None:
        on_device = slots * cut.layout.slot_bytes
        in_ram = cut.smallest_bytes + on_device
    updates = toy_updates(config, linear_names(config), dropout=0.3, device=device.torch_device)
    ids = torch.arange(30).view(2, 15)
    mask = torch.ones_like(ids)
    mask[0, :4] = 0
    runner = open_toy(config, tensors, device, updates, in_ram, on_device, 1500, 2)
    with runner.store:
        for step in range(3):
            loss = runner.train_step([TokenBatch.of(ids, mask, ids)], TrainPass(0, 0), step)
        grads = [t.grad.cpu() for u in updates.values() for t in (u.lora_A, u.lora_B)]
        return [torch.tensor(loss), *grads, runner.logits(TokenBatch.of(ids, mask))]


@pytest.mark.parametrize(
    "make",
    [
        SimulatedAccelerator,
        pytest.param(
            CudaDevice,
            marks=[
                pytest.mark.gpu,
                pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
            ],
        ),
    ],
)
def test_the_number_of_slots_changes_no_bit(tmp_path: Path, make: Callable[[], Device]) -> None:
    resident = train_once(tmp_path, make(), None)
    for slots in (1, 2, 5):
        streamed = train_once(tmp_path, make(), slots)
        assert all(torch.equal(a, b) for a, b in zip(streamed, resident, strict=True)), f"{slots} slots"


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
