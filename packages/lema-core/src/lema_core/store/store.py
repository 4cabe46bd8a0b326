"""TensorStore: the weights of a model, borrowed granule by granule in the order that a trace announced."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from lema_core.device import Device, map_ram
from lema_core.errors import PlanError
from lema_core.ops.widen import Widen
from lema_core.quantization.block import WeightBlock
from lema_core.store.disk import DiskReader
from lema_core.store.engine import StepPlan, TransferEngine
from lema_core.store.experts import ExpertEngine
from lema_core.store.gradients import GradientStream
from lema_core.store.granules import Part
from lema_core.store.model import Region, StreamedModel, WindowSizes
from lema_core.store.reads import Reads
from lema_core.store.rows import RowCache
from lema_core.store.state_plan import StatePlan, open_updates
from lema_core.store.states import StateStream
from lema_core.store.trace import Trace
from lema_core.store.unnamed import UnnamedFile
from lema_core.store.updates import WeightUpdates
from lema_core.store.window import Window

DEFAULT_PREFETCH_DISTANCE = 8


class Borrow:
    """One access under way. The tensor is refused once the slot was released or given to another granule."""

    __slots__ = ("_engine", "_generation", "_part", "_position", "_released", "_slot", "_window")

    def __init__(self, engine: TransferEngine, part: Part, position: int, slot: int) -> None:
        self._engine = engine
        self._window = window = engine.near
        self._part = part
        self._position = position
        self._slot = slot
        self._generation = window.generations[slot]
        self._released = False

    def tensor(self) -> WeightBlock:
        """The row block in storage format. Raises PlanError when it is stale."""
        part, window = self._part, self._window
        if (
            self._released
            or window.generations[self._slot] != self._generation
            or window.granule_in(self._slot) != part.granule
        ):
            raise PlanError(f"stale read of {part.tensor}: its slot was released or holds another granule")
        return part.block(partial(window.block, self._slot))

    def __enter__(self) -> WeightBlock:
        return self.tensor()

    def __exit__(self, *exc_info: object) -> None:
        self._released = True
        self._engine.release(self._position)


@dataclass
class StoreStats:
    """Bytes of one kind of stream. ``*_now``/``*_peak``: slots filled, and at the peak the region of embedding rows;
    ``*_window``: the budget's slots; reads of this step, of which ``demand_bytes`` no trace announced."""

    ram_now_bytes: int
    ram_peak_bytes: int
    ram_window_bytes: int
    device_now_bytes: int
    device_peak_bytes: int
    device_window_bytes: int
    read_bytes: int
    demand_bytes: int
    copied_bytes: int
    written_bytes: int
    wait_s: float


