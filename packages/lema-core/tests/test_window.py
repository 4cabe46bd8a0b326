"""Slots and their generations."""

from __future__ import annotations

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
