"""What the transfer engine does when something goes wrong: every error arrives, named; nothing hangs or lingers."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from lema_core.checkpoint import TensorInfo
from lema_core.device import CpuDevice, Device
from lema_core.errors import CheckpointError, DataError, PlanError, TransferError
from lema_core.runtime.batch import TokenBatch
from lema_core.runtime.runner import ModelRunner, TrainPass
from lema_core.store.granules import MAX_GRANULE_BYTES, Granule
from lema_core.store.store import TensorStore
from lema_core.store.trace import Trace
from lema_core.testing.simulated import SimulatedAccelerator
from lema_core.testing.toy import ToyConfig, granules_of, linear_names, open_toy, toy_updates, write_toy

CONFIG = ToyConfig(n_layers=3)
GRANULE_BYTES = 2048
IDS = torch.arange(12).view(2, 6)
MIB = 1 << 20


@pytest.fixture
def tensors(tmp_path: Path) -> dict[str, TensorInfo]:
    return write_toy(tmp_path, CONFIG, n_files=2)


@pytest.fixture(params=["cpu", "simulated"])
def new_device(request: pytest.FixtureRequest) -> Callable[..., Device]:
    return CpuDevice if request.param == "cpu" else SimulatedAccelerator


def opened(tensors: dict[str, TensorInfo], device: Device, more_slots: int = 1, updates: dict | None = None):
    cut = granules_of(CONFIG, tensors, GRANULE_BYTES)
    extra = more_slots * cut.layout.slot_bytes
    return open_toy(
        CONFIG, tensors, device, updates, cut.smallest_bytes + extra, cut.layout.slot_bytes + extra, GRANULE_BYTES, 2
    )


def forward_trace(store: TensorStore, name: str = "forward") -> tuple[Trace, list]:
    parts = [part for parts in store.model.layout.parts.values() for part in parts]
    return Trace(name, tuple(part.granule for part in parts)), parts


def walk(store: TensorStore, trace: Trace, parts: list) -> None:
    store.begin_step(trace)
    for part in parts:
        with store.borrow(part):
            pass
    store.end_step()


def lema_threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name.startswith(("lema", "simulated"))}


def open_files() -> set[str]:
    found = set()
    for fd in os.listdir("/proc/self/fd"):
        try:
            found.add(os.readlink(f"/proc/self/fd/{fd}"))
        except FileNotFoundError:  # the listing's own descriptor
            continue
    return {name for name in found if name.endswith(".safetensors")}


# -- errors arrive


def test_a_file_cut_between_steps_is_named_and_the_store_can_be_used_again(
    tensors: dict[str, TensorInfo], new_device: Callable[..., Device]
) -> None:
    runner = opened(tensors, new_device())
    with runner.store as store:
        batch = TokenBatch.of(IDS)
        expected = runner.logits(batch)
        path = tensors["model.layers.1.up.weight"].segment.path
        whole = path.read_bytes()
        os.truncate(path, tensors["model.layers.1.up.weight"].segment.offset)
        with pytest.raises(CheckpointError) as failed:
            runner.logits(batch)
        message = str(failed.value)
        assert str(path) in message and "cut" in message and "\n" not in message
        assert any(name in message for name in tensors if name.startswith("model.layers."))
        with open(path, "r+b") as file:
            file.write(whole)
        assert torch.equal(runner.logits(batch), expected)
        assert not store._engine.stuck


def test_a_file_removed_before_it_is_opened_is_named(
    tensors: dict[str, TensorInfo], new_device: Callable[..., Device]
) -> None:
    runner = opened(tensors, new_device())
    with runner.store:
        path = tensors["head.weight"].segment.path
        path.unlink()
        with pytest.raises(CheckpointError, match=rf"{path}: cannot open"):
            runner.logits(TokenBatch.of(IDS))


@pytest.mark.parametrize("number", [0, 3, 11])
def test_a_failing_copy_names_tensor_and_file_and_is_made_again(tensors: dict[str, TensorInfo], number: int) -> None:
    device = SimulatedAccelerator(fail_at_copy=number)
    runner = opened(tensors, device)
    with runner.store as store:
        with pytest.raises(TransferError, match=rf"toy-\d.safetensors: model\..*: copying.*copy {number} failed"):
            runner.logits(TokenBatch.of(IDS))
        again = runner.logits(TokenBatch.of(IDS))
        assert torch.isfinite(again).all()
        assert store._engine.plan(forward_trace(store)[0]).near.loads
    resident = open_toy(CONFIG, tensors, CpuDevice(), max_granule_bytes=GRANULE_BYTES)
    with resident.store:
        assert torch.equal(again, resident.logits(TokenBatch.of(IDS)))


def test_a_copy_that_failed_unseen_leaves_no_readable_slot(tensors: dict[str, TensorInfo]) -> None:
    """The step is abandoned before compute waits for the copy; the next step must not take its slot for filled."""
    device = SimulatedAccelerator(fail_at_copy=2)
    runner = opened(tensors, device, more_slots=20)
    with runner.store as store:
        trace, parts = forward_trace(store)
        store.begin_step(trace)
        with store.borrow(parts[0]):
            deadline = time.monotonic() + 10
            while device.copies < 3 and time.monotonic() < deadline:
                time.sleep(0.001)
        store.abort_step()
        assert trace.accesses[0] in store._near.resident()
        failed = store._near.generations[2]
        assert store._near.granule_in(2) is None and failed >= 1
        assert torch.isfinite(runner.logits(TokenBatch.of(IDS))).all()


class Unexpected(Exception):
    pass


def test_whatever_a_reader_raises_arrives_at_the_next_borrow(
    tensors: dict[str, TensorInfo], new_device: Callable[..., Device], monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = opened(tensors, new_device(), more_slots=20)
    with runner.store as store:
        read, failing = store._reader.read_granule, threading.Event()

        def faulty(granule: Granule, slot: memoryview) -> None:
            if granule.index == 4:
                failing.set()
                raise Unexpected("the disk\nis on fire")
            read(granule, slot)

        monkeypatch.setattr(store._reader, "read_granule", faulty)
        trace, parts = forward_trace(store)
        store.begin_step(trace)
        assert failing.wait(10)
        deadline = time.monotonic() + 10
        while store._engine._run.error is None and time.monotonic() < deadline:
            time.sleep(0.001)
        with pytest.raises(TransferError) as failed:
            store.borrow(parts[0])  # long before granule 4 is needed
        assert isinstance(failed.value.__cause__, Unexpected)
        granule = store.model.layout.granules[4]
        assert granule.names[0] in str(failed.value) and str(granule.reads[0].path) in str(failed.value)
        assert "the disk" in str(failed.value) and "\n" not in str(failed.value)
        store.abort_step()
        monkeypatch.undo()
        walk(store, trace, parts)


# -- abandoned steps


def test_an_abandoned_step_stops_reading_at_once(
    tensors: dict[str, TensorInfo], new_device: Callable[..., Device], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Everything has room, so nothing but the abort holds the reader back: after Ctrl-C nobody waits for all of it."""
    runner = opened(tensors, new_device(), more_slots=100)
    with runner.store as store:
        read, begun, go_on, read_so_far = store._reader.read_granule, threading.Event(), threading.Event(), []

        def gated(granule: Granule, slot: memoryview) -> None:
            begun.set()
            assert go_on.wait(10)
            read_so_far.append(granule.index)
            read(granule, slot)

        monkeypatch.setattr(store._reader, "read_granule", gated)
        trace, parts = forward_trace(store)
        store.begin_step(trace)
        assert begun.wait(10)
        releaser = threading.Timer(0.2, go_on.set)
        releaser.start()
        store.abort_step()
        releaser.join()
        assert len(read_so_far) == 1 and not store._engine.stuck
        walk(store, trace, parts)


