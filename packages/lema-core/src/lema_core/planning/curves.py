"""A predicted step as curves and bars to draw: what each tier holds over time, and what moves when."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lema_core.planning.predict import Lane, SteadyStep, StepPrediction
from lema_core.store.granules import Granule
from lema_core.store.planner import TierPlan


@dataclass(frozen=True)
class Curve:
    """``nbytes[i]`` from ``times_s[i]`` on, until the next one; the last is the step's end. ``capacity_bytes``: the
    most there can be."""

    times_s: tuple[float, ...]
    nbytes: tuple[int, ...]
    capacity_bytes: int


@dataclass(frozen=True)
class StepPicture:
    """``tiers``: bytes of weights held, by the tier's name. ``lanes``: (start, duration) in seconds of what each lane
    is busy with."""

    tiers: Mapping[str, Curve]
    lanes: Mapping[Lane, tuple[tuple[float, float], ...]]
    step_s: float


def picture(
    prediction: StepPrediction,
    steady: SteadyStep,
    granules: Sequence[Granule],
    slot_bytes: int,
    near_slots: int,
    far_slots: int | None,
) -> StepPicture:
    """Arrays of a predicted step. ``near_slots`` and ``far_slots``: of the windows; the latter None where the device
    shares RAM."""
    lanes = {lane: _bars(prediction, lane) for lane in ("disk", "link", "compute", "wait")}
    plan = steady.plan
    tiers: dict[str, Curve] = {}
    if plan.far is None or far_slots is None:
        tiers["RAM"] = _held(
            plan.near, steady.near_before, lanes["disk"], granules, near_slots * slot_bytes, prediction
        )
    else:
        device = _held(plan.near, steady.near_before, lanes["link"], granules, near_slots * slot_bytes, prediction)
        ram = _held(plan.far, steady.far_before, lanes["disk"], granules, far_slots * slot_bytes, prediction)
        tiers |= {"device": device, "RAM": ram}
    return StepPicture(tiers, {lane: bars for lane, bars in lanes.items() if bars}, prediction.step_s)


def _bars(prediction: StepPrediction, lane: Lane) -> tuple[tuple[float, float], ...]:
    return tuple((s.start_s, s.stop_s - s.start_s) for s in prediction.timeline if s.lane == lane)


def _held(
    plan: TierPlan,
    before: Mapping[int, int],
    transfers: Sequence[tuple[float, float]],
    granules: Sequence[Granule],
    capacity_bytes: int,
    prediction: StepPrediction,
) -> Curve:
    """A load empties its slot when it begins and fills it when it ends; ``transfers`` are the loads' times in order."""
    in_slot = {slot: granule for granule, slot in before.items()}
    changes: list[tuple[float, int]] = []
    for load, (start_s, duration_s) in zip(plan.loads, transfers, strict=True):
        given_up = in_slot.get(load.slot)
        if given_up is not None:
            changes.append((start_s, -granules[given_up].nbytes))
        changes.append((start_s + duration_s, granules[load.granule].nbytes))
        in_slot[load.slot] = load.granule
    held = sum(granules[granule].nbytes for granule in before)
    times, nbytes = [0.0], [held]
    for when, change in sorted(changes):
        held += change
        times.append(when)
        nbytes.append(held)
    return Curve((*times, max(prediction.step_s, times[-1])), (*nbytes, held), capacity_bytes)
