"""The ``grads`` stream: where gradients of weights that train are added up, and their global norm."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor

from lema_core.errors import PlanError
from lema_core.ops.gradients import Gradients
from lema_core.store.accumulators import DeviceAccumulators
from lema_core.store.codec import Encoding
from lema_core.store.granules import Part
from lema_core.store.model import StreamedModel, TrainedGranule, numbers_of
from lema_core.store.states import StateStream


class GradientStream(Gradients):
    """Accumulators of the trained granules of ``model``, one record each, laid out as the granule. ``on_device``: where
    they are added up on a device with memory of its own, None where that is RAM.

    ``done``, where somebody sets it, is told each granule whose gradient is complete; ``before_zeros`` is called before
    a gradient of an earlier step is lost, and returns when nobody needs it any more.
    """

    def __init__(
        self,
        model: StreamedModel,
        stream: StateStream,
        encoding: Encoding,
        on_device: DeviceAccumulators | None = None,
    ) -> None:
        self.stream = stream
        self.encoding = encoding
        self.on_device = on_device
        self._model = model
        #: that compute waited for an accumulator
        self.wait_s = 0.0
        self.done: Callable[[int], None] | None = None
        self.before_zeros: Callable[[int], None] | None = None
        self._numbers = {part: each.number for each in model.trained for part in each.parts}
        self._of_layer: dict[int | None, list[TrainedGranule]] = {}
        for each in model.trained:
            self._of_layer.setdefault(each.granule.layer, []).append(each)
        self._begun: set[int] = set()
        #: of a device with memory of its own: as that computes them
        self._norms: dict[Part, float | Tensor] = {}
        self.begin_step()

    def begin_step(self, active: Collection[str] | None = None) -> None:
        """From here on all gradients are zeros. ``active``: names of the tensors that train in this step, None for all.
        Raises PlanError where they share a granule with others."""
        if self.on_device is not None:
            # what a step that failed left there
            self.on_device.forget()
        self._begun.clear()
        self._norms.clear()
        names = set(self._model.originals)
        if active is not None:
            names = {self._model.shared.get(name, name) for name in active}
        self._active = names
        self.numbers = []
        for each in self._model.trained:
            inside = {part.tensor in names for part in each.parts}
            if len(inside) > 1:
                raise PlanError(f"{each.parts[0].tensor}: what trains in a step is whole layers")
            if True in inside:
                self.numbers.append(each.number)

    def trains(self, tensor: str) -> bool:
        return self._model.shared.get(tensor, tensor) in self._active

    def row_parts(self, tensor: str) -> tuple[Part, ...]:
        return self._model.parts(tensor)

    def number_of(self, part: Part) -> int:
        """Of the granule that a part is in."""
        return self._numbers[part]

    @contextmanager
    def borrow(self, part: Part) -> Iterator[Tensor]:
        with self._taken(self._numbers[part]) as numbers:
            total = numbers_of(part, numbers)
            yield total.view(part.shape)
            # Now, since a record that left RAM meanwhile would be read once more for it.
            self._norms[part] = _norm(total) if self.on_device is None else _norms(total)

    def complete(self, layer: int | None) -> None:
        active = set(self.numbers)
        for each in self._of_layer.get(layer, ()):
            if each.number not in active:
                continue
            if each.number not in self._begun:
                with self._taken(each.number):
                    pass
            if self.on_device is not None:
                self.on_device.complete(each.number)
            if self.done is not None:
                self.done(each.number)
            elif self.on_device is None:
                self.stream.settle(each.number)

    def norm(self) -> tuple[float, str | None]:
        """Of all gradients of the step, and the first tensor with an infinite or NaN element, if any. Summed exactly:
        the order in which gradients were complete does not matter."""
        norms = self._norms if self.on_device is None else _read(self._norms)
        for number in self.numbers:
            for part in self._model.trained[number].parts:
                if not math.isfinite(norm := norms.get(part, 0.0)):
                    return norm, self._model.canonical(part.tensor)
        return math.sqrt(math.fsum(norm * norm for norm in norms.values())), None

    def take(self, number: int) -> Tensor:
        """The record of a complete gradient, for another thread; given back to the stream."""
        if self.on_device is not None:
            self.on_device.await_record(number)
        return self.stream.take(number)

    @property
    def device_bytes(self) -> int:
        """What records and accumulators have of a device's own memory."""
        return 0 if self.on_device is None else self.stream.device_bytes + self.on_device.device_bytes

    @property
    def bytes_copied(self) -> int:
        """Between the device and RAM."""
        return 0 if self.on_device is None else self.stream.bytes_copied + self.on_device.copied_bytes

    def forget(self) -> None:
        """Gradients of a step that changes nothing are lost."""
        if self.on_device is not None:
            self.on_device.forget()
        self.stream.forget()

    def close(self) -> None:
        """Stop the threads and give everything back."""
        if self.on_device is not None:
            self.on_device.close()
        self.stream.close()

    @contextmanager
    def _taken(self, number: int) -> Iterator[Tensor]:
        """fp32 numbers of a record, padding included, changed in place."""
        fresh = number not in self._begun
        if fresh and self.before_zeros is not None:
            self.before_zeros(number)
        self._begun.add(number)
        started = time.perf_counter()
        if self.on_device is not None:
            with self.on_device.taken(number, fresh) as numbers:
                self.wait_s += time.perf_counter() - started
                yield numbers
            return
        record = self.stream.take(number, fresh)
        self.wait_s += time.perf_counter() - started
        try:
            with self.encoding.decoded(record, self._model.trained[number].granule.nbytes // 4) as numbers:
                yield numbers
        finally:
            self.stream.give(number, changed=True, more=True)


def _norm(gradient: Tensor) -> float:
    norm = torch.linalg.vector_norm(gradient, dtype=torch.float32).item()
    if not math.isfinite(norm):
        # the squares of finite values above 1.8e19 overflow in fp32
        norm = torch.linalg.vector_norm(gradient, dtype=torch.float64).item()
    return norm


def _norms(gradient: Tensor) -> Tensor:
    """What :func:`_norm` chooses from, fp64 [2]; nobody waits for it."""
    dtypes = (torch.float32, torch.float64)
    return torch.stack([torch.linalg.vector_norm(gradient, dtype=dtype).double() for dtype in dtypes])


def _read(norms: Mapping[Part, Tensor]) -> dict[Part, float]:
    if not norms:
        return {}
    pairs = torch.stack(list(norms.values())).tolist()
    return {part: norm if math.isfinite(norm) else wide for part, (norm, wide) in zip(norms, pairs, strict=True)}