def test_a_slot_given_up_before_an_abort_is_not_read_again(
    tensors: dict[str, TensorInfo], monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = opened(tensors, SimulatedAccelerator(), more_slots=0)
    with runner.store as store:
        read, block, go_on = store._reader.read_granule, threading.Event(), threading.Event()

        def gated(granule: Granule, slot: memoryview) -> None:
            if granule.index == 1:
                block.set()
                assert go_on.wait(10)
            read(granule, slot)

        monkeypatch.setattr(store._reader, "read_granule", gated)
        trace, parts = forward_trace(store)
        store.begin_step(trace)
        for part in parts:
            if part.granule != 0:
                break
            with store.borrow(part):
                pass
        assert block.wait(10)
        threading.Timer(0.1, go_on.set).start()
        store.abort_step()
        assert store._near.resident() == {}, "the only slot was given up for a granule that never came"
        assert torch.isfinite(runner.logits(TokenBatch.of(IDS))).all()


def test_training_after_an_abandoned_step_computes_what_it_would_have(
    tensors: dict[str, TensorInfo], new_device: Callable[..., Device]
) -> None:
    batch = [TokenBatch.of(IDS, labels=IDS)]
    how = TrainPass(0, 0)
    grads = []
    for interrupted in (False, True):
        updates = toy_updates(CONFIG, linear_names(CONFIG))
        runner = opened(tensors, new_device(), 3, updates)
        with runner.store as store:
            if interrupted:
                borrow, count = store.borrow, iter(range(10**6))

                def stopping(part, borrow=borrow, count=count):
                    if next(count) == 40:
                        raise KeyboardInterrupt
                    return borrow(part)

                store.borrow = stopping
                with pytest.raises(KeyboardInterrupt):
                    runner.train_step(batch, how, 0)
                store.borrow = borrow
                for update in updates.values():
                    update.lora_A.grad = update.lora_B.grad = None
            loss = runner.train_step(batch, how, 0)
        grads.append([loss, *(t.grad for u in updates.values() for t in (u.lora_A, u.lora_B))])
    assert grads[0][0] == grads[1][0]
    assert all(torch.equal(a, b) for a, b in zip(grads[0][1:], grads[1][1:], strict=True))


# -- the order of borrows


def test_another_order_than_the_trace_is_refused(
    tensors: dict[str, TensorInfo], new_device: Callable[..., Device]
) -> None:
    runner = opened(tensors, new_device())
    with runner.store as store:
        trace, parts = forward_trace(store)
        other = next(part for part in parts if part.granule != parts[0].granule)
        with pytest.raises(PlanError, match="outside a planned step"):
            store.borrow(parts[0])
        store.begin_step(trace)
        with pytest.raises(PlanError, match=r"still under way"):
            store.begin_step(trace)
        with pytest.raises(PlanError, match=f"access 0 wants granule {other.granule}"):
            store.borrow(other)
        store.abort_step()
        walk(store, trace, parts)
        store.begin_step(trace)
        with pytest.raises(PlanError, match=f"made 0 of {len(parts)}"):
            store.end_step()
        walk(store, trace, parts)
        store.begin_step(Trace("short", trace.accesses[:1]))
        with store.borrow(parts[0]):
            pass
        with pytest.raises(PlanError, match="access 1 wants"):
            store.borrow(parts[1])
        store.end_step()


def test_a_borrow_that_waits_for_another_open_one_is_an_error_not_a_deadlock(
    tensors: dict[str, TensorInfo], new_device: Callable[..., Device]
) -> None:
    runner = opened(tensors, new_device(), more_slots=0)
    with runner.store as store:
        trace, parts = forward_trace(store)
        second = next(i for i, part in enumerate(parts) if part.granule != parts[0].granule)
        store.begin_step(trace)
        for part in parts[: second - 1]:
            with store.borrow(part):
                pass
        with store.borrow(parts[second - 1]), pytest.raises(PlanError, match="has not been given back"):
            store.borrow(parts[second])
        store.abort_step()


def test_a_borrow_that_is_never_given_back_fails_the_step(tensors: dict[str, TensorInfo]) -> None:
    runner = opened(tensors, CpuDevice(), more_slots=100)
    with runner.store as store:
        trace, parts = forward_trace(store)
        store.begin_step(Trace("one", trace.accesses[:1]))
        store.borrow(parts[0])
        with pytest.raises(PlanError, match="borrowed and not given back"):
            store.end_step()
        walk(store, trace, parts)


def test_a_stale_tensor_is_refused(tensors: dict[str, TensorInfo], new_device: Callable[..., Device]) -> None:
    runner = opened(tensors, new_device(), more_slots=0)
    with runner.store as store:
        trace, parts = forward_trace(store)
        store.begin_step(trace)
        borrows = []
        for part in parts:
            borrow = store.borrow(part)
            with borrow:
                borrow.tensor()
            borrows.append(borrow)
        for borrow in borrows:
            with pytest.raises(PlanError, match="stale read of"):
                borrow.tensor()
        store.end_step()


# -- step after step


def test_nothing_grows_from_step_to_step(tensors: dict[str, TensorInfo], new_device: Callable[..., Device]) -> None:
    runner = opened(tensors, new_device(), more_slots=3)
    with runner.store as store:
        trace, parts = forward_trace(store)
        step = Trace("there and back", trace.accesses + trace.accesses[::-1])
        engine, plans, seen = store._engine, [], []
        for _ in range(40):
            plans.append(engine.plan(step))
            walk(store, step, parts + parts[::-1])
            seen.append((len(engine._plans), len(threading.enumerate()), len(os.listdir("/proc/self/fd"))))
        assert len(set(seen[3:])) == 1, "plans, threads and files"
        assert all(plan is plans[-1] for plan in plans[3:]), "which slot holds what may change, the plan does not"
        for number in range(40):
            few = parts[: 1 + number % len(parts)]
            walk(store, Trace(number, tuple(part.granule for part in few)), few)
        assert len(engine._plans) == 16, "of ever new steps, the latest plans are kept"


# -- closing


def test_close_leaves_no_thread_and_no_open_file(
    tensors: dict[str, TensorInfo], new_device: Callable[..., Device]
) -> None:
    threads, files = lema_threads(), open_files()
    runner = opened(tensors, new_device())
    runner.logits(TokenBatch.of(IDS))
    assert lema_threads() - threads and open_files() - files
    runner.store.close()
    runner.store.close()
    assert not lema_threads() - threads and not open_files() - files
    with pytest.raises(PlanError, match="closed"):
        runner.logits(TokenBatch.of(IDS))


def test_close_in_the_middle_of_a_step(tensors: dict[str, TensorInfo], new_device: Callable[..., Device]) -> None:
    threads, files = lema_threads(), open_files()
    runner = opened(tensors, new_device())
    trace, parts = forward_trace(runner.store)
    runner.store.begin_step(trace)
    with runner.store.borrow(parts[0]):
        pass
    runner.store.close()
    assert not lema_threads() - threads and not open_files() - files


def test_close_gives_the_slabs_back(tensors: dict[str, TensorInfo]) -> None:
    runner = opened(tensors, CpuDevice(), more_slots=100)
    store = runner.store
    slab = store._near._slab.data_ptr()
    runner.logits(TokenBatch.of(IDS))
    assert f"{slab:x}" in _mappings()
    store.close()
    assert f"{slab:x}" not in _mappings()
    assert store.stats()["weights"].ram_peak_bytes > 0, "figures outlive the slabs"


def _mappings() -> str:
    """Start addresses that lie in a mapping at their 2 MiB border, as hexadecimal text."""
    found = []
    for line in Path("/proc/self/maps").read_text().splitlines():
        low, high = (int(text, 16) for text in line.split()[0].split("-"))
        if high - low < 64 * MIB:
            found += [f"{address:x}" for address in range(-(-low // (2 * MIB)) * 2 * MIB, high, 2 * MIB)]
    return " ".join(found)


def test_a_hanging_read_does_not_hang_close_or_abort(
    tensors: dict[str, TensorInfo], new_device: Callable[..., Device], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lema_core.store.engine._PATIENCE_S", 0.2)
    runner = opened(tensors, new_device())
    store = runner.store
    read, begun, go_on, waited_for = store._reader.read_granule, threading.Event(), threading.Event(), []

    def hanging(granule: Granule, slot: memoryview) -> None:
        begun.set()
        if not go_on.wait(30):
            waited_for.append("somebody waited for the read")
        read(granule, slot)

    monkeypatch.setattr(store._reader, "read_granule", hanging)
    trace, parts = forward_trace(store)
    store.begin_step(trace)
    assert begun.wait(10)
    store.abort_step()
    with pytest.raises(PlanError, match="still hangs"):
        store.begin_step(trace)
    go_on.set()
    deadline = time.monotonic() + 10
    while store._engine._run.threads_busy and time.monotonic() < deadline:
        time.sleep(0.01)
    walk(store, trace, parts)  # the read came back: the store is whole again
    begun.clear()
    go_on.clear()
    assert store._engine.plan(trace).near.loads
    store.begin_step(trace)
    assert begun.wait(10)
    store.close()
    go_on.set()
    for thread in store._engine._threads:
        thread.join(10)
        assert not thread.is_alive()
    assert not waited_for


def test_a_runner_is_usable_after_a_failed_step(
    tensors: dict[str, TensorInfo], new_device: Callable[..., Device]
) -> None:
    runner: ModelRunner = opened(tensors, new_device())
    with runner.store:
        expected = runner.logits(TokenBatch.of(IDS))
        with pytest.raises(DataError, match=f"model.tokens.weight: row {CONFIG.vocab_size} is asked for, there are"):
            runner.logits(TokenBatch.of(IDS + CONFIG.vocab_size))
        assert torch.equal(runner.logits(TokenBatch.of(IDS)), expected)


def test_the_default_granule_holds_a_toy_whole(tensors: dict[str, TensorInfo]) -> None:
    assert len(granules_of(CONFIG, tensors, MAX_GRANULE_BYTES).layout.granules) == CONFIG.n_layers + 1
