"""The ``optim`` stream: the moments of weights that train, a record for each granule, in fp32 or fewer bits."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from torch import Tensor

from lema_core.store.codec import Encoding
from lema_core.store.granules import Part
from lema_core.store.model import StreamedModel, numbers_of
from lema_core.store.states import StateStream


class Moments:
    """``encodings``: of each kind of moment, in the order in which they lie in a record. Used by one thread at a
    time."""

    def __init__(self, model: StreamedModel, stream: StateStream, encodings: Mapping[str, Encoding]) -> None:
        self.stream = stream
        self._model = model
        self._encodings = tuple(encodings.values())

    @property
    def encoded(self) -> bool:
        """They are kept in fewer bits than fp32 has."""
        return any(each.encodes for each in self._encodings)

    @property
    def sizes(self) -> list[int]:
        """Bytes of each granule's."""
        counts = [each.granule.nbytes // 4 for each in self._model.trained]
        return [sum(each.nbytes(n) for each in self._encodings) for n in counts]

    @property
    def device_bytes(self) -> int:
        """What they have of a device's own memory."""
        return self.stream.device_bytes

    @property
    def scratch_bytes(self) -> int:
        return sum(each.scratch_bytes for each in self._encodings)

    @contextmanager
    def record(self, number: int, changed: bool = False) -> Iterator[Tensor]:
        """A granule's as they are kept, uint8. Not while an update is pending."""
        record = self.stream.take(number)
        try:
            yield record
        finally:
            self.stream.give(number, changed=changed)

    @contextmanager
    def of(self, part: Part, number: int, changed: bool = False) -> Iterator[tuple[Tensor, Tensor]]:
        """``exp_avg`` and ``exp_avg_sq`` of a part of granule ``number``, flat fp32; only where they are kept so."""
        n = self._model.trained[number].granule.nbytes // 4
        with self.record(number, changed) as record, self.decoded(record, n, changed) as (first, second):
            yield numbers_of(part, first), numbers_of(part, second)

    @contextmanager
    def decoded(self, record: Tensor, n: int, changed: bool) -> Iterator[tuple[Tensor, Tensor]]:
        """Both of ``n`` numbers, fp32; ``changed``: they are written back to ``record``."""
        first, second = self._encodings
        cut = first.nbytes(n)
        with first.decoded(record[:cut], n, changed) as m, second.decoded(record[cut:], n, changed) as v:
            yield m, v
