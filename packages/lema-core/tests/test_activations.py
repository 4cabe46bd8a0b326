"""What is put comes back, bit for bit and laid out as before, wherever it was in between."""

from __future__ import annotations

import errno
import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor

from lema_core.device import CpuDevice, Device
from lema_core.errors import BudgetError, PlanError, TransferError
from lema_core.store import activations
from lema_core.store.activations import ActivationStream
from lema_core.store.arena import Arena
from lema_core.store.granules import whole_sectors
from lema_core.store.held import is_dense
from lema_core.store.placement import Tier, place
from lema_core.store.spill import BOUNCE_BYTES
from lema_core.testing.simulated import SimulatedAccelerator

QUICK = {"deadline": None, "derandomize": True, "phases": [Phase.generate], "suppress_health_check": list(HealthCheck)}
DEVICES: dict[str, Callable[[], Device]] = {
    "cpu": CpuDevice,
    "simulated": SimulatedAccelerator,
    "slow": partial(SimulatedAccelerator, bytes_per_s=300e6, latency_s=2e-4),
    "late": partial(SimulatedAccelerator, compute_lag_s=1e-3),
}


@pytest.fixture(params=["cpu", "simulated"])
def device(request: pytest.FixtureRequest) -> Iterator[Device]:
    made = DEVICES[request.param]()
    yield made
    made.close()


def numbers(nbytes: int, seed: int = 0) -> Tensor:
    return torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


# -- where things lie


def test_the_last_entries_lie_highest() -> None:
    device, ram, disk = Tier
    assert place([10, 10, 10, 10], 20, 4096) == [disk, ram, device, device]
    assert place([10, 10], None, 0) == [device, device]
    assert place([10, 10], 0, None) == [ram, ram]
    assert place([10, 10], 9, 4095) == [disk, disk]
    assert place([5, 30, 5], 10, 0) == [disk, disk, device], "nothing lies above what was put later"
    assert place([], 0, 0) == []


@given(st.lists(st.integers(0, 30_000), max_size=20), st.integers(0, 90_000), st.integers(0, 90_000))
def test_no_tier_holds_more_than_its_limit_and_each_as_much_as_it_can(
    sizes: list[int], device_bytes: int, ram_bytes: int
) -> None:
    tiers = place(sizes, device_bytes, ram_bytes)
    assert tiers == sorted(tiers, reverse=True)
    held = [[n for n, tier in zip(sizes, tiers, strict=True) if tier is wanted] for wanted in Tier]
    used, limits = [sum(held[0]), sum(map(whole_sectors, held[1]))], [device_bytes, ram_bytes]
    for tier in (Tier.DEVICE, Tier.RAM):
        assert used[tier] <= limits[tier]
        lower = [n for n, found in zip(sizes, tiers, strict=True) if found > tier]
        if lower:
            assert used[tier] + (lower[-1] if tier is Tier.DEVICE else whole_sectors(lower[-1])) > limits[tier]


def test_ranges_of_an_arena_never_overlap_and_are_used_again() -> None:
    arena = Arena(CpuDevice(), 5 * 4096)
    a, b, c = (arena.reserve(n) for n in (4096, 5000, 1))
    assert (arena.bytes_now, len(a), len(b), len(c)) == (4 * 4096, 4096, 5000, 1)
    assert arena.reserve(4097) is None
    for number, held in enumerate((a, b, c)):
        held.fill_(number)
    assert [int(held[0]) for held in (a, b, c)] == [0, 1, 2] and (b == 1).all()
    arena.free(b)
    again = arena.reserve(8192)
    assert again.data_ptr() == b.data_ptr() and again.data_ptr() % 4096 == 0
    assert arena.peak_bytes == 4 * 4096
    with pytest.raises(ValueError):
        arena.free(again[4096:])
    boundless = Arena(CpuDevice(), None)
    assert all(boundless.reserve(20_000_000) is not None for _ in range(2))
    assert Arena(CpuDevice(), 0).reserve(1) is None


# -- bit for bit


