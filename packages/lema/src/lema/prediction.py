"""What a plan says of a run in figures: the memory of each tier, and one step, beside what was then measured."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any

from lema.planner import RunPlan
from lema_core.store.granules import whole_sectors
from lema_core.store.placement import Tier


@dataclass(frozen=True)
class TierMemory:
    """Bytes at most in one tier. ``held``: by the process before its first step; ``states``: gradients and moments;
    ``slack``: the allocator's gaps and the kernels' scratch memory."""

    limit: int
    held: int
    weights: int
    activations: int
    states: int
    slack: int

    @property
    def total(self) -> int:
        return self.held + self.weights + self.activations + self.states + self.slack


def tier_memory(run: RunPlan) -> dict[str, TierMemory]:
    """By tier: ``ram``, and ``device`` where that is another memory."""
    machine, sizes, model = run.machine, run.sizes, run.work.model
    in_ram = model.ram_bytes(sizes)
    ram_states, device_states = run.states_bytes
    ram = machine.ram_limit, machine.ram_held, in_ram
    if machine.shares_ram:
        return {"ram": TierMemory(*ram, run.activation_bytes, ram_states, run.slack_bytes)}
    device = machine.device_free, 0, model.device_bytes(sizes)
    return {
        "device": TierMemory(*device, run.activation_bytes, device_states, run.slack_bytes),
        "ram": TierMemory(*ram, 0, ram_states, 0),
    }


def predicted(run: RunPlan) -> dict[str, Any]:
    """For summary.json, under the names that :func:`measured` has. ``ram_peak_bytes`` and ``device_peak_bytes`` are of
    the weights, of their gradients and moments where they train, and of blocks' inputs; ``process_peak_bytes`` of all
    that is in RAM."""
    step, tiers = run.prediction, tier_memory(run)
    spilled = sum(map(whole_sectors, run.typical_boundaries[Tier.DISK]))
    inputs = {tier: sum(sizes) for tier, sizes in run.boundaries.items()}
    states = run.state_traffic
    in_ram, on_device = (0, 0) if run.state_memory is None else run.states_bytes
    return {
        "step_s": step.step_s,
        "wait_s": step.wait_s,
        "bound_by": step.bound_by,
        "read_bytes": step.read_bytes + spilled + (0 if states is None else states.read_bytes),
        "written_bytes": spilled + (0 if states is None else states.written_bytes),
        "copied_bytes": step.copied_bytes + (0 if states is None else states.copied_bytes),
        "device_peak_bytes": tiers["device"].weights + inputs[Tier.DEVICE] + on_device if "device" in tiers else 0,
        "ram_peak_bytes": tiers["ram"].weights + inputs[Tier.RAM if "device" in tiers else Tier.DEVICE] + in_ram,
        "process_peak_bytes": tiers["ram"].total,
    }


def measured(steps: Iterable[Mapping[str, Any]]) -> dict[str, Any] | None:
    """The same of steps as metrics.jsonl has them: medians without the first, which finds its windows empty, and
    peaks; reads without those of embedding rows, which only a step's tokens tell. None without steps."""
    steps = [{**step, "read_bytes": step["read_bytes"] - step["demand_bytes"]} for step in steps]
    if not steps:
        return None
    typical = steps[1:] or steps
    return {
        **{
            name: median(step[name] for step in typical) for name in ("step_s", "wait_s", "read_bytes", "written_bytes")
        },
        **{name: max(step[name] for step in steps) for name in ("device_peak_bytes", "ram_peak_bytes")},
        "process_peak_bytes": max(step["rss_peak_bytes"] for step in steps),
    }
