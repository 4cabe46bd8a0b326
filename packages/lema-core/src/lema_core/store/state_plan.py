"""Where what training keeps beside the weights has its place, decided before a run begins."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from lema_core.device import Device
from lema_core.store.accumulators import DeviceAccumulators, accumulator_slots
from lema_core.store.codec import Encoding, StateCodecClass
from lema_core.store.gradients import GradientStream
from lema_core.store.granules import whole_sectors
from lema_core.store.masters import Masters
from lema_core.store.model import StreamedModel
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
    """``optim_device_bytes``, ``grads_device_bytes``: a device's own memory for records that have their place there;
    of the others, ``optim_bytes``, ``grads_bytes``: RAM for those that never leave it, None for all. ``folder``: where
    the rest and the weights themselves have their files. ``turns``: see :func:`rooms_of`."""

    folder: Path
    optim_bytes: int | None = None
    grads_bytes: int | None = None
    optim_device_bytes: int = 0
    grads_device_bytes: int = 0
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


@dataclass(frozen=True)
class StateMemory:
    """Bytes that are allocated, by tier: records of moments and of gradients with the slots that others pass through,
    and in RAM a granule's weights and decoded states on their way (``passing``)."""

    optim: int
    grads: int
    passing: int
    optim_device: int
    grads_device: int

    @property
    def ram(self) -> int:
        return self.optim + self.grads + self.passing

    @property
    def device(self) -> int:
        return self.optim_device + self.grads_device


def state_memory(model: StreamedModel, plan: StatePlan, shares_ram: bool = True) -> StateMemory:
    """What :func:`open_updates` allocates. ``shares_ram``: the device computes from RAM."""
    places = places_of(model, plan)
    optim_of, grads_of = optim_sizes(model, plan.codecs, plan.turns), grads_sizes(model, plan.codecs, plan.turns)
    granule = max(each.granule.nbytes for each in model.trained)
    slots = 0
    if not shares_ram:
        slots = accumulator_slots(plan.codecs.grads is not None, _passing(grads_of, places.grads, plan))
    return StateMemory(
        optim=_ram_bytes(optim_of, places.optim, plan.optim_slots),
        grads=_ram_bytes(grads_of, places.grads, plan.grads_slots),
        passing=(1 + _n_decoded(plan.codecs)) * granule,
        optim_device=sum(optim_of[i] for i in places.optim.device),
        grads_device=sum(grads_of[i] for i in places.grads.device) + slots * granule,
    )


def _ram_bytes(sizes: Sequence[int], places: Places, n_slots: int) -> int:
    kept = set(places.ram)
    others = [size for i, size in enumerate(sizes) if i not in kept]
    return sum(sizes[i] for i in kept) + n_slots * max(others, default=0)


def _passing(sizes: Sequence[int], places: Places, plan: StatePlan) -> int:
    """How many accumulators a device has beside its records of gradients: none for those that are added to in their
    place."""
    return len(sizes) if plan.codecs.grads is not None else len(sizes) - len(places.device)


def _n_decoded(codecs: StateCodecs) -> int:
    """Gradients are decoded where they are added up, and where they are used."""
    return sum(codec is not None for codec in (codecs.exp_avg, codecs.exp_avg_sq, codecs.grads, codecs.grads))


def passing_bytes(model: StreamedModel, codecs: StateCodecs) -> int:
    """RAM for what passes through, at most: slots for records on their way, and a granule's weights and decoded
    states."""
    granule = max(each.granule.nbytes for each in model.trained)
    slots = FEWEST_SLOTS * (max(optim_sizes(model, codecs)) + max(grads_sizes(model, codecs)))
    return slots + (1 + _n_decoded(codecs)) * granule


def device_passing_bytes(model: StreamedModel, codecs: StateCodecs) -> int:
    """Memory of a device of its own for accumulators that gradients pass through, at most."""
    granule = max(each.granule.nbytes for each in model.trained)
    return accumulator_slots(codecs.grads is not None, len(model.trained)) * granule


