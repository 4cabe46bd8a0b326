"""How much of what training keeps beside the weights stays in RAM, decided before a run begins."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from lema_core.store.codec import Encoding, StateCodecClass
from lema_core.store.gradients import GradientStream
from lema_core.store.granules import whole_sectors
from lema_core.store.masters import Masters
from lema_core.store.model import StreamedModel, TrainedGranule
from lema_core.store.moments import Moments
from lema_core.store.states import FEWEST_SLOTS, StateStream
from lema_core.store.unnamed import UnnamedFile, check_room
from lema_core.store.updates import WeightUpdates
from lema_core.store.window import Window

#: names of tensors by the turn that they train in
Turns = Sequence[Collection[str]]


@dataclass(frozen=True)
class StateCodecs:
    """How each kind of state is encoded; None: fp32."""

    exp_avg: StateCodecClass | None = None
    exp_avg_sq: StateCodecClass | None = None
    grads: StateCodecClass | None = None


@dataclass(frozen=True)
class StatePlan:
    """``optim_bytes``, ``grads_bytes``: RAM for records that never leave it, None for all. ``folder``: where the others
    and the weights themselves have their files. ``turns``: see :func:`rooms_of`."""

    folder: Path
    optim_bytes: int | None = None
    grads_bytes: int | None = None
    optim_slots: int = FEWEST_SLOTS
    grads_slots: int = FEWEST_SLOTS
    codecs: StateCodecs = StateCodecs()
    turns: Turns = ()


def rooms_of(model: StreamedModel, turns: Turns) -> list[int]:
    """The record that each trained granule has its states in.

    ``turns``: names of tensors that train in turns, each of them with states that start anew: what trains in one turn
    takes the records of what trained in another, the largest ones the largest. Empty: each granule has its own.
    """
    if not turns:
        return list(range(len(model.trained)))
    turn_of = {name: turn for turn, names in enumerate(turns) for name in names}
    taken = [0] * len(turns)
    rooms = [0] * len(model.trained)
    for each in sorted(model.trained, key=lambda each: -each.granule.nbytes):
        turn = turn_of[model.canonical(each.parts[0].tensor)]
        rooms[each.number] = taken[turn]
        taken[turn] += 1
    return rooms


def optim_sizes(model: StreamedModel, codecs: StateCodecs, turns: Turns = ()) -> list[int]:
    """Bytes of each record of moments."""
    first, second = Encoding(codecs.exp_avg, 0), Encoding(codecs.exp_avg_sq, 0)
    return _sizes(model, turns, lambda n: first.nbytes(n) + second.nbytes(n))


def grads_sizes(model: StreamedModel, codecs: StateCodecs, turns: Turns = ()) -> list[int]:
    """Bytes of each gradient accumulator."""
    return _sizes(model, turns, Encoding(codecs.grads, 0).nbytes)


def _sizes(model: StreamedModel, turns: Turns, nbytes: Callable[[int], int]) -> list[int]:
    """Of each record; ``nbytes`` of so many numbers."""
    rooms = rooms_of(model, turns)
    sizes = [0] * (max(rooms) + 1)
    for room, each in zip(rooms, model.trained, strict=True):
        sizes[room] = max(sizes[room], whole_sectors(nbytes(each.granule.nbytes // 4)))
    return sizes


def passing_bytes(model: StreamedModel, codecs: StateCodecs) -> int:
    """RAM for what passes through: slots for records on their way, and a granule's weights and decoded states."""
    granule = max(each.granule.nbytes for each in model.trained)
    slots = FEWEST_SLOTS * (max(optim_sizes(model, codecs)) + max(grads_sizes(model, codecs)))
    decoded = sum(codec is not None for codec in (codecs.exp_avg, codecs.exp_avg_sq, codecs.grads, codecs.grads))
    return slots + (1 + decoded) * granule


def open_updates(model: StreamedModel, plan: StatePlan, window: Window, expert_window: Window | None) -> WeightUpdates:
    """Make files and memory as ``plan`` says. Raises TransferError where the disk has no room."""
    most = max(each.granule.nbytes for each in model.trained) // 4
    codecs = plan.codecs
    rooms = rooms_of(model, plan.turns)
    grads_of, optim_of = grads_sizes(model, codecs, plan.turns), optim_sizes(model, codecs, plan.turns)
    in_ram = records_in_ram(model, plan)
    # Each file alone may find room that all together have not.
    on_disk = model.space.nbytes + sum(grads_of) + sum(optim_of)
    on_disk -= sum(grads_of[i] for i in in_ram.grads) + sum(optim_of[i] for i in in_ram.optim)
    check_room(plan.folder, on_disk, "weights, optimizer states and gradients")
    file = UnnamedFile(plan.folder, "weights")
    file.reserve(model.space.nbytes)
    grads = StateStream("grads", grads_of, in_ram.grads, plan.grads_slots, plan.folder, rooms)
    optim = StateStream("optim", optim_of, in_ram.optim, plan.optim_slots, plan.folder, rooms)
    states = {"exp_avg": Encoding(codecs.exp_avg, most), "exp_avg_sq": Encoding(codecs.exp_avg_sq, most)}
    gradients = GradientStream(model, grads, Encoding(codecs.grads, most))
    masters = Masters(model, file, window, expert_window)
    return WeightUpdates(masters, Moments(model, optim, states), gradients, Encoding(codecs.grads, most))


class InRam(NamedTuple):
    """Numbers of the records that never leave RAM."""

    grads: list[int]
    optim: list[int]


def records_in_ram(model: StreamedModel, plan: StatePlan) -> InRam:
    """What ``plan`` keeps of each stream."""
    rooms = rooms_of(model, plan.turns)
    grads = _resident(model.trained, rooms, grads_sizes(model, plan.codecs, plan.turns), plan.grads_bytes)
    optim = _resident(model.trained, rooms, optim_sizes(model, plan.codecs, plan.turns), plan.optim_bytes)
    return InRam(grads, optim)


def _resident(
    trained: Sequence[TrainedGranule], rooms: Sequence[int], sizes: Sequence[int], nbytes: int | None
) -> list[int]:
    """Records that stay in RAM: first those outside blocks, which several parts of a step add to."""
    found: list[int] = []
    ordered = sorted(trained, key=lambda each: each.granule.layer is not None)
    for room in dict.fromkeys(rooms[each.number] for each in ordered):
        if nbytes is not None:
            if sizes[room] > nbytes:
                break
            nbytes -= sizes[room]
        found.append(room)
    return found
