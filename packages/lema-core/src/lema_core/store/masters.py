"""The weights that train, in fp32: in their working file, and in the slots that they were read into."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lema_core.checkpoint.reading import tensor_bytes
from lema_core.device import map_ram
from lema_core.store.fixed import Values, set_granule
from lema_core.store.granules import Part
from lema_core.store.model import Region, StreamedModel, TrainedGranule, numbers_of
from lema_core.store.unnamed import UnnamedFile
from lema_core.store.window import Window


class Masters:
    """``windows``: of the announced region, the one in RAM first; it is there that weights change. Behind it the
    device's own, which has copies. ``expert_windows``: of experts, whose weights change in the file alone."""

    def __init__(
        self, model: StreamedModel, file: UnnamedFile, windows: Sequence[Window], expert_windows: Sequence[Window] = ()
    ) -> None:
        self.model = model
        self.file = file
        self.window, *self._copies = windows
        self._expert_windows = expert_windows
        self._scratch = map_ram(max(each.granule.nbytes for each in model.trained))
        self._memory = tensor_bytes(self._scratch)
        #: the granule that the scratch memory holds, as it is in the file
        self._read_last: int | None = None
        self.bytes_read = self.bytes_written = 0

    @property
    def ram_bytes(self) -> int:
        return len(self._scratch)

    def slot_of(self, each: TrainedGranule) -> int | None:
        """Where a granule may be read, None where it is in its file alone."""
        return self.window.slot_of(each.granule.index) if each.region is Region.STREAM else None

    def in_slot(self, each: TrainedGranule, slot: int) -> Tensor:
        """Its fp32 numbers, padding included."""
        return self.window.slot(slot)[: each.granule.nbytes].view(torch.float32)

    def from_file(self, each: TrainedGranule) -> Tensor:
        """Its fp32 numbers, padding included, in memory that the next one takes. Raises TransferError."""
        if self._read_last != each.number:
            self._read_last = None
            try:
                self.file.read(each.file_offset, self._memory[: each.granule.nbytes])
            except OSError as error:
                raise self.file.refused("read", error, each.granule.nbytes) from error
            self.bytes_read += each.granule.nbytes
            self._read_last = each.number
        return self._scratch[: each.granule.nbytes].view(torch.float32)

    def part(self, part: Part, number: int) -> Tensor:
        """The fp32 numbers of a part of granule ``number``, flat; valid until the next call."""
        each = self.model.trained[number]
        slot = self.slot_of(each)
        return numbers_of(part, self.from_file(each) if slot is None else self.in_slot(each, slot))

    def save(self, each: TrainedGranule, slot: int | None) -> None:
        """Write it to the file, from its slot or from where :meth:`from_file` gave it. Raises TransferError."""
        if slot is not None and self._read_last == each.number:
            self._read_last = None
        memory = self._memory if slot is None else self.window.memory(slot)
        try:
            self.file.write(each.file_offset, memory[: each.granule.nbytes])
        except OSError as error:
            raise self.file.refused("written", error, each.granule.nbytes) from error
        self.bytes_written += each.granule.nbytes

    def drop(self, each: TrainedGranule) -> None:
        """What the windows hold of it may not be read any more."""
        if each.region is Region.STREAM:
            self.window.drop(each.granule.index)
            self.recall(each)
        elif each.region is Region.EXPERTS:
            for window in self._expert_windows:
                window.drop(each.granule.index)

    def recall(self, each: TrainedGranule) -> None:
        """What the device's own window holds of it may not be read any more: it is copied anew."""
        if each.region is Region.STREAM:
            for window in self._copies:
                window.drop(each.granule.index)

    def set(self, values: Values) -> None:
        """Give every weight a value, in the file."""
        for each in self.model.trained:
            self._read_last = None
            set_granule(each, self._scratch, values)
            self.save(each, None)
            self.drop(each)

    def rows(self, part: Part, ids: Tensor) -> Tensor:
        """Rows of a table, counted from the part's first one, from the slot that it is in."""
        slot = self.window.slot_of(part.granule)
        return self.window.block(slot, part.offset, part.dtype, part.shape)[ids]

    def close(self) -> None:
        self._memory.release()
        self.file.close()
