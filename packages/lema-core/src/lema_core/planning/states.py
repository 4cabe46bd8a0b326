"""What a step moves between disk and RAM for weights that train, beside reading them."""

from __future__ import annotations

from dataclasses import dataclass

from lema_core.store.model import Region, StreamedModel
from lema_core.store.planner import TierPlan
from lema_core.store.state_plan import StatePlan, grads_sizes, optim_sizes, places_of


@dataclass(frozen=True)
class StateTraffic:
    """Bytes of one step, in steps like it."""

    read_bytes: int
    written_bytes: int


def state_traffic(model: StreamedModel, states: StatePlan, near: TierPlan, stores_gradients: bool) -> StateTraffic:
    """Each record that does not stay in RAM comes and goes once; so does each weight in the file alone, and a weight
    that passes through the window is written once. ``near``: of a step like those before it. ``stores_gradients``:
    they wait for their norm.

    A little less moves: what is in a slot of the ring when it is wanted again is not read.
    """
    places = places_of(model, states)
    records = [(optim_sizes(model, states.codecs, states.turns), places.optim.kept)]
    if stores_gradients:
        records.append((grads_sizes(model, states.codecs, states.turns), places.grads.kept))
    moved = sum(size for sizes, kept in records for number, size in enumerate(sizes) if number not in kept)
    passing = {load.granule for load in near.loads}
    read = written = moved
    for each in model.trained:
        if each.region is not Region.STREAM:
            read += each.granule.nbytes
            written += each.granule.nbytes
        elif each.granule.index in passing:
            written += each.granule.nbytes
    return StateTraffic(read, written)
