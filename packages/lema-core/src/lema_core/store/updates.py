"""Apply what an optimizer step decided to each granule of the weights just before it is used next.

Gradients wait for their global norm; then the clip factor is known, and a thread beside the compute takes each granule
in the order in which the next pass needs it: its gradient and moments from their streams, the weights from the slot
that they were read into, and back to the working file. A pass that evaluates, generates or saves does the same.

All this happens in RAM. A device with memory of its own has copies: one whose weights are to change is given up before
a pass is planned, so that the pass copies it anew, and its copy waits for the change.

Where nothing waits for the norm, a granule changes as soon as its gradient is complete, and no gradient outlives its
layer (Lv et al. 2023, "Full Parameter Fine-tuning for Large Language Models with Limited Resources", arXiv:2306.09782).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from queue import SimpleQueue
from threading import Condition, Thread
from typing import Protocol

import torch
from torch import Tensor

from lema_core.errors import PlanError
from lema_core.store.codec import Encoding
from lema_core.store.fixed import Values
from lema_core.store.gradients import GradientStream
from lema_core.store.granules import Part
from lema_core.store.masters import Masters
from lema_core.store.model import Region, TrainedGranule, numbers_of
from lema_core.store.moments import Moments
from lema_core.store.passes import Abandoned, PassView, Use


class Decision(Protocol):
    """How one optimizer step changes weights."""

    def apply(self, tensor: str, weights: Tensor, gradient: Tensor, states: Sequence[Tensor]) -> None:
        """In place, of a part of a tensor: flat fp32 of one length. Called from a thread beside the compute, which it
        must not disturb: one thread of its own is what it may use."""


@dataclass(frozen=True)
class _Job:
    """``slot`` None: the weights are changed in the file alone. ``stays``: the slot has them until the pass is over, so
    that the file need not follow. ``used``: the pass has used them before."""

    number: int
    slot: int | None = None
    load: int = -1
    stays: bool = False
    used: bool = False


class WeightUpdates:
    """Changes ``masters`` by what is decided, with gradients and moments from their streams."""

    def __init__(self, masters: Masters, moments: Moments, grads: GradientStream, grad_encoding: Encoding) -> None:
        self.masters = masters
        self.moments = moments
        self.grads = grads
        self.model = model = masters.model
        self._grad_encoding = grad_encoding
        self._shared = {part.granule for head in model.shared.values() for part in model.layout.parts[head]}
        self._numbers = {(each.region, each.granule.index): each.number for each in model.trained}
        #: what the weights are to be, until they are
        self._values: Values | None = None
        self._decision: Decision | None = None
        #: not applied yet; those of them whose file is read before the pass; those whose file is being written
        self._pending: set[int] = set()
        self._in_file: set[int] = set()
        self._writing: set[int] = set()
        #: what is newer in its slot than in the file
        self._unsaved: set[int] = set()
        self._changed = Condition()
        self._rows_changed = False
        self._error: BaseException | None = None
        #: the pass under way, what stays in its slot, and how many orders the thread has not carried out
        self._view: PassView | None = None
        self._stays: Callable[[int], bool] = lambda granule: False
        self._orders = 0
        #: what changed after the pass had used it, and whether it did in the file alone
        self._outdated: dict[int, bool] = {}
        #: by record of gradients: the granules that have it in turn
        self._of_room: dict[int, list[int]] = {}
        for number, room in enumerate(grads.stream.rooms):
            self._of_room.setdefault(room, []).append(number)
        grads.before_zeros = self._await_room
        self._jobs: SimpleQueue[tuple[PassView | None, list[_Job]] | None] = SimpleQueue()
        self._thread = Thread(target=self._serve, name="lema-update", daemon=True)
        self._thread.start()
        #: that compute waited for an update
        self.wait_s = 0.0

    # -- what is decided

    def decide(self, decision: Decision) -> None:
        """Apply ``decision`` to every granule that has a gradient of this step, before its next use."""
        if self._pending:
            raise PlanError("an optimizer step is decided while another is not applied everywhere")
        self._decision = decision
        self._pending = set(self.grads.numbers)

    def decide_now(self, decision: Decision) -> None:
        """Apply ``decision`` to every granule in the pass that comes, as soon as its gradient is complete."""
        if self._pending:
            self.flush()
        self._decision = decision
        self.grads.done = self._apply_now

    def _apply_now(self, number: int) -> None:
        each = self.model.trained[number]
        index, slot, stays = each.granule.index, None, False
        if each.region is Region.STREAM:
            slot = self._view.last_slot(index)
            stays = slot is not None and self._stays(index)
            self._outdated[number] = slot is None
        else:
            self.masters.drop(each)
        with self._changed:
            self._pending.add(number)
            if slot is None:
                self._in_file.add(number)
            self._orders += 1
        self._jobs.put((self._view, [_Job(number, slot, stays=stays, used=True)]))

    @property
    def pending(self) -> bool:
        return bool(self._pending)

    def rows_changed(self) -> bool:
        """Rows of tables have changed since this was last asked, or will before they are looked up."""
        changed, self._rows_changed = self._rows_changed, False
        return changed or self.pending

    # -- a pass

    def begin(self, view: PassView) -> None:
        """A pass begins, planned after :meth:`settle`; nothing moves yet."""
        # Rows of a table are looked up in its slots or in the file, never in both.
        apart = frozenset() if all(map(view.stays, self._shared)) else self._shared
        self._view, self._stays = view, lambda granule: view.stays(granule) and granule not in apart
        uses = view.uses()
        # What the pass does not use changes in the file, where the rest may be.
        in_file = {self.model.trained[number].granule.index for number in self._pending} - uses.keys()
        self._save(lambda granule: granule in in_file or not self._stays(granule))
        jobs = sorted(self._planned(uses), key=lambda found: (found[0], found[1].number))
        ordered = [job for _, job in jobs]
        if not ordered:
            return
        with self._changed:
            self._in_file = {job.number for job in ordered if job.slot is None}
            self._orders += 1
        order = [job.number for job in ordered]
        self.grads.stream.announce(order)
        self.moments.stream.announce(order)
        self._jobs.put((view, ordered))

    def _planned(self, uses: Mapping[int, Use]) -> Iterator[tuple[int, _Job]]:
        """What is applied in a pass, and the position that it comes before."""
        first_of_layer: dict[int | None, int] = {}
        for granule, use in uses.items():
            layer = self.model.layout.granules[granule].layer
            first_of_layer[layer] = min(use.position, first_of_layer.get(layer, use.position))
        for number in self._pending:
            each = self.model.trained[number]
            use = uses.get(each.granule.index) if each.region is Region.STREAM else None
            if each.region is Region.TABLES:
                yield -1, _Job(number)
            elif each.region is Region.EXPERTS:
                self.masters.drop(each)
                yield first_of_layer.get(each.granule.layer, -1), _Job(number)
            elif use is None:
                self.masters.drop(each)
                yield -1, _Job(number)
            elif each.granule.index not in self._shared:
                yield use.position, _Job(number, use.slot, use.load, self._stays(each.granule.index))
            elif use.load < 0:
                # Its rows are read first, from the file unless it stays.
                yield -1, _Job(number, use.slot, use.load, self._stays(each.granule.index))
            else:
                self.masters.drop(each)
                yield -1, _Job(number)

    def end(self, abandoned: bool = False) -> None:
        """The pass is over: what it was to apply is applied. Raises what the thread failed with."""
        with self._changed:
            self._changed.wait_for(lambda: not self._orders)
            self._in_file.clear()
        self.grads.done = self._view = None
        self.moments.stream.withdraw()
        self.grads.stream.withdraw()
        if not abandoned:
            self._raise_error()

    def await_applied(self, region: Region, granule: int) -> None:
        """Called before a granule is borrowed from the window in RAM."""
        number = self._numbers.get((region, granule))
        if number is not None:
            self._await_number(number)

    def await_changed(self, region: Region, granule: int) -> None:
        """Called before a granule is copied to the device."""
        number = self._numbers.get((region, granule))
        if number is not None and number in self._pending:
            self._await(lambda: number not in self._pending)

    def _await_room(self, number: int) -> None:
        """Called before a gradient begins: what was in its record before is not lost."""
        for each in self._of_room[self.grads.stream.rooms[number]]:
            self._await_number(each)

    def _await_number(self, number: int) -> None:
        if number in self._pending:
            self._compute_waits(lambda: number not in self._pending)

    def await_file(self, region: Region, granule: int) -> None:
        """Called before a granule is read from the file."""
        number = self._numbers.get((region, granule))
        if number is not None and number in self._in_file:
            self._await(lambda: number not in self._in_file)

    def await_saved(self, granule: int) -> None:
        """Called before compute gives a slot up."""
        number = self._numbers.get((Region.STREAM, granule))
        if number is not None and number in self._writing:
            self._compute_waits(lambda: number not in self._writing)

    def await_written(self, granule: int) -> None:
        """Called before a slot that copies were made from is filled anew."""
        number = self._numbers.get((Region.STREAM, granule))
        if number is not None and number in self._writing:
            self._await(lambda: number not in self._writing)

    def _compute_waits(self, ready: Callable[[], bool]) -> None:
        started = time.perf_counter()
        self._await(ready)
        self.wait_s += time.perf_counter() - started

    def _await(self, ready: Callable[[], bool]) -> None:
        with self._changed:
            self._changed.wait_for(lambda: ready() or not self._orders)
        self._raise_error()
        if not ready():
            raise Abandoned

    # -- outside passes

    def flush(self) -> None:
        """Apply what is pending, now. Raises what the thread failed with: then weights are not whole."""
        self.settle()
        jobs: list[_Job] = []
        for number in sorted(self._pending):
            each = self.model.trained[number]
            slot = self.masters.slot_of(each)
            if slot is None:
                self.masters.drop(each)
            jobs.append(_Job(number) if slot is None else _Job(number, slot, stays=True))
        # By the thread: an interrupt here leaves no granule changed by half.
        with self._changed:
            self._orders += 1
        self._jobs.put((None, jobs))
        self._await_thread()

    def settle(self) -> None:
        """Called before a pass is planned: what the windows hold does not change from here on, and the device holds
        nothing that is to change or has changed."""
        self._await_thread()
        self._fill()
        for number in self._pending:
            self.masters.recall(self.model.trained[number])
        for number, in_file in self._outdated.items():
            (self.masters.drop if in_file else self.masters.recall)(self.model.trained[number])
        self._outdated.clear()

    def _await_thread(self) -> None:
        """Until it has nothing to do: a call that was interrupted may have left it at work."""
        with self._changed:
            self._changed.wait_for(lambda: not self._orders)
        self._raise_error()

    def weights_of(self, part: Part) -> Tensor:
        """The fp32 numbers of a part as they are, flat; valid until the next call. Raises PlanError while an update is
        pending, TransferError."""
        if self._pending:
            raise PlanError(f"{part.tensor} is looked at before its update was applied")
        return self.masters.part(part, self.grads.number_of(part))

    def fill(self, values: Values) -> None:
        """Give every weight a value before it is used next: ``values(tensor, start, count)`` are fp32 [count],
        row-major. What was pending is dropped."""
        self._await_thread()
        self._pending.clear()
        self._unsaved.clear()
        self._rows_changed = True
        self._values = values

    def _fill(self) -> None:
        if self._values is not None:
            self.masters.set(self._values)
            self._values = None

    def rows(self, tensor: str, ids: Tensor) -> Tensor | None:
        """Rows of a table, fp32 [N, C], from the slots that it stays in; None where its file is up to date. What is
        pending of the table is waited for."""
        parts = self.model.parts(tensor)
        region = Region.STREAM if tensor in self.model.shared else Region.TABLES
        for part in parts:
            self.await_applied(region, part.granule)
        if self._numbers[region, parts[0].granule] not in self._unsaved:
            if region is Region.STREAM:
                for part in parts:
                    self.await_saved(part.granule)
            return None
        rows = torch.empty(len(ids), parts[0].shape[1])
        for part in parts:
            here = (ids >= part.start) & (ids < part.stop)
            rows[here] = self.masters.rows(part, ids[here] - part.start)
        return rows

    @property
    def disk_bytes(self) -> int:
        """What working files come to take."""
        return self.model.space.nbytes + self.moments.stream.disk_bytes + self.grads.stream.disk_bytes

    @property
    def ram_bytes(self) -> int:
        """Beside what the streams have."""
        gradients = self._grad_encoding.scratch_bytes + self.grads.encoding.scratch_bytes
        return self.masters.ram_bytes + self.moments.scratch_bytes + gradients

    def close(self) -> None:
        """Stop the thread and give everything back."""
        self._jobs.put(None)
        self._thread.join()
        self.moments.stream.close()
        self.grads.close()
        self.masters.close()

    # -- one granule

    def _serve(self) -> None:
        while (given := self._jobs.get()) is not None:
            view, jobs = given
            try:
                for job in jobs:
                    self._apply(view, job)
            except Abandoned:
                pass
            except BaseException as error:
                with self._changed:
                    self._error = error
                    self._changed.notify_all()
            with self._changed:
                self._orders -= 1
                self._changed.notify_all()

    def _apply(self, view: PassView | None, job: _Job) -> None:
        each, number = self.model.trained[job.number], job.number
        gradient = self.grads.take(number)
        record = self.moments.stream.take(number)
        applied = False
        try:
            if job.slot is None:
                weights = self.masters.from_file(each)
            else:
                if job.load >= 0:
                    view.await_load(job.load)
                if job.used:
                    view.await_copies(each.granule.index)
                weights = self.masters.in_slot(each, job.slot)
            self._change(each, weights, gradient, record)
            applied = True
            if each.region is Region.TABLES or (each.region is Region.STREAM and each.granule.index in self._shared):
                self._rows_changed = True
        finally:
            self.moments.stream.give(number, changed=applied)
            self.grads.stream.give(number, changed=False, keep=not applied)
        if job.slot is None:
            self.masters.save(each, None)
        writes = job.slot is not None and not job.stays
        with self._changed:
            self._pending.discard(number)
            self._in_file.discard(number)
            if job.stays:
                self._unsaved.add(number)
            if writes:
                self._writing.add(number)
            self._changed.notify_all()
        if writes:
            self.masters.save(each, job.slot)
            with self._changed:
                self._writing.discard(number)
                self._changed.notify_all()

    def _change(self, each: TrainedGranule, weights: Tensor, gradient: Tensor, record: Tensor) -> None:
        n = len(weights)
        with (
            self._grad_encoding.decoded(gradient, n, changed=False) as g,
            self.moments.decoded(record, n, changed=True) as (m, v),
        ):
            for part in each.parts:
                w_n, g_n, m_n, v_n = (numbers_of(part, numbers) for numbers in (weights, g, m, v))
                self._decision.apply(self.model.canonical(part.tensor), w_n, g_n, (m_n, v_n))

    def _save(self, goes: Callable[[int], bool]) -> None:
        """Write what is newer in its slot than in the file, where the slot may be given up."""
        for number in sorted(self._unsaved):
            each = self.model.trained[number]
            if goes(each.granule.index):
                self.masters.save(each, self.masters.slot_of(each))
                self._unsaved.discard(number)

    def _raise_error(self) -> None:
        if self._error is not None:
            raise self._error
