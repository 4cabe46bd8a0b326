"""What a step moves for weights that train, beside reading them and copying them to the device."""

from __future__ import annotations

from dataclasses import dataclass

from lema_core.store.model import Region, StreamedModel
from lema_core.store.state_plan import StatePlan, grads_sizes, optim_sizes, places_of
from lema_core.store.step_plan import StepPlan


@dataclass(frozen=True)
class StateTraffic:
    """Bytes of one step, in steps like it; ``copied_bytes``: between RAM and a device's own memory."""

    read_bytes: int
    written_bytes: int
    copied_bytes: int = 0


def state_traffic(model: StreamedModel, states: StatePlan, plan: StepPlan, stores_gradients: bool) -> StateTraffic:
    """Each record that is on disk comes and goes once; so does each weight in the file alone, and a weight that passes
    through the window in RAM is written once. ``plan``: of a step like those before it. ``stores_gradients``: they wait
    for their norm.

    A little less is read: what is in a slot of the ring when it is wanted again. Gradients of several groups of
    micro-batches may be copied more often.
    """
    places = places_of(model, states)
    optim, grads = (sizes(model, states.codecs, states.turns) for sizes in (optim_sizes, grads_sizes))
    records = [(optim, places.optim.kept)]
    if stores_gradients:
        records.append((grads, places.grads.kept))
    moved = sum(size for sizes, kept in records for number, size in enumerate(sizes) if number not in set(kept))
    passing = {load.granule for load in (plan.far or plan.near).loads}
    read = written = moved
    for each in model.trained:
        if each.region is not Region.STREAM:
            read += each.granule.nbytes
            written += each.granule.nbytes
        elif each.granule.index in passing:
            written += each.granule.nbytes
    copied = 0
    if plan.far is not None:
        # Moments come and go; a gradient comes when it is complete.
        copied = sum(each.granule.nbytes for each in model.trained) + 2 * sum(optim[i] for i in places.optim.device)
    return StateTraffic(read, written, copied)
