"""Rows of an embedding: the file's bytes, whatever the region's size; the most recent stay."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lema_core.checkpoint import TensorInfo, read_manifest, write_safetensors
from lema_core.device import map_ram
from lema_core.errors import CheckpointError, DataError
from lema_core.store.disk import DiskReader
from lema_core.store.rows import RowCache, bounce_bytes

ROWS = 500


@pytest.fixture
def reader() -> Iterator[DiskReader]:
    reader = DiskReader()
    yield reader
    reader.close()


def table(folder: Path, width: int, dtype: torch.dtype, padding: int) -> tuple[torch.Tensor, TensorInfo]:
    tensor = torch.randn(ROWS, width, generator=torch.Generator().manual_seed(width)).to(dtype)
    pad = torch.zeros(padding, dtype=torch.uint8)
    path = folder / "e.safetensors"
    write_safetensors(
        path,
        [("pad", torch.uint8, (padding,), lambda: pad), ("e", dtype, (ROWS, width), lambda: tensor)],
        fsync=False,
    )
    return tensor, read_manifest(folder).tensors["e"]


def cache_of(info: TensorInfo, reader: DiskReader, n_rows: int) -> RowCache:
    return RowCache(info, reader, n_rows, map_ram(bounce_bytes(info)))


@pytest.mark.parametrize(("dtype", "padding"), [(torch.float32, 0), (torch.bfloat16, 3), (torch.float16, 4090)])
@pytest.mark.parametrize("n_rows", [1, 16, 100, 5000])
@pytest.mark.parametrize("width", [3, 1500])
def test_rows_are_the_files(
    tmp_path: Path, reader: DiskReader, dtype: torch.dtype, padding: int, n_rows: int, width: int
) -> None:
    tensor, info = table(tmp_path, width, dtype, padding)
    cache = cache_of(info, reader, n_rows)
    generator = torch.Generator().manual_seed(1)
    for count in (1, 40, 700):
        ids = torch.randint(0, ROWS, (count,), generator=generator)
        assert torch.equal(cache.gather(ids, torch.float32), tensor[ids].float())
    for ids in (torch.arange(ROWS), torch.tensor([0, ROWS - 1, 0]), torch.empty(0, dtype=torch.int64)):
        assert torch.equal(cache.gather(ids, torch.float64), tensor[ids].double())
    held = min(n_rows, ROWS)
    assert cache.bytes_now == cache.peak_bytes == held * width * dtype.itemsize


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.lists(st.lists(st.integers(0, 11), min_size=1, max_size=9), min_size=1, max_size=8), st.integers(1, 12))
def test_the_rows_used_last_stay(tmp_path: Path, calls: list[list[int]], n_rows: int) -> None:
    """Against a list that is kept in the order of use."""
    folder = tmp_path / str(n_rows)
    folder.mkdir(exist_ok=True)
    tensor, info = table(folder, 5, torch.float32, 1)
    reader = DiskReader()
    cache = cache_of(info, reader, n_rows)
    held: list[int] = []
    for ids in calls:
        for start in range(0, len(ids), n_rows):
            piece = sorted(set(ids[start : start + n_rows]))
            old, new = [r for r in piece if r in held], [r for r in piece if r not in held]
            held = ([r for r in held if r not in old] + old + new)[-n_rows:]
        assert torch.equal(cache.gather(torch.tensor(ids), torch.float32), tensor[ids])
        assert sorted(cache._slots) == sorted(held)
    reader.close()


def test_what_stays_is_not_read_again(tmp_path: Path, reader: DiskReader) -> None:
    _, info = table(tmp_path, 8, torch.float32, 0)
    cache = cache_of(info, reader, 50)
    ids = torch.arange(40)
    cache.gather(ids, torch.float32)
    before = reader.bytes_read
    assert 40 * 32 <= before <= 40 * 32 + 2 * 4096, "neighbours are one read"
    cache.gather(ids.flip(0), torch.float32)
    assert reader.bytes_read == before


@pytest.mark.parametrize("bad", [-1, ROWS, 1 << 40])
def test_rows_outside_the_table_are_refused(tmp_path: Path, reader: DiskReader, bad: int) -> None:
    _, info = table(tmp_path, 4, torch.float32, 0)
    with pytest.raises(DataError, match=rf"e: row {bad} is asked for, there are {ROWS} rows"):
        cache_of(info, reader, 16).gather(torch.tensor([1, bad]), torch.float32)


def test_a_cut_file_is_named_and_the_region_stays_whole(tmp_path: Path, reader: DiskReader) -> None:
    tensor, info = table(tmp_path, 1000, torch.float32, 0)
    cache = cache_of(info, reader, 20)
    cache.gather(torch.arange(20), torch.float32)
    whole = info.segment.path.read_bytes()
    info.segment.path.write_bytes(whole[: info.segment.offset + 200 * 4000])
    with pytest.raises(CheckpointError, match=r"e\.safetensors: cut while in use: e needs"):
        cache.gather(torch.arange(390, 410), torch.float32)
    assert torch.equal(cache.gather(torch.arange(20), torch.float32), tensor[:20])
