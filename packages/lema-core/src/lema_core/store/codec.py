"""How states lie in their records: as fp32 numbers, or in fewer bits by a codec."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

import torch
from torch import Tensor

from lema_core.device import map_ram

#: a state starts at a multiple of this in its record
_ALIGNMENT_BYTES = 64


class StateCodecClass(Protocol):
    """What a StateCodec record names; made with the kind of state: ``exp_avg``, ``exp_avg_sq`` or ``grads``."""

    def nbytes(self, n: int) -> int:
        """Bytes of ``n`` encoded numbers."""

    def encode(self, values: Tensor, encoded: Tensor) -> None:
        """fp32 [n] to uint8 [nbytes(n)]."""

    def decode(self, encoded: Tensor, values: Tensor) -> None:
        """uint8 [nbytes(n)] to fp32 [n]; zeros where all bytes are zero."""


class Encoding:
    """States of up to ``most`` numbers, decoded one at a time; ``codec`` None: they lie as fp32, and nothing is
    decoded. Used by one thread at a time."""

    def __init__(self, codec: StateCodecClass | None, most: int) -> None:
        self._codec = codec
        self._scratch = None if codec is None else map_ram(4 * most).view(torch.float32)

    @property
    def encodes(self) -> bool:
        return self._codec is not None

    @property
    def scratch_bytes(self) -> int:
        return 0 if self._scratch is None else self._scratch.nbytes

    def nbytes(self, n: int) -> int:
        """What ``n`` numbers take of a record."""
        nbytes = 4 * n if self._codec is None else self._codec.nbytes(n)
        return -(-nbytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES

    @contextmanager
    def decoded(self, held: Tensor, n: int, changed: bool = True) -> Iterator[Tensor]:
        """fp32 [n] of what lies in ``held``, uint8; ``changed``: it is written back there."""
        if self._codec is None:
            yield held[: 4 * n].view(torch.float32)
            return
        encoded, numbers = held[: self._codec.nbytes(n)], self._scratch[:n]
        self._codec.decode(encoded, numbers)
        yield numbers
        if changed:
            self._codec.encode(numbers, encoded)