@dataclass(frozen=True)
class Case:
    shapes: tuple[tuple[int, int], ...]
    device: str
    device_share: float
    ram_share: float
    known: bool
    #: one in so many steps of the backward pass takes the oldest entry, and puts it again
    disorder: int
    aborted_at: int
    seed: int


cases = st.builds(
    Case,
    shapes=st.lists(st.tuples(st.integers(0, 40), st.integers(1, 60)), min_size=1, max_size=12).map(tuple),
    device=st.sampled_from(["cpu", "cpu", "simulated", "slow", "late"]),
    device_share=st.sampled_from([0.0, 0.0, 0.1, 0.3, 0.6, 1.0]),
    ram_share=st.sampled_from([0.0, 0.0, 0.2, 0.5, 1.5]),
    known=st.booleans(),
    disorder=st.sampled_from([2, 4, 10**6, 10**6]),
    aborted_at=st.integers(0, 40),
    seed=st.integers(0, 10_000),
)


def made(case: Case) -> list[Tensor]:
    """Tensors of several dtypes, in several layouts, some with gaps."""
    torch.manual_seed(case.seed)
    layouts = [
        lambda x: x,
        lambda x: x.t(),
        lambda x: x[None].transpose(1, 2),
        lambda x: x[:, ::2],
        lambda x: x[:1].expand(3, -1, -1) if x.ndim == 3 else x[:, :1].expand(-1, 4),
    ]
    dtypes = [torch.float32, torch.bfloat16, torch.float16, torch.bool]
    return [
        layouts[(case.seed + i) % len(layouts)](torch.randn(shape).to(dtypes[(case.seed + i) % 4]))
        for i, shape in enumerate(case.shapes)
    ]


def the_same(a: Tensor, b: Tensor) -> bool:
    held = [t.clone(memory_format=torch.contiguous_format).reshape(-1) for t in (a, b)]
    same = not a.numel() or torch.equal(*(t.view(torch.uint8) for t in held))
    return a.dtype == b.dtype and a.shape == b.shape and same


def nbytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


@settings(max_examples=120, **QUICK)
@given(cases)
def test_everything_comes_back_bit_for_bit_whatever_the_budgets(case: Case) -> None:
    tensors = made(case)
    sizes = [nbytes(t) for t in tensors]
    limits = int(case.device_share * sum(sizes)), int(case.ram_share * sum(sizes))
    generator = torch.Generator().manual_seed(case.seed)
    device = DEVICES[case.device]()
    with tempfile.TemporaryDirectory() as folder:
        stream = ActivationStream(device, *limits, Path(folder))
        try:
            for step in range(3):
                stream.begin_step(sizes if case.known else ())
                done = forward_and_backward(stream, tensors, case, generator, case.aborted_at if step == 1 else 10**6)
                if not done:
                    stream.abort_step()
                    continue
                stream.end_step()
                check_figures(stream, device, sizes, limits, case)
            assert not os.listdir(folder)
        finally:
            stream.close()
            device.close()


def forward_and_backward(
    stream: ActivationStream, tensors: list[Tensor], case: Case, generator: torch.Generator, stop_at: int
) -> bool:
    """False where it was abandoned after ``stop_at`` puts and takes."""
    held: list[tuple[int, Tensor]] = []
    to_put = list(range(len(tensors)))
    n_again = 0
    for count in range(10**6):
        if count == stop_at:
            return False
        if to_put:
            number = to_put.pop(0)
            given = tensors[number].clone() if tensors[number].is_contiguous() else tensors[number]
            held.append((number, given))
            stream.put(("x", number), given)
        elif held:
            odd = int(torch.randint(0, case.disorder, (), generator=generator)) == 0
            number, given = held.pop(0 if odd else -1)
            taken = stream.take(("x", number))
            assert the_same(taken, tensors[number])
            assert taken.stride() == given.stride() or not is_dense(given)
            if odd and n_again < 5:
                to_put.append(number)
                n_again += 1
        else:
            return True
    raise AssertionError("unreachable")


