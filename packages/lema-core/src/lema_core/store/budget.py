"""From what a run may use to the bytes of each window, before the first byte moves."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from lema_core.errors import BudgetError
from lema_core.memory import format_bytes


@dataclass(frozen=True)
class StepChoice:
    """One way to run a step: the bytes of ``activations`` it holds at most, ``nbytes`` that the process is given for
    them, gaps and the kernels' scratch memory included, and the seconds it computes."""

    activations: int
    nbytes: int
    compute_s: float


@dataclass(frozen=True)
class BudgetRequest:
    """What is known when memory is shared out; all in bytes.

    ``total``: slots for every granule, with the embedding's rows. ``smallest``: one granule and a few rows.
    ``device_total`` and ``device_smallest``: of a device's own memory, which has no rows; None: the same.
    ``ram_limit``: what this process may use, ``ram_source`` who says so; ``ram_held``: what it holds already;
    ``ram_step``: what it will hold beside weights and activations (gradients, optimizer states). ``device_free`` and
    ``device_step`` likewise; None where the device shares RAM. ``weights_ram`` and ``weights_vram`` are what the user
    fixed, None for auto. ``returning``: slots of weights that change in RAM, which a device's own window is given anew
    in each step. ``resident``: everything must stay where it is computed from.

    ``choices``: ways to run a step, from the one that holds least on; ``activations``: the most they may hold, None for
    auto. A step reads ``passes`` times what the window does not hold, at ``read_bytes_per_s``, and computes
    ``read_drag_s_per_byte`` longer for it. Below ``comfortable`` bytes a window has too few slots to read ahead.
    """

    total: int
    smallest: int
    ram_limit: int
    ram_source: str
    ram_held: int
    ram_step: int
    device_free: int | None = None
    device_step: int = 0
    device_total: int | None = None
    device_smallest: int | None = None
    weights_ram: int | None = None
    weights_vram: int | None = None
    resident: bool = False
    returning: int = 0
    choices: tuple[StepChoice, ...] = (StepChoice(0, 0, 0.0),)
    activations: int | None = None
    comfortable: int = 0
    passes: int = 2
    read_bytes_per_s: float = 1e9
    read_drag_s_per_byte: float = 0.0

    @property
    def device_shares_ram(self) -> bool:
        return self.device_free is None


@dataclass(frozen=True)
class BudgetPlan:
    """Bytes of the weights' windows; ``device`` is None where the device shares RAM. ``activations``: what a step may
    hold of them. ``because``: a sentence per figure. ``ram_left``: RAM that the step has no use for, where the device
    has memory of its own."""

    ram: int
    device: int | None
    activations: int
    because: list[str] = field(default_factory=list)
    ram_left: int = 0


def plan_budget(request: BudgetRequest) -> BudgetPlan:
    """Share memory between weights and activations so that a step takes least time; what is left goes to the weights,
    up to all of them. Raises BudgetError with the bytes needed and given when a run cannot fit."""
    fixed = request.weights_ram
    if request.device_shares_ram and request.weights_vram is not None:
        # One window serves both names; of two limits the smaller holds.
        fixed = request.weights_vram if fixed is None else min(fixed, request.weights_vram)
    left = request.ram_limit - reserve(request.ram_limit) - request.ram_held - request.ram_step
    because: list[str] = []
    if request.device_shares_ram:
        name = "weights_ram" if fixed == request.weights_ram else "weights_vram"
        ram, activations = _share(request, name, fixed, left, request.ram_source, because)
        return BudgetPlan(ram, None, activations, because)
    device_left = request.device_free - reserve(request.device_free) - request.device_step
    there = replace(
        request,
        total=request.total if request.device_total is None else request.device_total,
        smallest=request.smallest if request.device_smallest is None else request.device_smallest,
    )
    device, activations = _share(there, "weights_vram", there.weights_vram, device_left, "free device memory", because)
    # Behind a device that holds everything, RAM only has to pass on once what does not change.
    if device >= there.total and fixed is None:
        changing = min(request.total, request.smallest + request.returning if request.returning else 0)
        fixed = min(max(request.smallest, left), max(request.smallest, request.total // 4, changing))
    ram = _window(replace(request, resident=False), "weights_ram", fixed, left, 0, request.ram_source, because)
    return BudgetPlan(ram, device, activations, because, left - ram)


def reserve(limit: int) -> int:
    """Kept free: what the interpreter, the C library and page tables take beside what can be counted."""
    return max(64_000_000, limit // 20)


def _share(
    request: BudgetRequest, option: str, fixed: int | None, left: int, source: str, because: list[str]
) -> tuple[int, int]:
    """The window and the activations of the memory that is computed in."""
    least = request.choices[0]
    if request.activations is not None and request.activations < least.activations:
        raise BudgetError(
            f"activations: {request.activations:,} bytes are given, {least.activations:,} are needed where all that "
            "can be is recomputed; raise activations_ram or activations_vram, or shorten max_seq_length or batch_size"
        )
    wanted, must_have = _wanted(request, fixed)

    def step_s(choice: StepChoice) -> float:
        window = min(wanted, left - choice.nbytes)
        read_bytes = request.passes * (request.total - window)
        reading_s = read_bytes / request.read_bytes_per_s
        computing_s = choice.compute_s + request.read_drag_s_per_byte * read_bytes
        if window < min(request.comfortable, request.total):
            return computing_s + reading_s
        return max(computing_s, reading_s)

    allowed = [
        choice
        for choice in request.choices
        if left - choice.nbytes >= must_have
        and (request.activations is None or choice.activations <= request.activations)
    ]
    best = min(allowed, key=step_s, default=least)
    window = _window(request, option, fixed, left, best.nbytes, source, because)
    activations = best.activations + left - window - best.nbytes
    if request.activations is not None:
        activations = min(activations, request.activations)
    return window, activations


def _wanted(request: BudgetRequest, fixed: int | None) -> tuple[int, int]:
    """Bytes of the window at most and at least."""
    wanted = request.total if request.resident or fixed is None else min(fixed, request.total)
    return wanted, wanted if request.resident or fixed is not None else request.smallest


def _window(
    request: BudgetRequest, option: str, fixed: int | None, left: int, beside: int, source: str, because: list[str]
) -> int:
    """The window of one tier, of what is ``left`` without ``beside`` bytes of activations."""
    wanted, must_have = _wanted(request, fixed)
    left -= beside
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
        elif len(request.choices) == 1 and beside:
            way_out = "leave gradient_checkpointing to lema, shorten max_seq_length or batch_size, or give more memory"
        raise BudgetError(
            f"{option}: {must_have:,} bytes of weights are needed beside {step + beside:,} for the step, "
            f"{max(0, left):,} are left of {source}; {way_out}"
        )
    given = min(wanted, left)
    share = "all" if given >= request.total else f"{100 * given // request.total} %"
    because.append(
        f"{option}: {format_bytes(given)} ({share} of the weights), {format_bytes(max(0, left))} were left of {source}"
    )
    return given
