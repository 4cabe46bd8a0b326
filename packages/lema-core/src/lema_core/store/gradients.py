"""The ``grads`` stream: where gradients of weights that train are added up, and their global norm."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from lema_core.errors import PlanError
from lema_core.ops.gradients import Gradients
from lema_core.store.codec import Encoding
from lema_core.store.granules import Part
from lema_core.store.model import StreamedModel, TrainedGranule, numbers_of
from lema_core.store.states import StateStream


class GradientStream(Gradients):
    """Accumulators of the trained granules of ``model``, one record each, laid out as the granule.

    ``done``, where somebody sets it, is told each granule whose gradient is complete; ``before_zeros`` is called before
    a gradient of an earlier step is lost, and returns when nobody needs it any more.
    """

    def __init__(self, model: StreamedModel, stream: StateStream, encoding: Encoding) -> None:
        self.stream = stream
        self.encoding = encoding
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
        self._norms: dict[Part, float] = {}
        self.begin_step()

    def begin_step(self, active: Collection[str] | None = None) -> None:
        """From here on all gradients are zeros. ``active``: names of the tensors that train in this step, None for all.
        Raises PlanError where they share a granule with others."""
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
            self._norms[part] = _norm(total)

    def complete(self, layer: int | None) -> None:
        active = set(self.numbers)
        for each in self._of_layer.get(layer, ()):
            if each.number not in active:
                continue
            if each.number not in self._begun:
                with self._taken(each.number):
                    pass
            if self.done is None:
                self.stream.settle(each.number)
            else:
                self.done(each.number)

    def norm(self) -> tuple[float, str | None]:
        """Of all gradients of the step, and the first tensor with an infinite or NaN element, if any. Summed exactly:
        the order in which gradients were complete does not matter."""
        for number in self.numbers:
            for part in self._model.trained[number].parts:
                if not math.isfinite(norm := self._norms.get(part, 0.0)):
                    return norm, self._model.canonical(part.tensor)
        return math.sqrt(math.fsum(norm * norm for norm in self._norms.values())), None

    @contextmanager
    def _taken(self, number: int) -> Iterator[Tensor]:
        """fp32 numbers of a record, padding included, changed in place."""
        fresh = number not in self._begun
        if fresh and self.before_zeros is not None:
            self.before_zeros(number)
        started = time.perf_counter()
        record = self.stream.take(number, fresh)
        self.wait_s += time.perf_counter() - started
        self._begun.add(number)
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