def open_updates(
    model: StreamedModel, plan: StatePlan, device: Device, windows: Sequence[Window], expert_windows: Sequence[Window]
) -> WeightUpdates:
    """Make files and memory as ``plan`` says. ``windows``: see Masters. Raises TransferError where the disk has no
    room, BudgetError where the device has none."""
    most = max(each.granule.nbytes for each in model.trained) // 4
    codecs = plan.codecs
    rooms = rooms_of(model, plan.turns)
    grads_of, optim_of = grads_sizes(model, codecs, plan.turns), optim_sizes(model, codecs, plan.turns)
    places = places_of(model, plan)
    # Each file alone may find room that all together have not.
    on_disk = model.space.nbytes + sum(grads_of) + sum(optim_of)
    on_disk -= sum(grads_of[i] for i in places.grads.kept) + sum(optim_of[i] for i in places.optim.kept)
    check_room(plan.folder, on_disk, "weights, optimizer states and gradients")
    file = UnnamedFile(plan.folder, "weights")
    file.reserve(model.space.nbytes)
    grads, optim = (
        StateStream(kind, sizes, where.ram, n_slots, plan.folder, device, rooms, where.device)
        for kind, sizes, where, n_slots in (
            ("grads", grads_of, places.grads, plan.grads_slots),
            ("optim", optim_of, places.optim, plan.optim_slots),
        )
    )
    encoding, on_device = Encoding(codecs.grads, most), None
    if not device.shares_ram:
        granules = [each.granule for each in model.trained]
        slots = accumulator_slots(encoding.encodes, _passing(grads_of, places.grads, plan))
        on_device = DeviceAccumulators(device, grads, encoding, granules, slots)
    states = {"exp_avg": Encoding(codecs.exp_avg, most), "exp_avg_sq": Encoding(codecs.exp_avg_sq, most)}
    gradients = GradientStream(model, grads, encoding, on_device)
    masters = Masters(model, file, windows, expert_windows)
    return WeightUpdates(masters, Moments(model, optim, states), gradients, Encoding(codecs.grads, most))


class Places(NamedTuple):
    """Numbers of the records that have their place on the device, and of those that never leave RAM."""

    device: list[int]
    ram: list[int]

    @property
    def kept(self) -> list[int]:
        """Those that are not on disk."""
        return self.device + self.ram


class StatePlaces(NamedTuple):
    """Of each stream."""

    grads: Places
    optim: Places


def places_of(model: StreamedModel, plan: StatePlan) -> StatePlaces:
    """Where ``plan`` has the records of each stream: first on the device, then in RAM, then on disk."""
    rooms = rooms_of(model, plan.turns)
    ordered = sorted(model.trained, key=lambda each: each.granule.layer is not None)
    # those outside blocks first, which several parts of a step add to
    order = list(dict.fromkeys(rooms[each.number] for each in ordered))

    def places(sizes: Sequence[int], device_bytes: int, ram_bytes: int | None) -> Places:
        on_device = _fitting(order, sizes, device_bytes)
        return Places(on_device, _fitting([i for i in order if i not in set(on_device)], sizes, ram_bytes))

    return StatePlaces(
        places(grads_sizes(model, plan.codecs, plan.turns), plan.grads_device_bytes, plan.grads_bytes),
        places(optim_sizes(model, plan.codecs, plan.turns), plan.optim_device_bytes, plan.optim_bytes),
    )


def _fitting(order: Sequence[int], sizes: Sequence[int], nbytes: int | None) -> list[int]:
    """The first of ``order`` that ``nbytes`` are enough for; None: all."""
    found: list[int] = []
    for room in order:
        if nbytes is not None:
            if sizes[room] > nbytes:
                break
            nbytes -= sizes[room]
        found.append(room)
    return found
