"""From what a run may use to the bytes of each window, before the first byte moves."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from lema_core.errors import BudgetError
from lema_core.memory import format_bytes


@dataclass(frozen=True)
class BudgetRequest:
    """What is known when windows are sized; all in bytes.

    ``total``: slots for every granule, with the embedding's rows. ``smallest``: one granule and a few rows.
    ``ram_limit``: what this process may use, ``ram_source`` who says so; ``ram_held``: what it holds already;
    ``ram_step``: what a step will allocate beside the weights (activations, gradients, optimizer states).
    ``device_free`` and ``device_step`` likewise; None where the device shares RAM. ``weights_ram`` and ``weights_vram``
    are what the user fixed, None for auto. ``resident``: everything must stay where it is computed from.
    """

    total: int
    smallest: int
    ram_limit: int
    ram_source: str
    ram_held: int
    ram_step: int
    device_free: int | None = None
    device_step: int = 0
    weights_ram: int | None = None
    weights_vram: int | None = None
    resident: bool = False

    @property
    def device_shares_ram(self) -> bool:
        return self.device_free is None


@dataclass(frozen=True)
class BudgetPlan:
    """Bytes of the weights' windows; ``device`` is None where the device shares RAM. ``because``: a sentence per
    figure."""

    ram: int
    device: int | None
    because: list[str] = field(default_factory=list)


def plan_budget(request: BudgetRequest) -> BudgetPlan:
    """Give the weights what is left, up to all of them. Raises BudgetError with the bytes needed and given when a run
    cannot fit."""
    fixed = request.weights_ram
    if request.device_shares_ram and request.weights_vram is not None:
        # One window serves both names; of two limits the smaller holds.
        fixed = request.weights_vram if fixed is None else min(fixed, request.weights_vram)
    left = request.ram_limit - _margin(request.ram_limit) - request.ram_held - request.ram_step
    because: list[str] = []
    if request.device_shares_ram:
        name = "weights_ram" if fixed == request.weights_ram else "weights_vram"
        return BudgetPlan(_window(request, name, fixed, left, request.ram_source, because), None, because)
    device_left = request.device_free - _margin(request.device_free) - request.device_step
    device = _window(request, "weights_vram", request.weights_vram, device_left, "free device memory", because)
    # Behind a device that holds everything, RAM only has to pass the weights on once.
    if device >= request.total and fixed is None:
        fixed = min(max(request.smallest, left), max(request.smallest, request.total // 4))
    ram = _window(replace(request, resident=False), "weights_ram", fixed, left, request.ram_source, because)
    return BudgetPlan(ram, device, because)


def _margin(limit: int) -> int:
    """Kept free: what the interpreter, the C library and page tables take beside what can be counted."""
    return max(64_000_000, limit // 20)


def _window(request: BudgetRequest, option: str, fixed: int | None, left: int, source: str, because: list[str]) -> int:
    wanted = request.total if request.resident or fixed is None else min(fixed, request.total)
    must_have = wanted if request.resident or fixed is not None else request.smallest
    if fixed is not None and not request.resident and fixed < request.smallest:
        raise BudgetError(
            f"{option} gives {fixed:,} bytes, the smallest window needs {request.smallest:,}; raise {option}"
        )
    if left < must_have:
        step = request.ram_step if option == "weights_ram" or request.device_shares_ram else request.device_step
        way_out = "shorten max_seq_length or batch_size, or give more memory"
        if request.resident:
            way_out = "use strategy=streaming"
        elif fixed is not None and left >= request.smallest:
            way_out = f"lower {option}"
        raise BudgetError(
            f"{option}: {must_have:,} bytes of weights are needed beside {step:,} for the step, "
            f"{max(0, left):,} are left of {source}; {way_out}"
        )
    given = min(wanted, left)
    share = "all" if given >= request.total else f"{100 * given // request.total} %"
    because.append(
        f"{option}: {format_bytes(given)} ({share} of the weights), {format_bytes(max(0, left))} were left of {source}"
    )
    return given
