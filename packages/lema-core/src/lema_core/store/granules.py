"""Cut a model's weights into granules: what moves between tiers.

A granule is a block of rows of one large matrix, or several whole tensors of one layer. All slots of a tier have the
size of the largest granule, so the cut is chosen to waste little. It follows from shapes and dtypes alone, never from a
budget: row blocks are also the blocks that products are computed in, and results must not depend on how much memory
there was.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import gcd, prod
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lema_core.quantization.block import QuantizedBlock, WeightBlock
from lema_core.quantization.formats import WireFormat

if TYPE_CHECKING:
    from lema_core.checkpoint.segments import TensorInfo

#: direct I/O wants file offsets, lengths and addresses in multiples of this
SECTOR_BYTES = 4096
MAX_GRANULE_BYTES = 32_000_000
#: where weights train: beside such a granule lie a gradient and two moments of its size
MAX_TRAINED_GRANULE_BYTES = 8_000_000
#: where weights are quantized: a layer has few bytes, and while it is computed with, parts of the next one should come
MAX_QUANTIZED_GRANULE_BYTES = 8_000_000
#: a tensor of a working file starts at a multiple of this
_TENSOR_ALIGNMENT_BYTES = 64
#: what handling one more granule costs, as bytes that could have been read meanwhile
_HANDLING_BYTES = 256_000
#: pieces of a file nearer than this are read as one: apart, each would be padded to whole sectors
_MERGE_GAP_BYTES = 2 * SECTOR_BYTES
_MAX_ROWS_ALIGN = 16


def whole_sectors(nbytes: int) -> int:
    """``nbytes`` rounded up to sectors, to one at least."""
    return -(-max(1, nbytes) // SECTOR_BYTES) * SECTOR_BYTES


@dataclass(frozen=True)
class Read:
    """One contiguous file range that lands at ``slot_offset``; offsets and ``nbytes`` are multiples of SECTOR_BYTES.

    Only the first ``needed_bytes`` carry data: the last sector may lie past the file's end.
    """

    path: Path
    file_offset: int
    nbytes: int
    needed_bytes: int
    slot_offset: int


@dataclass(frozen=True)
class Piece:
    """A tensor of a quantized weight's at byte ``offset`` of a slot: some rows of its payload, or of its scales."""

    offset: int
    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class Part:
    """Rows ``start:stop`` of a tensor, found at byte ``offset`` of a granule's slot (the whole of a vector: rows are
    elements). ``on_demand``: no trace announces it; see WeightSource.routed.

    Of a quantized tensor, whose ``format`` this is, ``pieces`` say where its payload and scales are, and ``dtype`` is
    what they are decoded to.
    """

    tensor: str
    granule: int
    start: int
    stop: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    offset: int
    on_demand: bool = False
    format: WireFormat | None = None
    pieces: tuple[Piece, ...] = ()

    @property
    def stored(self) -> tuple[Piece, ...]:
        """What lies in the slot."""
        return self.pieces or (Piece(self.offset, self.shape, self.dtype),)

    @property
    def storage(self) -> str:
        """What it is stored as, in a word."""
        return str(self.dtype).removeprefix("torch.") if self.format is None else self.format.name

    def block(self, view: Callable[[int, torch.dtype, tuple[int, ...]], Tensor]) -> WeightBlock:
        """What compute is given; ``view``: of what lies at an offset, by dtype and shape."""
        if self.format is None:
            return view(self.offset, self.dtype, self.shape)
        parts = tuple(view(piece.offset, piece.dtype, piece.shape) for piece in self.pieces)
        return QuantizedBlock(self.format, self.shape, parts)


@dataclass(frozen=True)
class Granule:
    """``nbytes``: the bytes that are read and moved; ``layer`` and ``names`` say what it is, for errors and plots;
    ``quantized``: those of its parts that are."""

    index: int
    nbytes: int
    layer: int | None
    names: tuple[str, ...]
    reads: tuple[Read, ...]
    quantized: tuple[Part, ...] = ()


@dataclass(frozen=True)
class StreamedTensor:
    """A tensor to be cut: where it lies in the file and which layer uses it. ``layer`` None groups what lies outside
    blocks; an ``expert``'s tensors share no granule with another's.

    ``trained``: it is written to as well, so that it shares no granule with what is not; of its ``info`` the segment
    does not count, since it lies where a :class:`WorkingSpace` has room. ``table``: its rows are read one by one too,
    so that they follow each other without gaps.
    """

    name: str
    info: TensorInfo
    layer: int | None
    expert: int | None = None
    trained: bool = False
    table: bool = False


