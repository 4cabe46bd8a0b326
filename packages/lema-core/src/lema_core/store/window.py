"""The slots a tier owns: one slab, equal slots, a generation for each so that a stale slot is never read."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from lema_core.checkpoint.reading import as_numbers, tensor_bytes


class Window:
    """``n_slots`` slots of ``slot_bytes`` (whole sectors) in one slab (uint8). A slot's generation rises whenever its
    content is replaced."""

    def __init__(self, slab: Tensor, n_slots: int, slot_bytes: int) -> None:
        self.n_slots = n_slots
        self.slot_bytes = slot_bytes
        self._slab = slab
        self._granules: list[int | None] = [None] * n_slots
        self._ever_filled: set[int] = set()
        self._typed: dict[torch.dtype, Tensor] = {}
        #: by slot: what was handed out of its present content
        self._blocks: list[dict[tuple[int, tuple[int, ...]], Tensor]] = [{} for _ in range(n_slots)]
        self.generations = [0] * n_slots

    def slot(self, index: int) -> Tensor:
        """uint8 [slot_bytes]."""
        return self._slab[index * self.slot_bytes : (index + 1) * self.slot_bytes]

    def block(self, index: int, offset: int, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
        """What lies at byte ``offset`` of a slot; a copy where ``dtype`` cannot be read at that address."""
        key = offset, shape
        found = self._blocks[index].get(key)
        if found is None:
            found = self._view(index * self.slot_bytes + offset, dtype, shape)
            if found is None:
                count = math.prod(shape) * dtype.itemsize
                return as_numbers(self.slot(index)[offset : offset + count], dtype, shape)
            self._blocks[index][key] = found
        return found

    def _view(self, start_bytes: int, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor | None:
        start, misaligned = divmod(start_bytes, dtype.itemsize)
        if misaligned:
            return None
        whole = self._typed.get(dtype)
        if whole is None:
            whole = self._typed[dtype] = self._slab.view(dtype)
        strides = [1] * len(shape)
        for i in range(len(shape) - 1, 0, -1):
            strides[i - 1] = strides[i] * shape[i]
        # One call where slicing and viewing take four.
        return whole.as_strided(shape, strides, whole.storage_offset() + start)

    def memory(self, index: int) -> memoryview:
        """The same bytes for file reads; only for a slab in RAM."""
        return tensor_bytes(self.slot(index))

    def free(self) -> None:
        """Give the slab back; only when nothing fills it any more."""
        self._slab = self._slab[:0].clone()
        self._typed.clear()
        self._blocks = [{} for _ in range(self.n_slots)]
        self._granules = [None] * self.n_slots

    def begin_fill(self, index: int) -> None:
        """From now on the slot holds nothing that may be read."""
        self.generations[index] += 1
        self._granules[index] = None
        self._blocks[index] = {}
        self._ever_filled.add(index)

    def end_fill(self, index: int, granule: int) -> None:
        self._granules[index] = granule

    def slot_of(self, granule: int) -> int | None:
        """Where a granule may be read, None where it is not here."""
        return next((slot for slot, held in enumerate(self._granules) if held == granule), None)

    def drop(self, granule: int) -> None:
        """What the window holds of a granule, if anything, may not be read any more."""
        slot = self.slot_of(granule)
        if slot is not None:
            self.begin_fill(slot)

    def granule_in(self, index: int) -> int | None:
        return self._granules[index]

    def resident(self) -> Mapping[int, int]:
        """granule -> slot of everything that may be read."""
        return {granule: slot for slot, granule in enumerate(self._granules) if granule is not None}

    @property
    def bytes_now(self) -> int:
        return sum(granule is not None for granule in self._granules) * self.slot_bytes

    @property
    def peak_bytes(self) -> int:
        return len(self._ever_filled) * self.slot_bytes
