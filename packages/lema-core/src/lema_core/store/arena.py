"""RAM that a device copies to and from, handed out in ranges."""

from __future__ import annotations

from torch import Tensor

from lema_core.device import Device
from lema_core.store.granules import SECTOR_BYTES, whole_sectors

#: the least that is allocated where there is no limit
_SLAB_BYTES = 16_000_000


class Arena:
    """Ranges of at most ``limit`` bytes in all, each in whole sectors, in one slab of that size (None: in as many slabs
    as it takes). Nothing is allocated before the first range, and what is, is kept."""

    def __init__(self, device: Device, limit: int | None) -> None:
        self._device = device
        self._limit = limit
        self._slabs: list[Tensor] = []
        #: by slab: start -> end of what is in use
        self._used: list[dict[int, int]] = []
        self.bytes_now = 0
        self.peak_bytes = 0

    def reserve(self, nbytes: int) -> Tensor | None:
        """uint8 [nbytes], or None where there is no room."""
        whole = whole_sectors(nbytes)
        found = self._gap(whole)
        if found is None and self._grow(whole):
            found = self._gap(whole)
        if found is None:
            return None
        number, start = found
        self._used[number][start] = start + whole
        self.bytes_now += whole
        self.peak_bytes = max(self.peak_bytes, self.bytes_now)
        return self._slabs[number][start : start + nbytes]

    def free(self, held: Tensor) -> None:
        for slab, used in zip(self._slabs, self._used, strict=True):
            start = held.data_ptr() - slab.data_ptr()
            if start in used:
                self.bytes_now -= used.pop(start) - start
                return
        raise ValueError("not a range of this arena")

    def free_all(self) -> None:
        for used in self._used:
            used.clear()
        self.bytes_now = 0

    def _gap(self, nbytes: int) -> tuple[int, int] | None:
        for number, (slab, used) in enumerate(zip(self._slabs, self._used, strict=True)):
            start = 0
            for low, high in sorted(used.items()):
                if low - start >= nbytes:
                    break
                start = high
            if len(slab) - start >= nbytes:
                return number, start
        return None

    def _grow(self, nbytes: int) -> bool:
        wanted = max(nbytes, _SLAB_BYTES)
        if self._limit is not None:
            wanted = 0 if self._slabs else self._limit // SECTOR_BYTES * SECTOR_BYTES
        if wanted < nbytes:
            return False
        self._slabs.append(self._device.allocate_ram(wanted))
        self._used.append({})
        return True

    def close(self) -> None:
        """Forget the slabs; the device that gave them frees what it locked."""
        self.free_all()
        self._slabs.clear()
        self._used.clear()
