"""How a model is cut: every byte once, aligned, the same whatever the file looks like."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lema_core.checkpoint import Segment, TensorInfo
from lema_core.store.granules import SECTOR_BYTES, GranuleLayout, StreamedTensor, lay_out

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def in_file(
    shapes: Sequence[tuple[int | None, tuple[int, ...], torch.dtype]], gaps: Sequence[int] = (0,), n_files: int = 1
) -> list[StreamedTensor]:
    """Tensors one behind the other, with gaps, dealt out over files."""
    ends = [8] * n_files
    tensors = []
    for i, (layer, shape, dtype) in enumerate(shapes):
        file = i % n_files
        offset = ends[file] + gaps[i % len(gaps)]
        nbytes = prod(shape) * dtype.itemsize
        ends[file] = offset + nbytes
        info = TensorInfo(f"t{i}", dtype, shape, Segment(Path(f"/nowhere/{file}"), offset, nbytes))
        tensors.append(StreamedTensor(f"t{i}", info, layer))
    return tensors


def check(tensors: Sequence[StreamedTensor], layout: GranuleLayout) -> None:
    """Every byte of every tensor is found exactly once, where the granule's reads put it."""
    ends = {}
    for item in tensors:
        segment = item.info.segment
        ends[segment.path] = max(ends.get(segment.path, 0), segment.offset + segment.nbytes)
    for item in tensors:
        info, row = item.info, 0
        row_bytes = info.segment.nbytes // (info.shape[0] if info.shape else 1)
        for part in layout.parts[item.name]:
            granule = layout.granules[part.granule]
            assert part.start == row and part.stop > row and part.dtype == info.dtype
            assert part.shape == ((part.stop - row, *info.shape[1:]) if info.shape else ())
            assert item.name in granule.names
            row = part.stop
            first = info.segment.offset + part.start * row_bytes
            nbytes = (part.stop - part.start) * row_bytes
            (read,) = [r for r in granule.reads if r.slot_offset <= part.offset < r.slot_offset + r.nbytes]
            assert read.path == info.segment.path
            assert read.file_offset + part.offset - read.slot_offset == first
            assert part.offset + nbytes <= read.slot_offset + read.needed_bytes
        assert row == (info.shape[0] if info.shape else 1)
    for index, granule in enumerate(layout.granules):
        assert granule.index == index
        filled = 0
        for read in granule.reads:
            assert read.slot_offset == filled
            assert read.file_offset % SECTOR_BYTES == read.nbytes % SECTOR_BYTES == read.slot_offset % SECTOR_BYTES == 0
            assert 0 < read.needed_bytes <= read.nbytes < read.needed_bytes + SECTOR_BYTES
            assert read.file_offset + read.needed_bytes <= ends[read.path], "no data is expected past the file's end"
            filled += read.nbytes
        assert granule.nbytes == filled <= layout.slot_bytes
    assert layout.slot_bytes == max(granule.nbytes for granule in layout.granules)
    assert layout.slot_bytes % SECTOR_BYTES == 0
    placed = sorted((p.granule, p.offset, p.stop - p.start) for parts in layout.parts.values() for p in parts)
    assert len(placed) == len({place[:2] for place in placed}), "no two parts share a place"


shape = st.one_of(
    st.tuples(st.integers(1, 300)),
    st.tuples(st.integers(1, 200), st.integers(1, 60)),
    st.just(()),
)
model = st.lists(
    st.tuples(st.sampled_from([None, 0, 1, 2]), shape, st.sampled_from(DTYPES)), min_size=1, max_size=14
).map(lambda found: sorted(found, key=lambda t: (t[0] is None, t[0] or 0)))


@settings(max_examples=120, deadline=None)
@given(model, st.lists(st.integers(0, 20000), min_size=1, max_size=4), st.integers(1, 3), st.integers(2000, 60000))
def test_every_byte_is_covered_once_and_the_cut_ignores_the_file(
    shapes: list, gaps: list[int], n_files: int, max_bytes: int
) -> None:
    tensors = in_file(shapes, gaps, n_files)
    layout = lay_out(tensors, max_bytes)
    check(tensors, layout)
    plain = lay_out(in_file(shapes), max_bytes)
    for name, parts in layout.parts.items():
        assert [(p.granule, p.start, p.stop) for p in parts] == [
            (p.granule, p.start, p.stop) for p in plain.parts[name]
        ]
    # What is wanted stays under the limit, one row aside; sectors come on top at each piece's two ends, small gaps too.
    widest = max(prod(s[1:]) * dtype.itemsize for _, s, dtype in shapes)
    for granule in layout.granules:
        pieces = [p for parts in layout.parts.values() for p in parts if p.granule == granule.index]
        wanted = sum(prod(p.shape) * p.dtype.itemsize for p in pieces)
        assert wanted <= max(max_bytes, widest)
        assert granule.nbytes <= wanted + len(pieces) * 4 * SECTOR_BYTES
        assert len({t.layer for t in tensors if t.name in granule.names}) == 1


def test_a_row_wider_than_the_limit_is_a_granule_of_its_own() -> None:
    tensors = in_file([(0, (3, 5000), torch.float32), (0, (10,), torch.float32)])
    layout = lay_out(tensors, 8192)
    check(tensors, layout)
    assert [(p.start, p.stop) for p in layout.parts["t0"]] == [(0, 1), (1, 2), (2, 3)]


def llama_shapes(hidden: int, ffn: int, kv: int, layers: int, vocab: int, dtype: torch.dtype) -> list:
    """A Llama without its embedding, in the order of its file."""
    block = [(hidden,), (hidden, hidden), (kv, hidden), (kv, hidden), (hidden, hidden), (hidden,)]
    block += [(ffn, hidden), (ffn, hidden), (hidden, ffn)]
    found = [(layer, shape, dtype) for layer in range(layers) for shape in block]
    return [*found, (None, (hidden,), dtype), (None, (vocab, hidden), dtype)]


@pytest.mark.parametrize(
    ("name", "sizes", "dtype"),
    [
        ("1.1B", (2048, 5632, 256, 22, 32000), torch.bfloat16),
        ("8B", (4096, 14336, 1024, 32, 128256), torch.bfloat16),
        ("135M", (576, 1536, 192, 30, 49152), torch.bfloat16),
        ("1.1B", (2048, 5632, 256, 22, 32000), torch.float32),
    ],
)
def test_equal_slots_waste_little_on_real_shapes(name: str, sizes: tuple[int, ...], dtype: torch.dtype) -> None:
    tensors = in_file(llama_shapes(*sizes, dtype))
    layout = lay_out(tensors)
    check(tensors, layout)
    data = sum(item.info.segment.nbytes for item in tensors)
    assert layout.total_bytes < 1.10 * data, f"{name}: slots of {layout.slot_bytes} waste too much"
    assert layout.slot_bytes <= 32_000_000 + 16 * SECTOR_BYTES
    read = sum(granule.nbytes for granule in layout.granules)
    assert read < 1.01 * data, "sectors read beside the data"


def test_the_cut_of_a_layer_is_that_of_its_twin() -> None:
    tensors = in_file(llama_shapes(2048, 5632, 256, 3, 32000, torch.bfloat16))
    layout = lay_out(tensors)
    cuts = [
        [[(p.start, p.stop) for p in layout.parts[t.name]] for t in tensors if t.layer == layer] for layer in range(3)
    ]
    assert cuts[0] == cuts[1] == cuts[2]
