"""Slots and their generations."""

from __future__ import annotations

import pytest
import torch

from lema_core.device import map_ram
from lema_core.store.window import Window


def test_slots_are_places_in_one_slab() -> None:
    window = Window(map_ram(3 * 4096), 3, 4096)
    for i in range(3):
        window.slot(i).fill_(i + 1)
    assert [bytes(window.memory(i)[:2]) for i in range(3)] == [b"\1\1", b"\2\2", b"\3\3"]
    window.memory(1)[4095:] = b"\7"
    assert window.slot(1)[-1] == 7 and window.slot(2)[0] == 3 and window.slot(1).shape == (4096,)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8])
def test_a_block_is_the_slots_memory_where_its_dtype_can_be_read_there(dtype: torch.dtype) -> None:
    # As a device's slab, this one does not start where its memory does.
    window = Window(map_ram(4 * 4096)[4096:], 3, 4096)
    window.slot(1).copy_(torch.arange(4096) % 251)
    for offset, shape in ((0, (4, 8)), (64, (16,)), (128, ()), (12, (2, 3, 5))):
        expected = window.slot(1)[offset : offset + torch.Size(shape).numel() * dtype.itemsize]
        block = window.block(1, offset, dtype, shape)
        assert block.dtype == dtype and block.shape == shape and block.is_contiguous()
        assert block.data_ptr() == expected.data_ptr() and window.block(1, offset, dtype, shape) is block
        assert block.reshape(-1).view(torch.uint8).equal(expected)
    odd = window.block(1, 3, dtype, (5, 2))
    assert odd.reshape(-1).view(torch.uint8).equal(window.slot(1)[3 : 3 + 10 * dtype.itemsize])
    before = window.block(1, 0, dtype, (4, 8))
    window.begin_fill(1)
    assert window.block(1, 0, dtype, (4, 8)) is not before, "of the next content nothing is remembered"


def test_a_slot_is_readable_from_the_end_of_its_filling_to_the_next_one() -> None:
    window = Window(map_ram(2 * 4096), 2, 4096)
    assert window.resident() == {} and window.bytes_now == window.peak_bytes == 0
    window.begin_fill(1)
    assert window.granule_in(1) is None and window.bytes_now == 0
    window.end_fill(1, 42)
    assert window.resident() == {42: 1} and window.bytes_now == 4096 == window.peak_bytes
    before = window.generations[1]
    window.begin_fill(1)
    assert window.generations[1] == before + 1 and window.resident() == {}
    assert window.peak_bytes == 4096 and window.bytes_now == 0
    assert window.generations[0] == 0


def test_freed_memory_leaves_nothing_readable() -> None:
    window = Window(torch.zeros(4096, dtype=torch.uint8), 1, 4096)
    window.begin_fill(0)
    window.end_fill(0, 1)
    window.free()
    assert window.resident() == {} and window.slot(0).numel() == 0 and window.peak_bytes == 4096