class TensorStore:
    """Owns the windows and the transfer engine of the ``weights`` stream. Use as a context manager, or call close().

    ``reads`` and ``widen`` are kernels; by default plain Python and torch do the work. ``states``: how what training
    needs beside weights is kept, None where none of them train; then ``updates`` and ``gradients`` are there.
    ``fixed``: the working file of weights that stay as they are in it, from
    :func:`~lema_core.store.fixed.fixed_weights`; the store's from now on.
    """

    def __init__(
        self,
        model: StreamedModel,
        device: Device,
        sizes: WindowSizes,
        prefetch_distance: int = DEFAULT_PREFETCH_DISTANCE,
        reads: Reads | None = None,
        widen: Widen | None = None,
        states: StatePlan | None = None,
        fixed: UnnamedFile | None = None,
    ) -> None:
        self.model = model
        self.device = device
        self.sizes = sizes
        self._layout = model.layout
        self._reader = DiskReader(reads)
        self._near, self._far = _windows(device, self._layout.slot_bytes, sizes.ram_slots, sizes.device_slots)
        self._experts: ExpertEngine | None = None
        self.updates: WeightUpdates | None = None
        self.gradients: GradientStream | None = None
        if model.experts is not None:
            slots = sizes.expert_ram_slots, sizes.expert_device_slots
            windows = _windows(device, model.experts.slot_bytes, *slots)
            self._experts = ExpertEngine(model.experts.granules, self._reader, device, *windows)
        if states is not None:
            windows = _in_ram_first(self._near, self._far)
            of_experts = () if self._experts is None else _in_ram_first(self._experts.near, self._experts.far)
            self.updates = open_updates(model, states, device, windows, of_experts)
            self.gradients = self.updates.grads
            file = self.updates.masters.file
            self._reader.adopt(model.space.path, file.descriptor, file.direct)
        self._fixed = fixed
        if fixed is not None:
            self._reader.adopt(model.space.path, fixed.descriptor, fixed.direct)
        self._expert_position = 0
        bounce = map_ram(model.bounce_bytes)
        self._rows = {
            name: RowCache(info, self._reader, sizes.n_rows, bounce, widen) for name, info in model.embeddings.items()
        }
        self._engine = TransferEngine(
            self._layout.granules, self._reader, device, self._near, self._far, prefetch_distance, self.updates
        )
        self._position = 0
        self._trace: Trace | None = None
        self._step_start = self._totals()
        self.closed = False

    def begin_step(self, trace: Trace) -> StepPlan:
        """Start moving what ``trace`` will borrow."""
        self._position = 0
        self._trace = trace
        self._step_start = self._totals()
        if self.updates is not None and self.updates.rows_changed():
            for name in self.model.originals_by_rows:
                self._rows[name].forget()
        return self._engine.begin(trace)

    def end_step(self) -> None:
        """Every access of the trace was made and released. Raises PlanError otherwise."""
        if self._position != len(self._trace.accesses):
            self.abort_step()
            raise PlanError(f"the step made {self._position} of {len(self._trace.accesses)} traced accesses")
        self._engine.finish()

    def abort_step(self) -> None:
        """Abandon a step that failed; the store can be used again."""
        for engine in self._engines:
            engine.abort()

    @property
    def _engines(self) -> Sequence[TransferEngine]:
        return (self._engine,) if self._experts is None else (self._engine, self._experts)

    def parts(self, name: str) -> tuple[Part, ...]:
        return self.model.parts(name)

    def borrow(self, part: Part) -> Borrow:
        if part.on_demand:
            engine, position = self._experts, self._expert_position
        else:
            engine, position = self._engine, self._position
        slot = engine.acquire(position, part.granule)
        if part.on_demand:
            self._expert_position = position + 1
        else:
            self._position = position + 1
        return Borrow(engine, part, position, slot)

    @contextmanager
    def routed(self, parts: Sequence[Part]) -> Iterator[None]:
        """Inside, exactly these parts of experts are borrowed, in this order: they are fetched ahead of it."""
        self._expert_position = 0
        if self.updates is not None:
            for part in parts:
                self.updates.await_applied(Region.EXPERTS, part.granule)
        self._experts.begin_parts(parts)
        try:
            yield
            self._experts.finish()
        except BaseException:
            self._experts.abort()
            raise

    def rows(self, name: str, ids: Tensor, dtype: torch.dtype) -> Tensor:
        changed = None
        if self.updates is not None and name in self.model.originals_by_rows:
            changed = self.updates.rows(name, ids)
        found = self._rows[name].gather(ids, dtype) if changed is None else changed.to(dtype)
        return found.to(self.device.torch_device)

    def set_weights(self, values: Callable[[str, int, int], Tensor]) -> None:
        """Give weights that train a value; see WeightUpdates.fill."""
        self.updates.fill(values)

    def _totals(self) -> dict[str, tuple[int, int, int, int, float]]:
        """By kind of stream since it was opened: bytes read from disk, those of them on demand, copied, written, and
        seconds waited."""
        demanded = sum(rows.bytes_read for rows in self._rows.values())
        link_bytes = sum(engine.link_bytes for engine in self._engines)
        wait_s = sum(engine.wait_s for engine in self._engines)
        if self._experts is not None:
            demanded += self._experts.disk_bytes
        if self.updates is None:
            return {"weights": (self._reader.bytes_read, demanded, link_bytes, 0, wait_s)}
        own = self.updates
        read = self._reader.bytes_read + own.masters.bytes_read
        return {
            "weights": (read, demanded, link_bytes, own.masters.bytes_written, wait_s + own.wait_s),
            # Moments are taken beside the compute, which waits for weights alone then.
            "optim": _moved(own.moments.stream, own.moments.stream.bytes_copied, 0.0),
            "grads": _moved(own.grads.stream, own.grads.bytes_copied, own.grads.wait_s),
        }

    def stats(self) -> dict[str, StoreStats]:
        """Figures per kind of stream; ``read_bytes``, ``copied_bytes``, ``written_bytes`` and ``wait_s`` of the present
        or latest step. What moves ahead of a step for its updates counts with it."""
        near = [engine.near for engine in self._engines]
        far = [engine.far for engine in self._engines if engine.far is not None]
        ram, device = (far, near) if far else (near, [])
        rows, bounce = self._rows.values(), self.model.bounce_bytes
        region = self.sizes.n_rows * self.model.row_bytes
        passing = 0 if self.updates is None else self.updates.ram_bytes
        held = {
            "weights": (
                sum(window.bytes_now for window in ram) + sum(r.bytes_now for r in rows) + bounce + passing,
                sum(window.peak_bytes for window in ram) + region + bounce + passing,
                sum(window.n_slots * window.slot_bytes for window in ram) + region + bounce + passing,
                sum(window.bytes_now for window in device),
                sum(window.peak_bytes for window in device),
                sum(window.n_slots * window.slot_bytes for window in device),
            )
        }
        if self.updates is not None:
            own = self.updates
            for of, stream in ((own.moments, own.moments.stream), (own.grads, own.grads.stream)):
                held[stream.kind] = (stream.ram_bytes,) * 3 + (of.device_bytes,) * 3
        found = {}
        for kind, now in self._totals().items():
            before = self._step_start[kind]
            read, demanded, copied, written, waited = (a - b for a, b in zip(now, before, strict=True))
            found[kind] = StoreStats(
                *held[kind],
                read_bytes=read,
                demand_bytes=demanded,
                copied_bytes=copied,
                written_bytes=written,
                wait_s=waited,
            )
        return found

    @property
    def buffered_files(self) -> Sequence[str]:
        """Files whose file system refused direct reads."""
        return sorted(map(str, self._reader.buffered_files))

    def slots_filled(self) -> tuple[int, int]:
        """The most slots (near, far) that ever held a granule, to hold against StepPlan."""
        far = self._far.peak_bytes // self._far.slot_bytes if self._far is not None else 0
        return self._near.peak_bytes // self._near.slot_bytes, far

    def close(self) -> None:
        """Stop the threads, free the slabs, close the files; safe to call twice.

        What a thread that hangs in a read still works with stays until it is back.
        """
        if not self.closed:
            self.closed = True
            for engine in self._engines:
                engine.close()
            if self.updates is not None:
                self.updates.close()
            self.device.close()
            if self._fixed is not None:
                self._fixed.close()
            if not any(engine.stuck for engine in self._engines):
                self._reader.close()
                for region in (*(w for e in self._engines for w in (e.near, e.far)), *self._rows.values()):
                    if region is not None:
                        region.free()

    def __enter__(self) -> TensorStore:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


def _moved(stream: StateStream, copied: int, waited_s: float) -> tuple[int, int, int, int, float]:
    return stream.bytes_read, 0, copied, stream.bytes_written, waited_s


def _in_ram_first(near: Window, far: Window | None) -> tuple[Window, ...]:
    return (near,) if far is None else (far, near)


def _windows(device: Device, slot_bytes: int, ram_slots: int, device_slots: int) -> tuple[Window, Window | None]:
    """What compute borrows from, and the RAM window behind it where the device has memory of its own."""
    ram = Window(device.allocate_ram(ram_slots * slot_bytes), ram_slots, slot_bytes)
    if device.shares_ram:
        return ram, None
    return Window(device.allocate(device_slots * slot_bytes), device_slots, slot_bytes), ram
