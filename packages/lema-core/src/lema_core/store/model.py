"""A model as the store sees it: granules, rows of embeddings, and how many slots a budget gives."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import cached_property
from math import prod
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lema_core.checkpoint.segments import Segment
from lema_core.errors import BudgetError, CheckpointError
from lema_core.quantization.formats import WireFormat
from lema_core.store.granules import (
    MAX_GRANULE_BYTES,
    MAX_QUANTIZED_GRANULE_BYTES,
    MAX_TRAINED_GRANULE_BYTES,
    Granule,
    GranuleLayout,
    Part,
    StreamedTensor,
    WorkingSpace,
    lay_out,
)
from lema_core.store.rows import bounce_bytes

if TYPE_CHECKING:
    from lema_core.adapter import ModelAdapter
    from lema_core.checkpoint.segments import TensorInfo

#: the fewest rows of an embedding that its region holds
_MIN_ROWS = 16
_ROWS_BYTES = 4_000_000


@dataclass(frozen=True)
class WindowSizes:
    """Slots per tier and the rows region, decided before the first byte moves; experts have slots of their own.
    ``*device_slots`` are 0 where RAM is the device's."""

    ram_slots: int
    device_slots: int
    n_rows: int
    expert_ram_slots: int = 0
    expert_device_slots: int = 0


class Region(Enum):
    """Where a granule is borrowed from: announced by a trace, picked by a router, or by rows alone."""

    STREAM = "stream"
    EXPERTS = "experts"
    TABLES = "tables"


@dataclass(frozen=True)
class TrainedGranule:
    """A granule of weights that train, fp32, in the working file; ``number``: among all of them, in their order."""

    number: int
    region: Region
    granule: Granule
    parts: tuple[Part, ...]

    @property
    def file_offset(self) -> int:
        return self.granule.reads[0].file_offset


def numbers_of(part: Part, numbers: Tensor) -> Tensor:
    """What a part has of its granule's fp32 numbers."""
    start = part.offset // numbers.itemsize
    return numbers[start : start + prod(part.shape)]


