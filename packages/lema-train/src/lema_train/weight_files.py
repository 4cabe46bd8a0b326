"""A training of the model's own weights in files: the delta, and what a resumed run goes on with beside it.

``optimizer.safetensors`` holds the moments that the next step goes on from, ``<tensor>.exp_avg`` and
``<tensor>.exp_avg_sq`` in fp32; where they are kept in fewer bits, records of whole granules as they are,
``<number>.states``. Where a weight moved by more than it now is, ``original + delta`` may miss it by a rounding:
``<tensor>.exact_at`` and ``<tensor>.exact`` say which numbers these are, and what they are.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor

from lema_core.checkpoint import Manifest, TensorInfo, TensorToWrite, read_elements, read_tensor
from lema_core.checkpoint.describe import shorten
from lema_core.errors import CheckpointError
from lema_core.store.granules import Part
from lema_core.store.model import StreamedModel, TrainedGranule
from lema_core.store.store import TensorStore
from lema_core.training import SavedRun, WeightTraining
from lema_train.base_identity import identify_base
from lema_train.delta import DELTA_FILE, Delta, read_delta, write_delta

_COUNT = "updates_made:int"


class WeightFiles:
    """Writes and reads what ``training`` trains in ``store``. ``base``: what the delta is added to, ``base_name``: as
    its user named it."""

    def __init__(self, training: WeightTraining, store: TensorStore, base: Manifest, base_name: str) -> None:
        self._training = training
        self._store = store
        self._base = base
        self._base_name = base_name
        self._model = store.model
        #: stored name -> canonical one, in the order of the working file
        names = dict.fromkeys(part.tensor for each in self._model.trained for part in each.parts)
        self._names = {name: self._model.canonical(name) for name in names}

    # -- writing

    @property
    def weights_nbytes(self) -> int:
        return 4 * self._model.trained_numbers

    @property
    def nbytes(self) -> int:
        """Without exact numbers, which are few."""
        return self.weights_nbytes + self._store.updates.moments.stream.nbytes

    def write_weights(self, folder: Path) -> None:
        """The delta. Raises CheckpointError when the disk refuses."""
        self._store.updates.flush()
        self._exact: dict[str, list[int]] = {}
        # Without a name: it goes when the next one comes, or the process ends; states() reads it.
        self._spool = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115
        identity = identify_base(self._base, self._base_name)
        write_delta(folder / DELTA_FILE, map(self._delta_of, self._names), identity)

    def _delta_of(self, name: str) -> TensorToWrite:
        original = self._model.originals[name]

        def blocks() -> Iterator[Tensor]:
            for part in self._model.parts(name):
                first = part.start * math.prod(part.shape[1:])
                start = read_elements(original, first, math.prod(part.shape)).float()
                now = self._store.updates.weights_of(part)
                delta = now - start
                self._note_inexact(name, first, start.add_(delta), now)
                yield delta

        return self._names[name], torch.float32, tuple(original.shape), blocks

    def _note_inexact(self, name: str, first: int, restored: Tensor, now: Tensor) -> None:
        (places,) = (restored != now).nonzero(as_tuple=True)
        if len(places):
            self._exact.setdefault(name, []).append(len(places))
            self._spool.write((places + first).numpy().tobytes())
            self._spool.write(now[places].numpy().tobytes())

    def states(self, step: int) -> list[TensorToWrite]:
        """What goes into optimizer.safetensors; after :meth:`write_weights`."""
        found: list[TensorToWrite] = [_number(_COUNT, self._training.updates_made)]
        found += self._exact_numbers()
        carried = self._carried(step)
        if self._store.updates.moments.encoded:
            return found + [self._record(each.number) for each in carried]
        names = {part.tensor: self._names[part.tensor] for each in carried for part in each.parts}
        for name, canonical in names.items():
            shape = tuple(self._model.originals[name].shape)
            for which, state in enumerate(self._training.states):
                parts = self._model.parts(name)
                found.append(
                    (f"{canonical}.{state}", torch.float32, shape, lambda p=parts, w=which: self._state_blocks(p, w))
                )
        return found

    def _carried(self, step: int) -> list[TrainedGranule]:
        """Granules whose moments step ``step`` goes on from."""
        names = set(self._training.carried(step))
        return [each for each in self._model.trained if self._names[each.parts[0].tensor] in names]

    def _exact_numbers(self) -> Iterator[TensorToWrite]:
        offset = 0
        for name, counts in self._exact.items():
            total = (sum(counts),)
            for what, dtype in (("exact_at", torch.int64), ("exact", torch.float32)):
                get = lambda o=offset, c=tuple(counts), d=dtype: self._spooled(o, c, d)  # noqa: E731
                yield f"{self._names[name]}.{what}", dtype, total, get
            offset += 12 * total[0]

    def _spooled(self, offset: int, counts: tuple[int, ...], dtype: torch.dtype) -> Iterator[Tensor]:
        for count in counts:
            self._spool.seek(offset + (8 * count if dtype == torch.float32 else 0))
            yield torch.frombuffer(bytearray(self._spool.read(count * dtype.itemsize)), dtype=dtype)
            offset += 12 * count

    def _state_blocks(self, parts: tuple[Part, ...], which: int) -> Iterator[Tensor]:
        for part in parts:
            with self._store.updates.moments.of(part, self._store.gradients.number_of(part)) as states:
                yield states[which].clone()

    def _record(self, number: int) -> TensorToWrite:
        nbytes = self._store.updates.moments.sizes[number]

        def get() -> Iterator[Tensor]:
            with self._store.updates.moments.record(number) as record:
                yield record[:nbytes]

        return f"{number}.states", torch.uint8, (nbytes,), get

    # -- reading

    def read(self, folder: Path, infos: Mapping[str, TensorInfo], saved: SavedRun) -> None:
        """Go on from a checkpoint, whose optimizer states are ``infos``. Raises CheckpointError when it is of other
        tensors, or of another base."""
        delta = read_delta(folder)
        delta.check_base(self._base)
        carried = self._carried(saved.step)
        self._check(folder, delta, infos, carried)
        self._training.updates_made = int(read_tensor(infos[_COUNT]).item())
        self._store.set_weights(weight_values(self._model, delta, infos))
        moments = self._store.updates.moments
        if moments.encoded:
            for each in carried:
                with moments.record(each.number, changed=True) as record:
                    found = read_tensor(infos[f"{each.number}.states"])
                    record[: len(found)] = found
            return
        for each in carried:
            for part in each.parts:
                first, count = part.start * math.prod(part.shape[1:]), math.prod(part.shape)
                with moments.of(part, each.number, changed=True) as states:
                    for state, name in zip(states, self._training.states, strict=True):
                        state.copy_(read_elements(infos[f"{self._names[part.tensor]}.{name}"], first, count))

    def _check(
        self, folder: Path, delta: Delta, infos: Mapping[str, TensorInfo], carried: list[TrainedGranule]
    ) -> None:
        wanted, found = set(self._names.values()), set(delta.tensors)
        if wanted != found:
            other = sorted(wanted ^ found)
            raise CheckpointError(
                f"{folder}: {len(found)} tensors trained in it, {len(wanted)} are to train now; they differ in "
                f"{shorten(other)}: resume with the same trainable_modules and trainable_layers"
            )
        encoded = self._store.updates.moments.encoded
        ends = [f"{each.number}.states" for each in carried]
        if not encoded:
            names = dict.fromkeys(self._names[part.tensor] for each in carried for part in each.parts)
            ends = [f"{name}.{state}" for name in names for state in self._training.states]
        missing = [name for name in (_COUNT, *ends) if name not in infos]
        if missing:
            raise CheckpointError(
                f"{folder}: no optimizer state {shorten(missing)}: resume with the training_mode, method_options and "
                "opt_state_bits of the run that wrote it"
            )
        for number in (each.number for each in carried if encoded):
            shape, size = infos[f"{number}.states"].shape, self._store.updates.moments.sizes[number]
            if shape != (size,):
                raise CheckpointError(
                    f"{folder}: optimizer state {number}.states: {size} bytes expected, {shape[0]} found: resume with "
                    "the opt_state_bits of the run that wrote it"
                )


def weight_values(
    model: StreamedModel, delta: Delta | None, infos: Mapping[str, TensorInfo] | None = None
) -> Callable[[str, int, int], Tensor]:
    """What the trained weights of ``model`` are, by stored name, first number and count: those of the base, with
    ``delta`` and the exact numbers that ``infos``, a checkpoint's optimizer states, have."""
    exact: dict[str, tuple[Tensor, Tensor]] = {}

    def get(name: str, start: int, count: int) -> Tensor:
        values = read_elements(model.originals[name], start, count).float()
        canonical = model.canonical(name)
        if delta is None or canonical not in delta.tensors:
            return values
        values += delta.elements(canonical, start, count)
        if infos is not None and f"{canonical}.exact" in infos:
            if canonical not in exact:
                exact.clear()
                exact[canonical] = tuple(read_tensor(infos[f"{canonical}.{what}"]) for what in ("exact_at", "exact"))
            at, numbers = exact[canonical]
            here = (at >= start) & (at < start + count)
            values[at[here] - start] = numbers[here]
        return values

    return get


def _number(name: str, value: int) -> TensorToWrite:
    return name, torch.int64, (), lambda: torch.tensor(value, dtype=torch.int64)