class WorkingSpace:
    """Room for trained granules in the file ``path``, handed out from its start in whole sectors."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.nbytes = 0

    def reserve(self, nbytes: int) -> int:
        offset = self.nbytes
        self.nbytes += whole_sectors(nbytes)
        return offset


@dataclass(frozen=True)
class GranuleLayout:
    granules: tuple[Granule, ...]
    parts: Mapping[str, tuple[Part, ...]]
    slot_bytes: int

    @property
    def total_bytes(self) -> int:
        """Bytes of all slots when every granule has one."""
        return self.slot_bytes * len(self.granules)

    @property
    def largest_block(self) -> tuple[int, int]:
        """The most rows and the most columns that one part of a matrix has."""
        shapes = [part.shape for parts in self.parts.values() for part in parts if len(part.shape) == 2]
        return max(rows for rows, _ in shapes), max(columns for _, columns in shapes)

    @property
    def largest_layer(self) -> int:
        """Granules of the layer that has most."""
        return max(Counter(granule.layer for granule in self.granules if granule.layer is not None).values(), default=0)


def _tensor_bytes(item: StreamedTensor) -> int:
    return item.info.nbytes


def _row_blocks(item: StreamedTensor, target_bytes: int) -> list[tuple[int, int]]:
    rows = item.info.shape[0]
    row_bytes = _tensor_bytes(item) // rows
    at_most = max(1, target_bytes // row_bytes)
    align = _MAX_ROWS_ALIGN if at_most >= _MAX_ROWS_ALIGN else 1
    if item.table:
        align = SECTOR_BYTES // gcd(SECTOR_BYTES, row_bytes)
        at_most = max(at_most, align)
    at_most -= at_most % align
    count = -(-rows // at_most)
    step = -(-rows // count)
    step = min(at_most, -(-step // align) * align)
    return [(start, min(rows, start + step)) for start in range(0, rows, step)]


def _cut(group: Sequence[StreamedTensor], target_bytes: int) -> list[list[tuple[StreamedTensor, int, int]]]:
    """First fit, in the order of use: the pieces of each granule of one layer."""
    bins: list[list[tuple[StreamedTensor, int, int]]] = []
    room: list[int] = []
    for item in group:
        rows = item.info.shape[0] if item.info.shape else 1
        blocks = [(0, rows)] if _tensor_bytes(item) <= target_bytes else _row_blocks(item, target_bytes)
        for start, stop in blocks:
            nbytes = _tensor_bytes(item) * (stop - start) // max(1, rows)
            for i, free in enumerate(room):
                if nbytes <= free:
                    bins[i].append((item, start, stop))
                    room[i] -= nbytes
                    break
            else:
                bins.append([(item, start, stop)])
                room.append(max(0, target_bytes - nbytes))
    return bins


def _cost(groups: Iterable[Sequence[StreamedTensor]], target_bytes: int) -> int:
    count, largest = 0, 0
    sizes: dict[tuple[tuple[tuple[int, ...], str], ...], tuple[int, int]] = {}
    for group in groups:
        key = tuple((item.info.shape, item.info.storage) for item in group)
        if key not in sizes:
            bins = _cut(group, target_bytes)
            sizes[key] = (
                len(bins),
                max(
                    sum(
                        _tensor_bytes(i) * (b - a) // max(1, i.info.shape[0] if i.info.shape else 1)
                        for i, a, b in pieces
                    )
                    for pieces in bins
                ),
            )
        count += sizes[key][0]
        largest = max(largest, sizes[key][1])
    return count * (largest + _HANDLING_BYTES)


def _target_bytes(groups: Sequence[Sequence[StreamedTensor]], max_granule_bytes: int) -> int:
    """The cut that costs least among a geometric ladder of sizes; the larger one where two cost the same."""
    largest_group = max(sum(map(_tensor_bytes, group)) for group in groups)
    target = float(min(max_granule_bytes, largest_group))
    best, best_cost = int(target), _cost(groups, int(target))
    while target > max_granule_bytes / 64:
        target /= 1.08
        cost = _cost(groups, int(target))
        if cost < best_cost:
            best, best_cost = int(target), cost
    return best


def _place(index: int, pieces: Sequence[tuple[StreamedTensor, int, int]]) -> tuple[Granule, list[Part]]:
    """Lay the pieces of a granule out in its slot, reading neighbours in the file as one range."""
    ranges = []
    for item, start, stop in pieces:
        for stored in item.info.stored:
            row_bytes = stored.nbytes // max(1, stored.shape[0] if stored.shape else 1)
            first = stored.segment.offset + start * row_bytes
            ranges.append(
                (stored.segment.path, first, first + (stop - start) * row_bytes, item.name, start, stored.name)
            )
    ranges.sort(key=lambda r: (str(r[0]), r[1]))
    spans: list[list] = []
    for path, first, last, *_ in ranges:
        low, high = first - first % SECTOR_BYTES, whole_sectors(last)
        if spans and spans[-1][0] == path and low - spans[-1][2] <= _MERGE_GAP_BYTES:
            spans[-1][2] = max(spans[-1][2], high)
            spans[-1][3] = max(spans[-1][3], last)
        else:
            spans.append([path, low, high, last])
    reads, slot_offset = [], 0
    for path, low, high, last in spans:
        reads.append(Read(path, low, high - low, last - low, slot_offset))
        slot_offset += high - low
    offsets = {}
    for path, first, last, *which in ranges:
        read = next(r for r in reads if r.path == path and r.file_offset <= first and last <= r.file_offset + r.nbytes)
        offsets[tuple(which)] = read.slot_offset + first - read.file_offset
    parts = [_part(index, item, start, stop, offsets) for item, start, stop in pieces]
    names = tuple(dict.fromkeys(item.name for item, _, _ in pieces))
    quantized = tuple(part for part in parts if part.format is not None)
    return Granule(index, slot_offset, pieces[0][0].layer, names, tuple(reads), quantized), parts


def _part(index: int, item: StreamedTensor, start: int, stop: int, offsets: Mapping[tuple[str, int, str], int]) -> Part:
    """``offsets``: in the slot, of what its files have, by the names of both and the first row."""
    found = tuple(
        Piece(offsets[item.name, start, stored.name], _rows_shape(stored, start, stop), stored.dtype)
        for stored in item.info.stored
    )
    shape, quantized = _rows_shape(item.info, start, stop), item.info.quantized
    form, pieces = (None, ()) if quantized is None else (quantized.format, found)
    on_demand = item.expert is not None
    return Part(item.name, index, start, stop, shape, item.info.dtype, found[0].offset, on_demand, form, pieces)


def _rows_shape(info: TensorInfo, start: int, stop: int) -> tuple[int, ...]:
    return (stop - start, *info.shape[1:]) if info.shape else ()


def _place_trained(
    index: int, pieces: Sequence[tuple[StreamedTensor, int, int]], space: WorkingSpace
) -> tuple[Granule, list[Part]]:
    """Lay the pieces of a granule out one after the other, in its slot as in the working file."""
    parts, end = [], 0
    for item, start, stop in pieces:
        shape = _rows_shape(item.info, start, stop)
        offset = -(-end // _TENSOR_ALIGNMENT_BYTES) * _TENSOR_ALIGNMENT_BYTES
        on_demand = item.expert is not None
        parts.append(Part(item.name, index, start, stop, shape, item.info.dtype, offset, on_demand))
        end = offset + prod(shape) * item.info.dtype.itemsize
    nbytes = whole_sectors(end)
    read = Read(space.path, space.reserve(nbytes), nbytes, nbytes, 0)
    names = tuple(dict.fromkeys(item.name for item, _, _ in pieces))
    return Granule(index, nbytes, pieces[0][0].layer, names, (read,)), parts


def lay_out(
    tensors: Sequence[StreamedTensor], max_granule_bytes: int = MAX_GRANULE_BYTES, space: WorkingSpace | None = None
) -> GranuleLayout:
    """Cut ``tensors`` (in the order of the forward pass) into granules of at most about ``max_granule_bytes``; those
    that train are given a place in ``space``.

    A single row larger than that is a granule of its own.
    """
    groups: dict[Hashable, list[StreamedTensor]] = {}
    for item in tensors:
        groups.setdefault((item.layer, item.expert, item.trained, item.name if item.table else None), []).append(item)
    target = _target_bytes(list(groups.values()), max_granule_bytes)
    granules: list[Granule] = []
    parts: dict[str, list[Part]] = {item.name: [] for item in tensors}
    for group in groups.values():
        for pieces in _cut(group, target):
            if pieces[0][0].trained:
                granule, placed = _place_trained(len(granules), pieces, space)
            else:
                granule, placed = _place(len(granules), pieces)
            granules.append(granule)
            for part in placed:
                parts[part.tensor].append(part)
    slot_bytes = max(granule.nbytes for granule in granules)
    ordered = {name: tuple(sorted(found, key=lambda p: p.start)) for name, found in parts.items()}
    return GranuleLayout(tuple(granules), ordered, slot_bytes)
