"""From a model, its options and a machine to the memory of a run and what its steps will take, before a weight is
read."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from pathlib import Path

from lema.config import LemaConfig, MemoryStrategy
from lema.state_shares import StateShares
from lema_core.budgets import parse_amount
from lema_core.device import Device
from lema_core.errors import BudgetError
from lema_core.memory import process_memory_limit, rss_bytes
from lema_core.planning.flight import FlightCheck, propose
from lema_core.planning.hardware import Hardware
from lema_core.planning.predict import SteadyStep, StepPrediction, compute_s, predict_step, smallest_memory, steady_step
from lema_core.planning.states import StateTraffic, state_traffic
from lema_core.plugins import get_plugin_manager
from lema_core.runtime.schedule import Scheduler, StepCosts, StepSchedule, StepShape
from lema_core.store.activations import ActivationStream
from lema_core.store.budget import BudgetPlan, BudgetRequest, StepChoice, reserve
from lema_core.store.model import StreamedModel, WindowSizes
from lema_core.store.placement import Tier, place
from lema_core.store.state_plan import StateCodecs, StateMemory, StatePlan, Turns, state_memory
from lema_core.store.store import DEFAULT_PREFETCH_DISTANCE
from lema_core.store.trace import Trace

#: bytes of a trained number, its gradient, and its two moments
_NUMBER_BYTES, _GRADIENT_BYTES, _MOMENT_BYTES = 4, 4, 8
#: slots with which reads keep ahead of the compute
_AHEAD = 8
#: what the allocator's gaps take of the activations; more where products are kept, with what is freed between them
_GAPS, _GAPS_OF_KEPT = 0.175, 0.2
#: what kernels keep between products: packed inputs, packed gradients, and all else
_MOST_PACKED_BYTES, _MOST_SCRATCH_BYTES, _KEPT_BYTES = 16_000_000, 8_400_000, 15_500_000
#: what an interpreter with torch and lema holds on a machine that is only thought of
_INTERPRETER_BYTES = 300_000_000
#: what a CUDA context takes of device memory
_CONTEXT_BYTES = 500_000_000


@dataclass(frozen=True)
class Machine:
    """What a run may use. ``ram_held``: what the process has already. ``device_free``: None where the device shares
    RAM. ``flight``: how ``rates`` were measured, None for a machine that is only thought of."""

    ram_limit: int
    ram_source: str
    ram_held: int
    device_free: int | None
    rates: Hardware
    flight: FlightCheck | None = None

    @property
    def shares_ram(self) -> bool:
        return self.device_free is None


def this_machine(config: LemaConfig, device: Device, flight: FlightCheck) -> Machine:
    """What the process that asks may use, within the config's hard caps."""
    limit = process_memory_limit()
    ram_limit, source = limit.bytes, limit.source
    ram = parse_amount(config.ram_budget, limit.bytes, "ram_budget")
    if ram is not None and ram <= limit.bytes:
        ram_limit, source = ram, f"ram_budget={config.ram_budget}"
    free = None
    if not device.shares_ram:
        free = device.free_bytes()
        device_limit = parse_amount(config.device_budget, free, "device_budget")
        free = free if device_limit is None else min(device_limit, free)
    return Machine(ram_limit, source, rss_bytes(), free, flight.hardware, flight)


def named_machine(config: LemaConfig, rates: Hardware) -> Machine:
    """A machine known by its figures only, within the config's hard caps."""
    ram = parse_amount(config.ram_budget, rates.ram_bytes, "ram_budget") or rates.ram_bytes
    free = None
    if rates.device_bytes is not None:
        free = rates.device_bytes - _CONTEXT_BYTES
        free = min(free, parse_amount(config.device_budget, free, "device_budget") or free)
    return Machine(min(ram, rates.ram_bytes), f"RAM of {rates.name}", _INTERPRETER_BYTES, free, rates)


@dataclass(frozen=True, eq=False)
class Workload:
    """What is computed: ``costs`` of its pieces, the ``shape`` of its largest steps, which memory is set aside for, and
    of a ``typical`` one, whose time is predicted (None: nothing is trained), rows and tokens of its largest
    micro-batch, and how many numbers are trained beside the weights. ``codecs``: how moments and gradients of weights
    are kept, None where none train; ``turns``: of these, where they share room."""

    model: StreamedModel
    costs: StepCosts
    shape: StepShape | None
    typical: StepShape | None
    rows: int
    tokens: int
    trained_numbers: int
    codecs: StateCodecs | None = None
    turns: Turns = ()


