"""A scheduler with one answer, to run a step as a test wants it."""

from __future__ import annotations

from collections.abc import Sequence

from lema_core.runtime.piece_run import Level
from lema_core.runtime.schedule import Groups, StepCosts, StepSchedule, StepShape
from lema_core.store.trace import Trace


class ForcedSchedule:
    """Stands in for ``ModelRunner.scheduler`` with one schedule for every step. ``shape``: of the latest step."""

    def __init__(self, costs: StepCosts, groups: Groups, levels: Sequence[Level]) -> None:
        self.costs = costs
        self.schedule = StepSchedule(groups, tuple(levels))
        self.shape: StepShape | None = None

    def choose(self, shape: StepShape) -> StepSchedule:
        assert sorted(sum(self.schedule.groups, ())) == list(range(len(shape.micro_batches)))
        self.shape = shape
        return self.schedule

    def trace(self, shape: StepShape, schedule: StepSchedule) -> Trace:
        return self.costs.trace(shape, schedule)

    @property
    def expected_bytes(self) -> int:
        """What the latest step was expected to hold at most."""
        return self.costs.activation_bytes(self.shape, self.schedule)