@dataclass(frozen=True)
class StreamedModel:
    """A model's tensors bound to their files, cut into granules. ``embeddings``: read by rows. ``transposed_modules``:
    linears whose weight lies as [in, out]. ``experts``: granules that are fetched when a router has picked them.

    ``originals``: where tensors that train lie in the checkpoint; they stream from the working file ``space``.
    ``tables``: trained embeddings that no head shares. ``shared``: trained embeddings by name of the tied head that
    they are one tensor with.
    """

    layout: GranuleLayout
    embeddings: Mapping[str, TensorInfo]
    transposed_modules: frozenset[str] = frozenset()
    experts: GranuleLayout | None = None
    originals: Mapping[str, TensorInfo] = field(default_factory=dict)
    space: WorkingSpace | None = None
    tables: GranuleLayout | None = None
    shared: Mapping[str, str] = field(default_factory=dict)

    def parts(self, name: str) -> tuple[Part, ...]:
        """The row blocks of a tensor, in order."""
        name = self.shared.get(name, name)
        return next(layout.parts[name] for layout in self._layouts.values() if name in layout.parts)

    @cached_property
    def _layouts(self) -> dict[Region, GranuleLayout]:
        found = {Region.STREAM: self.layout, Region.EXPERTS: self.experts, Region.TABLES: self.tables}
        return {region: layout for region, layout in found.items() if layout is not None}

    @cached_property
    def trained(self) -> tuple[TrainedGranule, ...]:
        """All granules that train, in the order of the working file."""
        found: list[TrainedGranule] = []
        for region, layout in self._layouts.items():
            of_granule: dict[int, list[Part]] = {}
            for name, parts in layout.parts.items():
                if name in self.originals:
                    for part in parts:
                        of_granule.setdefault(part.granule, []).append(part)
            for index, parts in sorted(of_granule.items()):
                ordered = tuple(sorted(parts, key=lambda part: part.offset))
                found.append(TrainedGranule(len(found), region, layout.granules[index], ordered))
        return tuple(found)

    @property
    def changing(self) -> frozenset[int]:
        """The announced granules that train."""
        return frozenset(each.granule.index for each in self.trained if each.region is Region.STREAM)

    @property
    def trained_slots_bytes(self) -> int:
        """Slots for them."""
        return len(self.changing) * self.layout.slot_bytes

    @cached_property
    def _by_head(self) -> Mapping[str, str]:
        return {head: name for name, head in self.shared.items()}

    def canonical(self, name: str) -> str:
        """Of a trained tensor: a tied head goes by its embedding's name."""
        return self._by_head.get(name, name)

    @property
    def originals_by_rows(self) -> tuple[str, ...]:
        """Embeddings that train."""
        return tuple(name for name in self.embeddings if self.shared.get(name, name) in self.originals)

    @property
    def trained_numbers(self) -> int:
        return sum(prod(info.shape) for info in self.originals.values())

    @property
    def largest_block(self) -> tuple[int, int]:
        """The most rows and the most columns that one part of a matrix has."""
        layouts = [self.layout] if self.experts is None else [self.layout, self.experts]
        rows, columns = zip(*(layout.largest_block for layout in layouts), strict=True)
        return max(rows), max(columns)

    @property
    def matrix_dtype(self) -> torch.dtype:
        """What the products' weights are stored as; norms and biases may differ. Of quantized ones what the model has
        beside them: what they were before."""
        all_parts = list(self.layout.parts.values())
        matrix = next(parts[0] for parts in all_parts if len(parts[0].shape) == 2)
        if matrix.format is None:
            return matrix.dtype
        return next((parts[0].dtype for parts in all_parts if parts[0].format is None), matrix.dtype)

    @property
    def matrix_format(self) -> WireFormat | None:
        """The format that most numbers of the products' weights are in; None: a dtype, :attr:`matrix_dtype`."""
        numbers: Counter[str] = Counter()
        formats: dict[str, WireFormat | None] = {}
        for layout in (self.layout, self.experts):
            for parts in () if layout is None else layout.parts.values():
                if len(parts[0].shape) == 2:
                    numbers[parts[0].storage] += sum(prod(part.shape) for part in parts)
                    formats[parts[0].storage] = parts[0].format
        return formats[numbers.most_common(1)[0][0]]

    @property
    def biased_modules(self) -> frozenset[str]:
        """Modules whose linear adds a bias."""
        return frozenset(name.removesuffix(".bias") for name in self.layout.parts if name.endswith(".bias"))

    @property
    def row_bytes(self) -> int:
        return sum(info.nbytes // info.shape[0] for info in self.embeddings.values())

    def default_rows(self) -> int:
        """Rows of the region when nothing presses; follows from the model alone."""
        most = max((info.shape[0] for info in self.embeddings.values()), default=0)
        return min(most, max(_MIN_ROWS, _ROWS_BYTES // max(1, self.row_bytes)))

    @property
    def bounce_bytes(self) -> int:
        """What rows are read into on their way to the region."""
        return max(map(bounce_bytes, self.embeddings.values()), default=0)

    @property
    def smallest_bytes(self) -> int:
        """The least a window can be: one granule, one of an expert, and a few rows."""
        beside = min(_MIN_ROWS, self.default_rows()) * self.row_bytes + self.bounce_bytes
        return self._slots_bytes(1, 1) + beside

    @property
    def smallest_device_bytes(self) -> int:
        """The least of a device's own memory: one granule, and one of an expert."""
        return self._slots_bytes(1, 1)

    @property
    def total_bytes(self) -> int:
        """A window that holds everything."""
        return self._slots_bytes(*self._slots(None)) + self.default_rows() * self.row_bytes + self.bounce_bytes

    @property
    def total_device_bytes(self) -> int:
        """The same of a device's own memory, which has no rows."""
        return self._slots_bytes(*self._slots(None))

    def ram_bytes(self, sizes: WindowSizes) -> int:
        """What the windows, the rows and their bounce memory take of RAM."""
        beside = sizes.n_rows * self.row_bytes + self.bounce_bytes
        return self._slots_bytes(sizes.ram_slots, sizes.expert_ram_slots) + beside

    def device_bytes(self, sizes: WindowSizes) -> int:
        """What the windows take of a device's own memory."""
        return self._slots_bytes(sizes.device_slots, sizes.expert_device_slots)

    def _slots_bytes(self, slots: int, expert_slots: int) -> int:
        return slots * self.layout.slot_bytes + (0 if self.experts is None else expert_slots * self.experts.slot_bytes)

    def sizes(self, ram_bytes: int | None, device_bytes: int | None, device_shares_ram: bool) -> WindowSizes:
        """Slots for budgets in bytes (None: everything). Raises BudgetError when not even one granule fits."""
        rows = self.default_rows()
        if ram_bytes is not None:
            if ram_bytes < self.smallest_bytes:
                raise BudgetError(
                    f"weights_ram gives {ram_bytes:,} bytes; the smallest window needs {self.smallest_bytes:,} "
                    f"(one granule of {self.layout.slot_bytes:,} and a few embedding rows); raise weights_ram"
                )
            ram_bytes -= self.bounce_bytes
            beside = max(ram_bytes // 8, ram_bytes - self._slots_bytes(*self._slots(None)))
            fitting = min(beside, ram_bytes - self._slots_bytes(1, 1)) // max(1, self.row_bytes)
            rows = max(min(_MIN_ROWS, rows), min(rows, fitting))
            ram_bytes -= rows * self.row_bytes
        ram_slots, expert_ram_slots = self._slots(ram_bytes)
        if device_shares_ram:
            return WindowSizes(ram_slots, 0, rows, expert_ram_slots)
        if device_bytes is not None and device_bytes < self._slots_bytes(1, 1):
            raise BudgetError(
                f"weights_vram gives {device_bytes:,} bytes; the smallest window needs {self._slots_bytes(1, 1):,} "
                "(one granule); raise weights_vram"
            )
        device_slots, expert_device_slots = self._slots(device_bytes)
        return WindowSizes(ram_slots, device_slots, rows, expert_ram_slots, expert_device_slots)

    def _slots(self, nbytes: int | None) -> tuple[int, int]:
        """Of what every token needs, and of experts: these have an eighth at least, and what the others leave."""
        layout, experts = self.layout, self.experts
        n, n_experts = len(layout.granules), 0 if experts is None else len(experts.granules)
        if nbytes is None:
            return n, n_experts
        if experts is None:
            return min(n, nbytes // layout.slot_bytes), 0
        kept = max(experts.slot_bytes, nbytes // 8 // experts.slot_bytes * experts.slot_bytes)
        slots = max(1, min(n, (nbytes - kept) // layout.slot_bytes))
        return slots, min(n_experts, (nbytes - slots * layout.slot_bytes) // experts.slot_bytes)


def cut_model(
    adapter: ModelAdapter,
    tensors: Mapping[str, TensorInfo],
    max_granule_bytes: int = MAX_GRANULE_BYTES,
    trained: Collection[str] = (),
    space: WorkingSpace | None = None,
) -> StreamedModel:
    """Cut the bound ``tensors`` of ``adapter``. An embedding is read by rows, and as granules too where a tied head
    uses it. Experts are cut apart from all else.

    ``trained``: names of the tensors that train, of a tied pair either; they are fp32 and lie in ``space``. Raises
    CheckpointError for one that is quantized: its numbers are not there to be trained.
    """
    for name in sorted(trained):
        if tensors[name].quantized is not None:
            info = tensors[name]
            raise CheckpointError(
                f"{info.segment.path}: tensor {info.name!r} is to train and is {info.storage} in the file: use the "
                "unquantized model, with weights_bits for the rest, or one that was quantized without what trains, or "
                "LoRA weights (training_mode=lora)"
            )
    specs = adapter.tensors()
    tables = {spec.name: tensors[spec.name] for spec in specs if spec.role == "embedding"}
    heads = {spec.tied_to: spec.name for spec in specs if spec.tied_to and tensors[spec.tied_to] == tensors[spec.name]}
    wanted = {heads.get(name, name) for name in trained}
    if wanted:
        max_granule_bytes = min(max_granule_bytes, MAX_TRAINED_GRANULE_BYTES)
    if any(tensors[spec.name].quantized is not None for spec in specs):
        max_granule_bytes = min(max_granule_bytes, MAX_QUANTIZED_GRANULE_BYTES)
    streamed: list[StreamedTensor] = []
    experts: list[StreamedTensor] = []
    alone: list[StreamedTensor] = []
    for spec in specs:
        trains = spec.name in wanted
        info = replace(tensors[spec.name], dtype=torch.float32) if trains else tensors[spec.name]
        table = trains and (spec.role == "embedding" or spec.name in heads.values())
        item = StreamedTensor(spec.name, info, spec.layer, spec.expert, trains, table)
        if spec.role == "embedding":
            alone += [item] if trains else []
        else:
            (experts if spec.expert is not None else streamed).append(item)
    transposed = frozenset(spec.module for spec in specs if spec.transposed)
    layout = lay_out(streamed, max_granule_bytes, space)
    demanded = lay_out(experts, max_granule_bytes, space) if experts else None
    beside = lay_out(alone, max_granule_bytes, space) if alone else None
    for name, head in heads.items():
        if head in wanted:
            tables[name] = _in_working_file(name, tables[name], layout, head)
    for item in alone:
        tables[item.name] = _in_working_file(item.name, tables[item.name], beside, item.name)
    originals = {name: tensors[name] for name in (spec.name for spec in specs) if name in wanted}
    shared = {name: head for name, head in heads.items() if head in wanted}
    return StreamedModel(layout, tables, transposed, demanded, originals, space, beside, shared)


def _in_working_file(name: str, info: TensorInfo, layout: GranuleLayout, stored_as: str) -> TensorInfo:
    """A table whose parts lie one behind the other."""
    first = layout.parts[stored_as][0]
    read = layout.granules[first.granule].reads[0]
    segment = Segment(read.path, read.file_offset + first.offset, prod(info.shape) * torch.float32.itemsize)
    return replace(info, name=name, dtype=torch.float32, segment=segment)
