"""The flight check measures once, keeps what it found, and never trusts a file that is not its own."""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from lema_core.device import CpuDevice, Device
from lema_core.errors import CheckpointError
from lema_core.ops.linear import LinearKernel
from lema_core.planning import flight
from lema_core.planning.flight import FlightCheck, flight_check, paced, propose
from lema_core.planning.hardware import Hardware
from lema_core.store.trace import Trace, Work
from lema_core.testing.simulated import SimulatedAccelerator


class CountingKernel(LinearKernel):
    calls = 0

    def forward(self, *args, **kwargs) -> None:
        type(self).calls += 1
        super().forward(*args, **kwargs)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Small products, hardly any time, a cache of this test's own."""
    for name in ("_READ_S", "_MEMORY_S", "_LINK_S", "_PRODUCT_S", "_OVERHEAD_S", "_DRAG_S"):
        monkeypatch.setattr(flight, name, 0.0)
    small = flight._Sizes(32, 64, 20 << 20)
    monkeypatch.setattr(flight, "_IN_RAM", small)
    monkeypatch.setattr(flight, "_ON_DEVICE", small)
    monkeypatch.setenv("LEMA_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(CountingKernel, "calls", 0)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "model.safetensors"
    path.write_bytes(os.urandom(300_001))
    return path


def check(model: Path, said: list[str] | None = None, device: Device | None = None, **options) -> FlightCheck:
    say = (lambda text: None) if said is None else said.append
    kernel, name = CountingKernel(), options.pop("kernel_name", "torch 1")
    return flight_check(model, device or CpuDevice(), kernel, torch.bfloat16, name, say=say, **options)


def test_rates_are_measured_once_and_kept(model: Path, tmp_path: Path) -> None:
    said: list[str] = []
    first = check(model, said)
    machine = first.hardware
    assert machine.device_shares_ram and machine.link_bytes_per_s is None and machine.compute_dtype == "float32"
    assert min(machine.disk_bytes_per_s, machine.memory_bytes_per_s, machine.op_overhead_s) > 0
    assert [tokens for tokens, _ in machine.gemm] == [16, 64, 256, 1024]
    assert first.file is not None and first.file.is_relative_to(tmp_path / "cache/flight")
    calls = CountingKernel.calls
    again = check(model, said)
    assert CountingKernel.calls == calls, "the second check measured nothing"
    assert again.hardware.gemm == machine.gemm and again.measured == first.measured
    assert check(model, said, refresh=True).file == first.file and CountingKernel.calls > calls
    assert said == []


def test_what_figures_depend_on_is_kept_apart(model: Path) -> None:
    files = {check(model).file, check(model, kernel_name="torch 2").file, check(model, reader_name="native").file}
    torch.set_num_threads(2)
    files.add(check(model).file)
    assert len(files) == 4


@pytest.mark.parametrize(
    ("spoil", "word"),
    [
        (lambda text: text[: len(text) // 2], "JSONDecodeError"),
        (lambda text: "[1]", "TypeError"),
        (lambda text: text.replace('"format": 4', '"format": 0'), "another version of lema"),
        (lambda text: text.replace('"kernel": "torch 1"', '"kernel": "torch 0"'), "another machine"),
        (lambda text: text.replace('"op_overhead_s": ', '"op_overhead_s": -'), "not a number greater than 0"),
        (lambda text: text.replace('"disk_bytes_per_s"', '"disc_bytes_per_s"'), "KeyError: 'disk_bytes_per_s'"),
        (lambda text: "\udcff", "UnicodeDecodeError"),
    ],
)
def test_a_spoilt_file_is_measured_again_with_a_word(model: Path, spoil, word: str) -> None:
    first = check(model)
    text = first.file.read_text()
    first.file.write_bytes(spoil(text).encode(errors="surrogateescape"))
    said: list[str] = []
    calls = CountingKernel.calls
    again = check(model, said)
    assert CountingKernel.calls > calls
    (sentence,) = said
    assert str(first.file) in sentence and word in sentence and "measuring again" in sentence and "\n" not in sentence
    assert json.loads(again.file.read_text())["format"] == 4
    assert [path.name for path in again.file.parent.iterdir()] == [again.file.name], "no temporary file stays"


def test_a_folder_that_cannot_be_written_costs_a_word(model: Path, tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file where a folder should be")
    said: list[str] = []
    found = check(model, said)
    assert found.file is None and found.hardware.disk_bytes_per_s > 0
    assert any("not kept" in sentence for sentence in said)
    assert ("measured", f"{found.measured}, not kept") in found.describe()


def test_the_cache_is_at_home_by_default(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LEMA_CACHE")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert check(model).file.is_relative_to(tmp_path / "home/.cache/lema/flight")


def test_a_link_is_measured_by_the_devices_own_copies(model: Path) -> None:
    device = SimulatedAccelerator(bytes_per_s=1e10)
    found = check(model, device=device)
    assert 0 < found.hardware.link_bytes_per_s <= 1e10
    assert found.hardware.device_bytes == device.free_bytes()
    assert any(what == "link to the device" for what, _ in found.describe())
    device.close()


def test_an_operation_is_timed_by_as_many_as_torch_is_asked_for() -> None:
    asked: list = []

    class Count(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            asked.append(func)
            return func(*args, **(kwargs or {}))

    def operations(links: int) -> int:
        asked.clear()
        x = torch.ones(8, 16, requires_grad=True)
        w = torch.ones(8, 16)
        with Count():
            y = x
            for _ in range(links):
                y = flight._Link.apply(y, w) + w
            flight.backward_from(y, w)
        assert torch.equal(x.grad, w)
        return len(asked)

    assert operations(20) - operations(10) == 10 * flight.OPERATIONS_PER_LINK


def test_a_file_that_is_gone_is_named(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path, flags: int) -> int:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(CheckpointError, match=rf"{model}: cannot open: Permission denied"):
        check(model)


def test_the_programs_random_numbers_stay_as_they_were(model: Path) -> None:
    before = torch.get_rng_state()
    check(model)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="mincore is Linux's")
def test_no_page_of_the_file_stays_in_the_page_cache(model: Path) -> None:
    with open(model, "rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        check(model)
        size = model.stat().st_size
        with mmap.mmap(file.fileno(), size, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE) as mapped:
            address = ctypes.addressof(ctypes.c_char.from_buffer(mapped))
            pages = (ctypes.c_ubyte * -(-size // mmap.PAGESIZE))()
            status = ctypes.CDLL(None).mincore(ctypes.c_void_p(address), ctypes.c_size_t(size), pages)
            assert status == 0
            assert sum(page & 1 for page in pages) == 0


def test_it_takes_less_than_45_mb_at_its_real_sizes(tmp_path: Path) -> None:
    """In a process of its own, so that nothing else moves the peak."""
    model = tmp_path / "model.safetensors"
    model.write_bytes(bytes(40_000_000))
    program = f"""
import torch
from pathlib import Path
from lema_core.device import CpuDevice
from lema_core.memory import peak_rss_bytes, reset_peak_rss, rss_bytes
from lema_core.ops.linear import LinearKernel
from lema_core.planning import flight
torch.set_num_threads(1)
torch.ones(512, 512) @ torch.ones(512, 512)
flight._PRODUCT_S, flight.TOKENS = 0.0, (1024,)
assert reset_peak_rss()
before = rss_bytes()
flight.flight_check(Path({str(model)!r}), CpuDevice(), LinearKernel(), torch.float32, "torch 1")
print(peak_rss_bytes() - before)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert int(done.stdout) < 45_000_000


# -- the pace of a model's steps


def test_a_pace_is_found_once_for_each_kind_of_steps(model: Path) -> None:
    found: list[float] = []

    def rehearse() -> float:
        found.append(1.5 + len(found))
        return found[-1]

    first = paced(check(model), "some steps", rehearse)
    assert first.hardware.pace == 1.5 and check(model).hardware.pace == 1.0
    assert paced(check(model), "some steps", rehearse).hardware.pace == 1.5
    assert paced(check(model), "other steps", rehearse).hardware.pace == 2.5
    anew = replace(check(model), measured="later")
    assert paced(anew, "some steps", rehearse).hardware.pace == 3.5, "rates that are measured anew have another pace"


@pytest.mark.parametrize("pace", ["0.0", "-1.5", "NaN", "null", "[2]"])
def test_a_spoilt_pace_is_found_anew_with_a_word(model: Path, pace: str) -> None:
    flight_file = check(model).file
    paced(check(model), "steps", lambda: 1.25)
    (file,) = set(flight_file.parent.iterdir()) - {flight_file}
    file.write_text(file.read_text().replace('"figures": 1.25', f'"figures": {pace}'))
    said: list[str] = []
    assert paced(check(model), "steps", lambda: 1.75, said.append).hardware.pace == 1.75
    assert len(said) == 1 and str(file) in said[0] and "measuring again" in said[0]


def test_only_a_device_that_shares_ram_loses_to_reads(model: Path) -> None:
    assert check(model).hardware.read_drag_s_per_byte >= 0
    assert check(model, device=SimulatedAccelerator()).hardware.read_drag_s_per_byte == 0.0


# -- what follows from the rates


def flight_of(link: float | None, jitter_s: float) -> FlightCheck:
    machine = Hardware("m", 10**9, None, 1e9, link, 1e9, ((1, 1e9),), "float32", 0.0, "by hand")
    return FlightCheck(machine, jitter_s, "today", None)


def test_a_slot_is_left_idle_for_as_long_as_a_late_transfer_takes() -> None:
    """10 MB take 10 ms from disk (and 10 ms over a link), at worst 30 ms more; an access computes 5 ms."""
    step = Trace("step", (0, 1), (Work(4e6, 1, 1e6), Work(4e6, 1, 1e6)))
    assert propose(flight_of(None, 0.030), step, 10**7, 10**9, 10**8).prefetch_distance == 1 + 8
    assert propose(flight_of(1e9, 0.030), step, 10**7, 10**9, 10**8).prefetch_distance == 1 + 10
    assert propose(flight_of(None, 0.0), step, 10**5, 10**9, 10**8).prefetch_distance == 2
    assert propose(flight_of(None, 9.0), step, 10**7, 10**9, 10**8).prefetch_distance == 64


def test_what_fits_stays() -> None:
    step = Trace("step", (0,), (Work(1e6, 1, 0.0),))
    some = propose(flight_of(None, 0.0), step, 10**7, 10**9, 10**9 - 1)
    assert some.strategy == "streaming" and "not all fits: 1.00 GB of weights" in some.because[0]
    assert propose(flight_of(None, 0.0), step, 10**7, 10**9, 10**9).strategy == "resident"
