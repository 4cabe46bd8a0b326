"""Experts' weights: in windows of their own, fetched as soon as a router has picked them, kept while they fit."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence

from lema_core.device import Device
from lema_core.store.disk import DiskReader
from lema_core.store.engine import TransferEngine
from lema_core.store.granules import Granule, Part
from lema_core.store.recency import plan_by_recency
from lema_core.store.step_plan import StepPlan, numbered
from lema_core.store.trace import Trace
from lema_core.store.window import Window


class ExpertEngine(TransferEngine):
    """A transfer engine whose steps are single layers' routed experts; what it keeps between them is what was used
    last."""

    def __init__(
        self, granules: Sequence[Granule], reader: DiskReader, device: Device, near: Window, far: Window | None
    ) -> None:
        super().__init__(granules, reader, device, near, far, prefetch_distance=0)
        self._near_used: OrderedDict[int, None] = OrderedDict()
        self._far_used: OrderedDict[int, None] = OrderedDict()

    def begin_parts(self, parts: Sequence[Part]) -> None:
        """Start moving what is borrowed in this order."""
        accesses = tuple(part.granule for part in parts)
        self.begin(Trace("experts", accesses))
        _use(self._near_used, accesses)

    def plan(self, trace: Trace) -> StepPlan:
        near_before = numbered(self.near.resident())
        near = plan_by_recency(trace.accesses, self.near.n_slots, near_before, tuple(self._near_used))
        if self.far is None:
            return StepPlan(near, None)
        copied = tuple(load.granule for load in near.loads)
        far_before = numbered(self.far.resident())
        far = plan_by_recency(copied, self.far.n_slots, far_before, tuple(self._far_used))
        _use(self._far_used, copied)
        return StepPlan(near, far)


def _use(used: OrderedDict[int, None], granules: Iterable[int]) -> None:
    for granule in granules:
        used[granule] = None
        used.move_to_end(granule)
