"""No stale read: random orders, windows, latencies and aborts, every borrowed byte held against the file's."""

from __future__ import annotations

import random
import time
from collections.abc import Iterable, Sequence

import pytest
import torch

from lema_core.checkpoint import TensorInfo, read_manifest, write_safetensors
from lema_core.device import CpuDevice, Device
from lema_core.store.granules import StreamedTensor, lay_out
from lema_core.store.model import StreamedModel, WindowSizes
from lema_core.store.reads import PythonReads, Range
from lema_core.store.trace import Trace
from lema_core.testing import simulated
from lema_core.testing.checking import CheckingStore
from lema_core.testing.simulated import SimulatedAccelerator

QUICK, ALL = 200, 10_000


class DelayedReads:
    """Reads that take their time, now and then."""

    def __init__(self, rng: random.Random) -> None:
        self._reads = PythonReads()
        self._rng = random.Random(rng.random())
        self._often = rng.choice([0.0, 0.1, 0.5])

    def read(self, ranges: Sequence[Range]) -> None:
        if self._rng.random() < self._often:
            time.sleep(self._rng.choice([1e-5, 3e-4, 1e-3]))
        self._reads.read(ranges)


@pytest.fixture(autouse=True)
def late_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a busy machine, a thread of the device wakes up late now and then."""
    on_time, rng = simulated._sleep_until, random.Random(0)

    def late(due: float) -> None:
        on_time(due)
        if rng.random() < 0.2:
            time.sleep(rng.random() * 2e-3)

    monkeypatch.setattr(simulated, "_sleep_until", late)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, TensorInfo], StreamedModel]:
    """Tensors of several sizes and dtypes, some misaligned, in two files of a folder."""
    folder = tmp_path_factory.mktemp("schedules")
    generator = torch.Generator().manual_seed(0)
    dtypes = (torch.float32, torch.bfloat16, torch.float16)
    infos: dict[str, TensorInfo] = {}
    for number in range(2):
        (folder / str(number)).mkdir()
        written = []
        for i in range(8):
            tensor = torch.randn(3 + 5 * i, 40, generator=generator).to(dtypes[(i + number) % 3])
            pad = torch.zeros(37 * (i % 3), dtype=torch.uint8)
            written.append((f"pad{i}", torch.uint8, tuple(pad.shape), lambda pad=pad: pad))
            written.append((f"t{number}{i}", tensor.dtype, tuple(tensor.shape), lambda tensor=tensor: tensor))
        write_safetensors(folder / str(number) / "model.safetensors", written, fsync=False)
        infos |= {k: v for k, v in read_manifest(folder / str(number)).tensors.items() if k[0] == "t"}
    layout = lay_out([StreamedTensor(name, info, None) for name, info in infos.items()], 2500)
    return infos, StreamedModel(layout, {})


def random_order(rng: random.Random, n_parts: int) -> list[int]:
    """A training step, a repeated pass, or anything at all."""
    kind = rng.randrange(4)
    some = rng.sample(range(n_parts), rng.randint(1, n_parts))
    if kind == 0:
        return [*some, *reversed(some)]
    if kind == 1:
        return some * rng.randint(1, 3)
    if kind == 2:
        layers = [some[i : i + 4] for i in range(0, len(some), 4)]
        groups = rng.randint(1, 2)
        forward = [part for layer in layers for part in layer * groups]
        return forward + [part for layer in reversed(layers) for part in (layer[:-1] + layer[::-1]) * groups]
    return rng.choices(range(n_parts), k=rng.randint(1, 60))


def random_device(rng: random.Random) -> Device:
    if rng.random() < 0.3:
        return CpuDevice()
    return SimulatedAccelerator(
        bytes_per_s=rng.choice([None, 50e6, 1e9]),
        latency_s=rng.choice([0.0, 0.0, 1e-4]),
        compute_lag_s=rng.choice([0.0, 1e-4, 1e-3]),
    )


def run_schedule(seed: int, infos: dict[str, TensorInfo], model: StreamedModel) -> None:
    rng = random.Random(seed)
    parts = [part for found in model.layout.parts.values() for part in found]
    n = len(model.layout.granules)
    device = random_device(rng)
    near, far = (rng.choice([1, 2, 3, rng.randint(1, n), n]) for _ in range(2))
    sizes = WindowSizes(near, 0, 0) if device.shares_ram else WindowSizes(far, near, 0)
    orders = [[parts[i] for i in random_order(rng, len(parts))] for _ in range(2)]
    with CheckingStore(infos, model, device, sizes, rng.randint(0, 9), reads=DelayedReads(rng)) as store:
        for step in range(rng.randint(2, 5)):
            order = orders[step % rng.randint(1, 2)]
            stop_at = rng.randint(0, len(order)) if rng.random() < 0.3 else None
            store.begin_step(Trace("random", tuple(part.granule for part in order)))
            for part in order[:stop_at]:
                with store.borrow(part):
                    if not device.shares_ram and rng.random() < 0.1:
                        device.compute(1e-4)
            if stop_at is None:
                store.end_step()
            else:
                store.abort_step()
        assert device.shares_ram or device.overwrites_while_read == 0


def run_schedules(seeds: Iterable[int], infos: dict[str, TensorInfo], model: StreamedModel) -> None:
    for seed in seeds:
        try:
            run_schedule(seed, infos, model)
        except Exception as error:
            raise AssertionError(f"schedule {seed}") from error


@pytest.mark.parametrize("tenth", range(10))
def test_no_stale_read_in_random_schedules(model: tuple, tenth: int) -> None:
    run_schedules(range(tenth, QUICK, 10), *model)


@pytest.mark.slow
@pytest.mark.parametrize("tenth", range(10))
def test_no_stale_read_in_ten_thousand_random_schedules(model: tuple, tenth: int) -> None:
    run_schedules(range(QUICK + tenth, ALL, 10), *model)