def check_figures(
    stream: ActivationStream, device: Device, sizes: list[int], limits: tuple[int, int], case: Case
) -> None:
    stats = stream.stats()
    bounce = BOUNCE_BYTES if stats.disk_peak_bytes else 0
    assert (stats.ram_now_bytes, stats.device_now_bytes, stats.disk_now_bytes) == (bounce, 0, 0)
    limit, ram_limit = (min(limits), 0) if device.shares_ram else limits
    if device.shares_ram:
        assert stats.ram_peak_bytes - bounce <= limit and stats.device_peak_bytes == stats.copied_bytes == 0
    else:
        assert stats.device_peak_bytes <= limit and stats.ram_peak_bytes - bounce <= ram_limit
        assert stats.device_window_bytes >= stats.device_peak_bytes
    assert stats.ram_window_bytes >= stats.ram_peak_bytes
    if not case.known or case.disorder < 10**6:
        assert stats.written_bytes >= stats.read_bytes
        return
    tiers = place(sizes, limit, ram_limit)
    assert (
        stats.written_bytes
        == stats.read_bytes
        == sum(whole_sectors(n) for n, tier in zip(sizes, tiers, strict=True) if tier is Tier.DISK and n)
    )
    if not device.shares_ram:
        assert stats.copied_bytes == 2 * sum(n for n, tier in zip(sizes, tiers, strict=True) if tier is not Tier.DEVICE)


def test_what_fits_is_held_as_it_is(device: Device) -> None:
    stream = ActivationStream(device, 1000, 1000, None)
    stream.begin_step()
    given = torch.arange(100.0).view(4, 25).t()
    stream.put(0, given)
    taken = stream.take(0)
    assert taken.data_ptr() == given.data_ptr() and taken.stride() == given.stride()
    stream.end_step()
    stats = stream.stats()
    assert (stats.copied_bytes, stats.read_bytes, stats.written_bytes) == (0, 0, 0)
    assert stats.ram_peak_bytes + stats.device_peak_bytes == 400
    stream.close()


def test_feature_major_tensors_come_back_feature_major(device: Device, tmp_path: Path) -> None:
    stream = ActivationStream(device, 0, 0, tmp_path)
    stream.begin_step()
    x_1NC = torch.randn(6, 5).t()[None]
    stream.put("x", x_1NC)
    taken = stream.take("x")
    assert torch.equal(taken, x_1NC) and taken.stride()[1:] == (1, 5) and taken.data_ptr() != x_1NC.data_ptr()
    stream.end_step()
    stream.close()


# -- ahead of the compute


