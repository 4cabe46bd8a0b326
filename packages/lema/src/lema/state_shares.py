"""How much memory moments and gradients of weights that train are given."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from lema.config import LemaConfig
from lema_core.budgets import parse_amount
from lema_core.errors import BudgetError
from lema_core.store.model import StreamedModel
from lema_core.store.state_plan import (
    StateCodecs,
    StatePlan,
    Turns,
    device_passing_bytes,
    grads_sizes,
    optim_sizes,
    passing_bytes,
)

_OPTIONS = {"grads": "grad_acc", "optim": "opt_state"}


class StateShares:
    """Bytes of records that have their place in RAM, or in a device's own memory. What options fix is given first; what
    they leave open gets what weights and activations leave: a byte kept is one read and one written less in each step,
    of moments and of gradients alike. The others pass through a few slots.

    On a device of its own gradients have their place first, since it is there that they are added up. Weights change in
    RAM: moments are on the device only where RAM has no room, to be fetched from there and not from disk; so are
    gradients in fewer bits than fp32, which are coded in RAM.

    ``device_total``: what there is of a device's own memory, None where the device computes from RAM; then of two
    options the smaller holds.
    """

    def __init__(
        self,
        config: LemaConfig,
        ram_limit: int,
        device_total: int | None,
        model: StreamedModel,
        codecs: StateCodecs,
        turns: Turns,
    ) -> None:
        sizes = {"grads": grads_sizes(model, codecs, turns), "optim": optim_sizes(model, codecs, turns)}
        self._totals = {kind: sum(each) for kind, each in sizes.items()}
        #: what a place may be too small for
        self._largest = {kind: max(each) for kind, each in sizes.items()}
        self._first_on_device = ["grads"] if codecs.grads is None else []
        self._passing_bytes = passing_bytes(model, codecs)
        self._device_passing_bytes = 0 if device_total is None else device_passing_bytes(model, codecs)
        ram, device = (
            {
                kind: parse_amount(getattr(config, f"{name}_{tier}"), total, f"{name}_{tier}")
                for kind, name in _OPTIONS.items()
            }
            for tier, total in (("ram", ram_limit), ("vram", ram_limit if device_total is None else device_total))
        )
        if config.grad_accum_backend != "auto":
            ram["grads"] = self._totals["grads"] if config.grad_accum_backend == "ram" else 0
            device["grads"] = device["grads"] or 0
        if device_total is None:
            for kind, nbytes in device.items():
                ram[kind] = min((each for each in (ram[kind], nbytes) if each is not None), default=None)
            device = dict.fromkeys(device, 0)
        self._open_ram = [kind for kind, nbytes in ram.items() if nbytes is None]
        self._open_device = [kind for kind, nbytes in device.items() if nbytes is None]
        self._device = {kind: min(self._totals[kind], nbytes or 0) for kind, nbytes in device.items()}
        self._ram = {kind: min(self._beside(kind, self._device), nbytes or 0) for kind, nbytes in ram.items()}

    def check_device(self, room: int, source: str) -> None:
        """Raises BudgetError where options fix more than ``room`` bytes of the device's memory. Where there are none
        anyway, it is not these options that are at fault."""
        room -= self._device_passing_bytes
        for kind, name in _OPTIONS.items():
            given = self._device[kind]
            if given > room >= 0:
                raise BudgetError(
                    f"{name}_vram: {given:,} bytes are wanted in device memory, {room:,} are left of {source} beside "
                    f"the smallest window of weights and the least activations; lower {name}_vram"
                )
            room -= given

    def take(self, ram_spare: int, device_spare: int) -> tuple[int, int]:
        """Give what is open of these bytes; returns how many are taken of each."""
        ram_before, device_before = ram_spare, device_spare
        early = [kind for kind in self._open_device if kind in self._first_on_device]
        for kind in early:
            self._device[kind] = min(self._totals[kind], device_spare)
            device_spare -= self._device[kind]
        for kind in self._open_ram:
            self._ram[kind] = min(self._beside(kind, self._device), ram_spare)
            ram_spare -= self._ram[kind]
        for kind in self._open_device:
            if kind not in early:
                self._device[kind] = min(self._beside(kind, self._ram), device_spare)
                device_spare -= self._device[kind]
        return ram_before - ram_spare, device_before - device_spare

    def _beside(self, kind: str, other: Mapping[str, int]) -> int:
        """What those records need that the ``other`` tier has no room for, of which the last may be in part."""
        total, given = self._totals[kind], other[kind]
        return total if not given else min(total, total - given + self._largest[kind]) if given < total else 0

    def plan(self, folder: Path, codecs: StateCodecs, turns: Turns) -> StatePlan:
        """Working files are in ``folder``."""
        ram, device = self._ram, self._device
        return StatePlan(
            folder, ram["optim"], ram["grads"], device["optim"], device["grads"], codecs=codecs, turns=turns
        )

    @property
    def ram_bytes(self) -> int:
        """Of all that is in RAM, at most."""
        return self._passing_bytes + sum(self._ram.values())

    @property
    def device_bytes(self) -> int:
        """Of all that is in a device's own memory, at most."""
        return self._device_passing_bytes + sum(self._device.values())
