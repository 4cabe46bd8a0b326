"""TensorStore: the weights of a model, borrowed granule by granule in the order that a trace announced."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lema_core.device import Device, map_ram
from lema_core.errors import PlanError
from lema_core.ops.widen import Widen
from lema_core.store.disk import DiskReader
from lema_core.store.engine import StepPlan, TransferEngine
from lema_core.store.granules import Part
from lema_core.store.model import StreamedModel, WindowSizes
from lema_core.store.reads import Reads
from lema_core.store.rows import RowCache
from lema_core.store.trace import Trace
from lema_core.store.window import Window

DEFAULT_PREFETCH_DISTANCE = 8


class Borrow:
    """One access under way. The tensor is refused once the slot was released or given to another granule."""

    __slots__ = ("_generation", "_part", "_position", "_released", "_slot", "_store", "_window")

    def __init__(self, store: TensorStore, window: Window, part: Part, position: int, slot: int) -> None:
        self._store = store
        self._window = window
        self._part = part
        self._position = position
        self._slot = slot
        self._generation = window.generations[slot]
        self._released = False

    def tensor(self) -> Tensor:
        """The row block in storage format. Raises PlanError when it is stale."""
        part, window = self._part, self._window
        if (
            self._released
            or window.generations[self._slot] != self._generation
            or window.granule_in(self._slot) != part.granule
        ):
            raise PlanError(f"stale read of {part.tensor}: its slot was released or holds another granule")
        return window.block(self._slot, part.offset, part.dtype, part.shape)

    def __enter__(self) -> Tensor:
        return self.tensor()

    def __exit__(self, *exc_info: object) -> None:
        self._released = True
        self._store.release(self._position)


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

    ``reads`` and ``widen`` are kernels; by default plain Python and torch do the work.
    """

    def __init__(
        self,
        model: StreamedModel,
        device: Device,
        sizes: WindowSizes,
        prefetch_distance: int = DEFAULT_PREFETCH_DISTANCE,
        reads: Reads | None = None,
        widen: Widen | None = None,
    ) -> None:
        self.model = model
        self.device = device
        self.sizes = sizes
        self._layout = model.layout
        slot_bytes = self._layout.slot_bytes
        self._reader = DiskReader(reads)
        ram = Window(device.allocate_ram(sizes.ram_slots * slot_bytes), sizes.ram_slots, slot_bytes)
        if device.shares_ram:
            self._near, self._far = ram, None
        else:
            slab = device.allocate(sizes.device_slots * slot_bytes)
            self._near, self._far = Window(slab, sizes.device_slots, slot_bytes), ram
        bounce = map_ram(model.bounce_bytes)
        self._rows = {
            name: RowCache(info, self._reader, sizes.n_rows, bounce, widen) for name, info in model.embeddings.items()
        }
        self._engine = TransferEngine(
            self._layout.granules, self._reader, device, self._near, self._far, prefetch_distance
        )
        self._position = 0
        self._trace: Trace | None = None
        self._step_start = (0, 0, 0.0, 0)
        self.closed = False

    def begin_step(self, trace: Trace) -> StepPlan:
        """Start moving what ``trace`` will borrow."""
        self._position = 0
        self._trace = trace
        self._step_start = self._totals()
        return self._engine.begin(trace)

    def end_step(self) -> None:
        """Every access of the trace was made and released. Raises PlanError otherwise."""
        if self._position != len(self._trace.accesses):
            self.abort_step()
            raise PlanError(f"the step made {self._position} of {len(self._trace.accesses)} traced accesses")
        self._engine.finish()

    def abort_step(self) -> None:
        """Abandon a step that failed; the store can be used again."""
        self._engine.abort()

    def parts(self, name: str) -> tuple[Part, ...]:
        return self._layout.parts[name]

    def borrow(self, part: Part) -> Borrow:
        position = self._position
        slot = self._engine.acquire(position, part.granule)
        self._position = position + 1
        return Borrow(self, self._near, part, position, slot)

    def release(self, position: int) -> None:
        self._engine.release(position)

    def rows(self, name: str, ids: Tensor, dtype: torch.dtype) -> Tensor:
        return self._rows[name].gather(ids, dtype).to(self.device.torch_device)

    def _totals(self) -> tuple[int, int, float, int]:
        demanded = sum(rows.bytes_read for rows in self._rows.values())
        return self._reader.bytes_read, self._engine.link_bytes, self._engine.wait_s, demanded

    def stats(self) -> dict[str, StoreStats]:
        """Figures per kind of stream; ``read_bytes``, ``copied_bytes`` and ``wait_s`` of the present or latest step."""
        ram = self._near if self._far is None else self._far
        rows, bounce = self._rows.values(), self.model.bounce_bytes
        before = self._step_start
        read, copied, waited, demanded = self._totals()
        region = self.sizes.n_rows * self.model.row_bytes
        far = self._far is not None
        weights = StoreStats(
            ram_now_bytes=ram.bytes_now + sum(r.bytes_now for r in rows) + bounce,
            ram_peak_bytes=ram.peak_bytes + region + bounce,
            ram_window_bytes=ram.n_slots * ram.slot_bytes + region + bounce,
            device_now_bytes=self._near.bytes_now if far else 0,
            device_peak_bytes=self._near.peak_bytes if far else 0,
            device_window_bytes=self._near.n_slots * self._near.slot_bytes if far else 0,
            read_bytes=read - before[0],
            demand_bytes=demanded - before[3],
            copied_bytes=copied - before[1],
            written_bytes=0,
            wait_s=waited - before[2],
        )
        return {"weights": weights}

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
            self._engine.close()
            self.device.close()
            if not self._engine.stuck:
                self._reader.close()
                for region in (self._near, self._far, *self._rows.values()):
                    if region is not None:
                        region.free()

    def __enter__(self) -> TensorStore:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()
