"""Where what is put in one order and taken in the reverse will lie."""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum

from lema_core.store.granules import whole_sectors


class Tier(IntEnum):
    """A device that computes from RAM has no tier RAM of its own."""

    DEVICE = 0
    RAM = 1
    DISK = 2


def place(sizes: Sequence[int], device_bytes: int | None, ram_bytes: int | None) -> list[Tier]:
    """Where each of the entries put in this order lies once all are: the last ones highest, on the device as they are,
    in RAM in whole sectors. None: no limit."""
    tiers: list[Tier] = []
    tier = Tier.DEVICE
    used = 0
    for nbytes in reversed(sizes):
        if tier is Tier.DEVICE and device_bytes is not None and used + nbytes > device_bytes:
            tier, used = Tier.RAM, 0
        if tier is Tier.RAM and ram_bytes is not None and used + whole_sectors(nbytes) > ram_bytes:
            tier = Tier.DISK
        used += whole_sectors(nbytes) if tier is Tier.RAM else nbytes
        tiers.append(tier)
    return tiers[::-1]
