"""How much of what training keeps beside the weights stays in RAM, decided before a run begins."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from lema_core.store.codec import Encoding, StateCodecClass
from lema_core.store.gradients import GradientStream
from lema_core.store.granules import whole_sectors
from lema_core.store.model import StreamedModel, TrainedGranule
from lema_core.store.states import FEWEST_SLOTS, StateStream
from lema_core.store.unnamed import UnnamedFile, check_room
from lema_core.store.updates import WeightUpdates
from lema_core.store.window import Window


@dataclass(frozen=True)
class StateCodecs:
    """How each kind of state is encoded; None: fp32."""

    exp_avg: StateCodecClass | None = None
    exp_avg_sq: StateCodecClass | None = None
    grads: StateCodecClass | None = None


@dataclass(frozen=True)
class StatePlan:
    """``optim_bytes``, ``grads_bytes``: RAM for records that never leave it, None for all. ``folder``: where the others
    and the weights themselves have their files."""

    folder: Path
    optim_bytes: int | None = None
    grads_bytes: int | None = None
    optim_slots: int = FEWEST_SLOTS
    grads_slots: int = FEWEST_SLOTS
    codecs: StateCodecs = StateCodecs()


def optim_sizes(model: StreamedModel, codecs: StateCodecs) -> list[int]:
    """Bytes of each record of moments."""
    first, second = Encoding(codecs.exp_avg, 0), Encoding(codecs.exp_avg_sq, 0)
    counts = [each.granule.nbytes // 4 for each in model.trained]
    return [whole_sectors(first.nbytes(n) + second.nbytes(n)) for n in counts]


def grads_sizes(model: StreamedModel, codecs: StateCodecs) -> list[int]:
    """Bytes of each gradient accumulator."""
    encoding = Encoding(codecs.grads, 0)
    return [whole_sectors(encoding.nbytes(each.granule.nbytes // 4)) for each in model.trained]


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
    grads_of, optim_of = grads_sizes(model, codecs), optim_sizes(model, codecs)
    grads_in_ram = _resident(model.trained, grads_of, plan.grads_bytes)
    optim_in_ram = _resident(model.trained, optim_of, plan.optim_bytes)
    # Each file alone may find room that all together have not.
    on_disk = model.space.nbytes + sum(grads_of) + sum(optim_of)
    on_disk -= sum(grads_of[i] for i in grads_in_ram) + sum(optim_of[i] for i in optim_in_ram)
    check_room(plan.folder, on_disk, "weights, optimizer states and gradients")
    file = UnnamedFile(plan.folder, "weights")
    file.reserve(model.space.nbytes)
    grads = StateStream("grads", grads_of, grads_in_ram, plan.grads_slots, plan.folder)
    optim = StateStream("optim", optim_of, optim_in_ram, plan.optim_slots, plan.folder)
    states = {"exp_avg": Encoding(codecs.exp_avg, most), "exp_avg_sq": Encoding(codecs.exp_avg_sq, most)}
    gradients = GradientStream(model, grads, Encoding(codecs.grads, most))
    return WeightUpdates(model, file, optim, gradients, states, Encoding(codecs.grads, most), window, expert_window)


def _resident(trained: Sequence[TrainedGranule], sizes: Sequence[int], nbytes: int | None) -> list[int]:
    """Records that stay in RAM: first those outside blocks, which several parts of a step add to."""
    found: list[int] = []
    for each in sorted(trained, key=lambda each: each.granule.layer is not None):
        if nbytes is not None:
            if sizes[each.number] > nbytes:
                break
            nbytes -= sizes[each.number]
        found.append(each.number)
    return found