def until(ready: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + 10
    while not ready() and time.monotonic() < deadline:
        time.sleep(0.001)
    return ready()


def test_writes_go_on_behind_and_reads_ahead(device: Device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gate, pwrite = threading.Event(), os.pwrite

    def gated(*args) -> int:
        assert gate.wait(10)
        return pwrite(*args)

    monkeypatch.setattr(os, "pwrite", gated)
    stream = ActivationStream(device, 3 * 8192, 0 if not device.shares_ram else None, tmp_path)
    stream.begin_step([8192] * 6)
    data = [numbers(8192, i) for i in range(6)]
    for i in range(3):
        stream.put(i, data[i].clone())  # none has left, and none need wait
    gate.set()
    for i in range(3, 6):
        stream.put(i, data[i].clone())
    assert until(lambda: stream.stats().written_bytes == 3 * 8192)
    assert torch.equal(stream.take(5), data[5])
    assert until(lambda: stream.stats().read_bytes == 8192), "2 comes into the room that 5 left"
    assert torch.equal(stream.take(4), data[4]) and torch.equal(stream.take(3), data[3])
    assert until(lambda: stream.stats().read_bytes == 3 * 8192)
    for i in (2, 1, 0):
        assert torch.equal(stream.take(i), data[i])
    stream.end_step()
    stream.close()


def test_what_comes_up_next_is_what_was_taken_next_before(tmp_path: Path) -> None:
    """Groups of micro-batches go forward and backward in the same order, only layers are reversed."""
    keys = [(layer, group) for layer in range(3) for group in range(3)]
    order = [(layer, group) for layer in (2, 1, 0) for group in range(3)]
    stream = ActivationStream(CpuDevice(), None, 2 * 4096, tmp_path)
    for step in range(2):
        stream.begin_step([4096] * 9)
        for number, key in enumerate(keys):
            stream.put(key, numbers(4096, number))
        for taken, key in enumerate(order[:-1]):
            assert torch.equal(stream.take(key), numbers(4096, keys.index(key)))
            if step and taken >= 2:
                following = stream._entries[order[taken + 1]]
                assert until(lambda: following.tensor is not None and not following.moving), "before it is asked for"  # noqa: B023
        stream.take(order[-1])
        stream.end_step()
        assert stream.stats().read_bytes == 7 * 4096
    stream.close()


def test_the_oldest_gives_way_where_sizes_are_not_known(tmp_path: Path) -> None:
    stream = ActivationStream(CpuDevice(), None, 3 * 4096, tmp_path)
    stream.begin_step()
    for i in range(5):
        stream.put(i, numbers(4096, i))
    assert until(lambda: not stream._busy and not stream._to_lower)
    low = [key for key, entry in stream._entries.items() if entry.tensor is None]
    assert low in ([0, 1], [0, 1, 2]), "room for what comes next, and no more"
    stream.abort_step()
    stream.close()


# -- errors


def filled(stream: ActivationStream, n: int = 3, size: int = 8192) -> None:
    stream.begin_step([size] * n)
    for i in range(n):
        stream.put(("layer", i), numbers(size, i))


def test_a_full_disk_says_where_how_much_and_what_is_free(
    device: Device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*args) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "pwrite", full)
    stream = ActivationStream(device, 8192, 0 if not device.shares_ram else None, tmp_path)
    with pytest.raises(TransferError) as failed:
        filled(stream)
        stream.take(("layer", 2))
        stream.take(("layer", 1))
        stream.end_step()
    message = str(failed.value)
    assert message.startswith(f"{tmp_path}: activation ('layer', 0): writing failed: No space left on device: 8,192")
    assert "are free" in message and "\n" not in message
    with pytest.raises(TransferError):
        stream.end_step()
    monkeypatch.undo()
    filled(stream)
    for i in (2, 1, 0):
        assert torch.equal(stream.take(("layer", i)), numbers(8192, i))
    stream.end_step()
    stream.close()


def test_a_disk_too_small_for_known_sizes_is_refused_before_the_step(tmp_path: Path) -> None:
    stream = ActivationStream(CpuDevice(), None, 0, tmp_path / "not" / "there" / "yet")
    with pytest.raises(
        TransferError, match=rf"{tmp_path}.*: 1,152,921,504,606,846,976 bytes are needed for.* are free"
    ):
        stream.begin_step([1 << 60])
    stream.close()


def test_a_read_that_fails_names_its_key(device: Device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "preadv", broken)
    stream = ActivationStream(device, 0, 0, tmp_path)
    filled(stream)
    with pytest.raises(TransferError, match=rf"{tmp_path}: activation \('layer', 2\): reading failed: Input/output"):
        stream.take(("layer", 2))
    stream.abort_step()
    stream.close()


def test_a_failing_copy_names_its_key(tmp_path: Path) -> None:
    device = SimulatedAccelerator(fail_at_copy=0)
    stream = ActivationStream(device, 8192, None, None)
    with pytest.raises(TransferError, match=r"^activation \('layer', 0\): copying to RAM failed: simulated"):
        filled(stream)
        stream.take(("layer", 2))
        stream.take(("layer", 1))
        stream.take(("layer", 0))
    stream.abort_step()
    stream.close()
    device.close()


def test_what_fits_nowhere_is_refused(device: Device) -> None:
    stream = ActivationStream(device, 9000, 4096, None)
    with pytest.raises(
        BudgetError, match=r"activations: 3 of 24,576 bytes are to be kept, .* are given, and no folder"
    ):
        filled(stream)
    stream.begin_step()
    with pytest.raises(BudgetError, match="no folder"):
        for i in range(4):
            stream.put(i, numbers(4000))
        stream.take(0)
    stream.abort_step()
    stream.begin_step()
    for i in range(1 if device.shares_ram else 3):
        stream.put(i, numbers(4000))
    stream.abort_step()
    stream.close()


def test_keys_are_put_once_and_taken_once(tmp_path: Path) -> None:
    stream = ActivationStream(CpuDevice(), None, None, tmp_path)
    with pytest.raises(PlanError, match="outside a step"):
        stream.put(1, torch.zeros(3))
    stream.begin_step()
    with pytest.raises(PlanError, match="still under way"):
        stream.begin_step()
    stream.put(1, torch.zeros(3))
    with pytest.raises(PlanError, match="activation 1 is put twice"):
        stream.put(1, torch.zeros(3))
    with pytest.raises(PlanError, match="activation 2 is taken, and is not held"):
        stream.take(2)
    with pytest.raises(PlanError, match="activation 1 was put and never taken"):
        stream.end_step()
    stream.begin_step()
    stream.end_step()
    stream.close()
    stream.close()
    with pytest.raises(PlanError, match="closed"):
        stream.begin_step()


# -- what is left behind


def test_the_file_has_no_name_and_close_leaves_no_thread_and_no_file(device: Device, tmp_path: Path) -> None:
    def open_there() -> list[str]:
        links = [f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd")]
        return [os.readlink(link) for link in links if os.path.lexists(link) and str(tmp_path) in os.readlink(link)]

    stream = ActivationStream(device, 0, 0, tmp_path)
    for _ in range(3):
        filled(stream)
        assert not os.listdir(tmp_path) and len(open_there()) == 1
        assert [t.name for t in threading.enumerate()].count("lema-activations") == 1
        for i in (2, 1, 0):
            stream.take(("layer", i))
        stream.end_step()
        assert stream.stats().disk_peak_bytes == 3 * 8192, "the file does not grow from step to step"
    stream.close()
    assert not open_there() and "lema-activations" not in [t.name for t in threading.enumerate()]


def test_a_file_system_without_direct_access_serves_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.open

    def no_direct(path, flags, *args) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return real(path, flags, *args)

    monkeypatch.setattr(os, "open", no_direct)
    stream = ActivationStream(CpuDevice(), 0, 0, tmp_path)
    filled(stream, 2, BOUNCE_BYTES + 5)
    for i in (1, 0):
        assert torch.equal(stream.take(("layer", i)), numbers(BOUNCE_BYTES + 5, i)), "more than one bounce"
    stream.end_step()
    stream.close()


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    stream = ActivationStream(CpuDevice(), 0, 0, tmp_path / "file")
    stream.begin_step()
    with pytest.raises(TransferError, match=rf"{tmp_path}/file: cannot keep activations there"):
        stream.put(0, torch.zeros(10))
    stream.abort_step()
    stream.close()


def test_a_hanging_write_does_not_hang_abort_or_close(
    device: Device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(activations, "_PATIENCE_S", 0.1)
    gate, pwrite, begun = threading.Event(), os.pwrite, threading.Event()

    def hanging(*args) -> int:
        begun.set()
        assert gate.wait(30)
        return pwrite(*args)

    monkeypatch.setattr(os, "pwrite", hanging)
    stream = ActivationStream(device, 3 * 8192, 0 if not device.shares_ram else None, tmp_path)
    stream.begin_step([8192] * 4)
    stream.put(0, numbers(8192))
    assert begun.wait(10)
    stream.abort_step()
    with pytest.raises(PlanError, match="still hangs"):
        stream.begin_step()
    gate.set()
    assert until(lambda: not stream._busy)
    filled(stream)
    assert torch.equal(stream.take(("layer", 2)), numbers(8192, 2))
    stream.abort_step()
    begun.clear()
    gate.clear()
    stream.begin_step([8192] * 4)
    stream.put(0, numbers(8192))
    assert begun.wait(10)
    thread = stream._thread
    stream.close()
    gate.set()
    thread.join(10)
    assert not thread.is_alive()