class RunPlan:
    """How memory is shared out on ``machine`` and how steps will run. Raises BudgetError when a run cannot fit."""

    def __init__(self, config: LemaConfig, machine: Machine, work: Workload) -> None:
        self.machine = machine
        self.work = work
        self._config = config
        #: of weights that train
        self._shares: StateShares | None = None
        if work.codecs is not None:
            memory = machine.ram_limit, machine.device_free
            self._shares = StateShares(config, *memory, work.model, work.codecs, work.turns)
        self.budget = self._share()
        self.sizes: WindowSizes = work.model.sizes(self.budget.ram, self.budget.device, machine.shares_ram)
        if self._shares is not None:
            self._give_states(self._shares)
        self.scheduler = self._scheduler(self.budget.activations)
        self.prefetch_distance = config.prefetch_distance or self._proposed_distance()

    @property
    def near_slots(self) -> int:
        return self.sizes.ram_slots if self.machine.shares_ram else self.sizes.device_slots

    @property
    def _all_experts_fit(self) -> bool:
        slots = self.sizes.expert_ram_slots if self.machine.shares_ram else self.sizes.expert_device_slots
        experts = self.work.model.experts
        return experts is None or slots >= len(experts.granules)

    def _give_states(self, shares: StateShares) -> None:
        """What weights and activations leave of memory."""
        budget = self.budget
        spare = max(0, budget.activations - max(choice.activations for choice in self._choices))
        if self.machine.shares_ram:
            taken, _ = shares.take(spare, 0)
        else:
            scheduler = self._scheduler(budget.activations - spare)
            below = sum(self._boundaries(self.work.shape, scheduler)[Tier.RAM])
            _, taken = shares.take(max(0, budget.ram_left - below), spare)
        self.budget = replace(budget, activations=budget.activations - taken)

    def _states_at_most(self) -> tuple[int, int]:
        """Bytes in RAM and in a device's own memory, of gradients and moments of what is trained, that are certain
        before the rest is shared out; and of the numbers themselves where they are not there yet."""
        if self._shares is not None:
            return self._shares.ram_bytes, self._shares.device_bytes
        numbers = _NUMBER_BYTES if self.machine.flight is None else 0
        nbytes = (numbers + _GRADIENT_BYTES + _MOMENT_BYTES) * self.work.trained_numbers
        return (nbytes, 0) if self.machine.shares_ram else (0, nbytes)

    @cached_property
    def state_memory(self) -> StateMemory | None:
        """Of gradients and moments of weights that train, as it will be allocated; None where none do."""
        states = self.states()
        return None if states is None else state_memory(self.work.model, states, self.machine.shares_ram)

    @property
    def states_bytes(self) -> tuple[int, int]:
        """Bytes in RAM and in a device's own memory of gradients and moments of what is trained."""
        memory = self.state_memory
        return self._states_at_most() if memory is None else (memory.ram, memory.device)

    def states(self) -> StatePlan | None:
        """How moments and gradients of weights are kept, None where none train."""
        if self._shares is None:
            return None
        return self._shares.plan(Path(self._config.output_dir), self.work.codecs, self.work.turns)

    def _scheduler(self, activation_bytes: int) -> Scheduler:
        # One slot more, for what comes next. Experts are read again for every group that passes a layer.
        model = self.work.model
        holds_layer = self.near_slots > model.layout.largest_layer and self._all_experts_fit
        return Scheduler(
            self.work.costs, activation_bytes, self._config.gradient_checkpointing, holds_layer, lower_tier=True
        )

    def _proposed_distance(self) -> int:
        if self.machine.flight is None or self.work.shape is None:
            return DEFAULT_PREFETCH_DISTANCE
        layout = self.work.model.layout
        window_bytes = self.near_slots * layout.slot_bytes
        return propose(
            self.machine.flight, self.trace, layout.slot_bytes, layout.total_bytes, window_bytes
        ).prefetch_distance

    @cached_property
    def _choices(self) -> tuple[StepChoice, ...]:
        return step_choices(self.work, self.machine.rates, self._config.gradient_checkpointing)

    def _share(self) -> BudgetPlan:
        c, m, model = self._config, self.machine, self.work.model
        device_total = m.ram_limit if m.shares_ram else m.device_free
        self._check_caps(device_total)
        ram_step, device_step = self._states_at_most()
        activations = [
            parse_amount(c.activations_vram, device_total, "activations_vram"),
            parse_amount(c.activations_ram, m.ram_limit, "activations_ram") if m.shares_ram else None,
        ]
        request = BudgetRequest(
            total=model.total_bytes,
            smallest=model.smallest_bytes,
            ram_limit=m.ram_limit,
            ram_source=m.ram_source,
            ram_held=m.ram_held,
            ram_step=ram_step,
            device_free=m.device_free,
            device_step=device_step,
            device_total=model.total_device_bytes,
            device_smallest=model.smallest_device_bytes,
            weights_ram=parse_amount(c.weights_ram, m.ram_limit, "weights_ram"),
            weights_vram=parse_amount(c.weights_vram, device_total, "weights_vram"),
            resident=c.strategy is MemoryStrategy.RESIDENT,
            returning=0 if self._shares is None else model.trained_slots_bytes,
            choices=self._choices,
            activations=min((a for a in activations if a is not None), default=None),
            comfortable=model.smallest_bytes + (_AHEAD - 1) * model.layout.slot_bytes,
            read_bytes_per_s=m.rates.disk_bytes_per_s if m.shares_ram else m.rates.link_bytes_per_s,
            read_drag_s_per_byte=m.rates.read_drag_s_per_byte,
        )
        return get_plugin_manager().hook.lema_plan_budget(request=request)

    def activations(self, device: Device) -> ActivationStream:
        """The stream of blocks' inputs on ``device``, the one that this plan was made for."""
        m, ram = self.machine, None
        if not m.shares_ram:
            # What the window and the process leave, if nothing else is said.
            left = max(0, m.ram_limit - m.ram_held - self.budget.ram - self.states_bytes[0])
            below = 0 if self._shares is None else sum(self.boundaries[Tier.RAM])
            given = max(left // 2, min(left, below))
            ram = parse_amount(self._config.activations_ram, m.ram_limit, "activations_ram") or given
        return ActivationStream(device, None, ram, Path(self._config.output_dir))

    def _check_caps(self, device_total: int) -> None:
        """Gradients and moments of LoRA weights stay where they are computed with: a cap below them cannot be kept. Of
        weights that train, what options put into a device's own memory has to fit there."""
        if self._shares is not None:
            if not self.machine.shares_ram:
                beside = reserve(device_total) + self.work.model.smallest_device_bytes + self._choices[0].nbytes
                self._shares.check_device(device_total - beside, "free device memory")
            return
        where = ("vram", "ram") if self.machine.shares_ram else ("vram",)
        for stream, nbytes in (("opt_state", _MOMENT_BYTES), ("grad_acc", _GRADIENT_BYTES)):
            needed = nbytes * self.work.trained_numbers
            for tier in where:
                option = f"{stream}_{tier}"
                total = self.machine.ram_limit if tier == "ram" else device_total
                given = parse_amount(getattr(self._config, option), total, option)
                if given is not None and given < needed:
                    raise BudgetError(
                        f"{option}: {given:,} bytes are given, {needed:,} are needed for {self.work.trained_numbers:,} "
                        f"trained numbers; raise {option}, or lower lora_rank"
                    )

    # -- prediction

    @cached_property
    def schedule(self) -> StepSchedule:
        """Of the largest step that is expected."""
        return self.scheduler.choose(self.work.shape)

    @cached_property
    def trace(self) -> Trace:
        """What a typical step borrows and computes."""
        return self.scheduler.trace(self.work.typical, self.scheduler.choose(self.work.typical))

    @cached_property
    def steady(self) -> SteadyStep:
        """The plan of a typical step, once steps like it went before."""
        far_slots = None if self.machine.shares_ram else self.sizes.ram_slots
        changing = self.work.model.changing if self._shares is not None else frozenset()
        return steady_step(self.trace, self.near_slots, far_slots, self.prefetch_distance, changing)

    @cached_property
    def prediction(self) -> StepPrediction:
        """Time and traffic of a typical step, once steps like it went before."""
        granules, rates = self.work.model.layout.granules, self.machine.rates
        step = predict_step(self.trace, self.steady.plan, granules, rates)
        if self.state_traffic is None:
            return step
        states = self.state_traffic
        disk_s = step.disk_s + (states.read_bytes + states.written_bytes) / rates.disk_bytes_per_s
        link_s = step.link_s
        if states.copied_bytes:
            link_s += states.copied_bytes / rates.link_bytes_per_s
        step_s = max(step.step_s, disk_s, link_s)
        wait_s = step.wait_s + step_s - step.step_s
        return replace(step, step_s=step_s, wait_s=wait_s, disk_s=disk_s, link_s=link_s)

    @cached_property
    def state_traffic(self) -> StateTraffic | None:
        """What a step moves for weights that train beside reading them, None where none do."""
        states, c, plan = self.states(), self._config, self.steady.plan
        if states is None:
            return None
        stores_gradients = c.skip_nonfinite or c.max_grad_norm is not None
        return state_traffic(self.work.model, states, plan, stores_gradients)

    @cached_property
    def boundaries(self) -> dict[Tier, list[int]]:
        """Bytes of the blocks' inputs that the largest step keeps for their gradient, by where they lie."""
        return self._boundaries(self.work.shape, self.scheduler)

    @cached_property
    def typical_boundaries(self) -> dict[Tier, list[int]]:
        """The same of a typical step."""
        return self._boundaries(self.work.typical, self.scheduler)

    def _boundaries(self, shape: StepShape, scheduler: Scheduler) -> dict[Tier, list[int]]:
        schedule = scheduler.choose(shape)
        sizes = self.work.costs.boundaries(shape, schedule)
        tiers = place(sizes, schedule.boundary_bytes, 0 if self.machine.shares_ram else None)
        return {tier: [n for n, at in zip(sizes, tiers, strict=True) if at is tier] for tier in Tier}

    @cached_property
    def activation_bytes(self) -> int:
        """The most that a step holds of activations."""
        return self.work.costs.activation_bytes(self.work.shape, self.schedule)

    @property
    def slack_bytes(self) -> int:
        """What the allocator's gaps and the kernels' scratch memory take beside them."""
        allocated = _allocated(self.work, self.activation_bytes, self.work.shape.tokens, self.schedule.kept_share)
        return allocated - self.activation_bytes

    def step_s(self, ram: int | None = None, device: int | None = None) -> float:
        """What a step would take with other amounts of memory in all; infinite where it could not run."""
        m = self.machine
        other = replace(
            m,
            ram_limit=m.ram_limit if ram is None else ram,
            device_free=m.device_free if device is None else device,
        )
        try:
            return RunPlan(self._config, other, self.work).prediction.step_s
        except BudgetError:
            return math.inf


def plan_run(config: LemaConfig, machine: Machine, work: Workload) -> RunPlan:
    """Share out all memory there is, or as much of it as ``target_step_time_ms`` needs: of the memory that is computed
    in. Raises BudgetError when a run cannot fit, or no memory meets the target."""
    plan = RunPlan(config, machine, work)
    if config.target_step_time_ms is None or work.shape is None:
        return plan
    target_s = config.target_step_time_ms / 1000
    if machine.shares_ram:
        enough = smallest_memory(lambda ram: plan.step_s(ram=ram), machine.ram_held, machine.ram_limit, target_s)
        return RunPlan(config, replace(machine, ram_limit=enough, ram_source=_target(config)), work)
    enough = smallest_memory(lambda device: plan.step_s(device=device), 0, machine.device_free, target_s)
    return RunPlan(config, replace(machine, device_free=enough), work)


def _target(config: LemaConfig) -> str:
    return f"what target_step_time_ms={config.target_step_time_ms} needs"


@lru_cache(maxsize=8)
def step_choices(work: Workload, rates: Hardware, recompute: bool | None) -> tuple[StepChoice, ...]:
    """Ways to run a step, from the one that holds least on."""
    if work.shape is None:
        tokens = work.rows * work.tokens
        nbytes = work.costs.evaluation_bytes(tokens, work.tokens)
        return (StepChoice(nbytes, _allocated(work, nbytes, tokens), 0.0),)
    choices = []
    for schedule in Scheduler(work.costs, None, recompute, lower_tier=True).ways(work.shape):
        seconds = compute_s(work.costs.trace(work.shape, schedule), rates)
        if schedule.boundary_bytes is not None:
            lower = sum(work.costs.boundaries(work.shape, schedule)) - schedule.boundary_bytes
            seconds += 2 * max(0, lower) / (rates.link_bytes_per_s or rates.disk_bytes_per_s)
        nbytes = work.costs.activation_bytes(work.shape, schedule)
        allocated = _allocated(work, nbytes, work.shape.tokens, schedule.kept_share)
        choices.append(StepChoice(nbytes, allocated, seconds))
    return tuple(sorted(choices, key=lambda choice: choice.nbytes))


def _allocated(work: Workload, activation_bytes: int, tokens: int, kept_share: float = 0.0) -> int:
    """What a process is given for so many bytes of activations."""
    gaps = _GAPS + _GAPS_OF_KEPT * kept_share
    return math.ceil(activation_bytes * (1 + gaps)) + _scratch_bytes(work.model, tokens)


def _scratch_bytes(model: StreamedModel, tokens: int) -> int:
    """What kernels keep for products of so many columns."""
    rows, columns = model.largest_block
    packed, gradients = min(_MOST_PACKED_BYTES, 4 * columns * tokens), min(_MOST_SCRATCH_BYTES, 4 * rows * tokens)
    return packed + gradients + _KEPT_BYTES
