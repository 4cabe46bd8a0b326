"""``task=plan``: what a training run would take, on this machine or another, before a weight is read."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TextIO

from lema.compose import load_yaml
from lema.config import LemaConfig
from lema.model import LemaModel
from lema.planner import Machine, RunPlan, named_machine
from lema.prediction import TierMemory, tier_memory
from lema.quantized import describe_copy
from lema.report import Row, print_sections
from lema.tasks import load_rows
from lema_core.errors import ConfigError
from lema_core.memory import format_bytes
from lema_core.planning.curves import picture
from lema_core.planning.hardware import Hardware, from_mapping, named_hardware
from lema_core.planning.predict import floor_s, what_next_gb_buys
from lema_core.store.placement import Tier
from lema_train.data import BatchPlan, typical_micro_batch, write_demo

PLOT_FILE = "plan.png"
_TIER_NAMES = {"ram": "RAM", "device": "device memory"}


def print_plan(config: LemaConfig, out: TextIO) -> None:
    """Write the plan of a run; with ``plot`` draw its step too.

    With ``train_file`` its rows say how long those of a step are, otherwise ``max_seq_length``. Raises BudgetError
    where a run cannot fit.
    """
    with LemaModel(config) as model:
        selected = model.initialize_training()
        if config.train_file is not None:
            model.expect_tokens(*_rows(model, config))
        machine = None if config.hardware is None else named_machine(config, read_hardware(config.hardware))
        run = model.plan(machine)
        rows = sections(run, f"{model.folder}: {selected}")
        if model.quantized is not None:
            rows["Run"].insert(1, Row("quantized", describe_copy(model.quantized)))
        print_sections(rows, out)
        if config.plot:
            print(f"drawn in {draw(run, config)}", file=out)


def _rows(model: LemaModel, config: LemaConfig) -> tuple[int, tuple[int, int]]:
    """Tokens of the longest row, and what a typical micro-batch is."""
    with TemporaryDirectory() as folder:
        path = config.train_file
        if path == "demo":
            path = str(write_demo(Path(folder), seed=config.seed)[0])
        rows = load_rows(model, config, path)
        plan = BatchPlan(rows.lengths, config.batch_size, config.gradient_accumulation_steps, config.seed)
        return max(rows.lengths), typical_micro_batch(rows, plan)


def read_hardware(value: str) -> Hardware:
    """A machine by its name, or from a YAML file. Raises ConfigError naming what is wrong in it."""
    if Path(value).suffix in (".yaml", ".yml") or os.sep in value:
        return from_mapping(load_yaml(Path(value), "hardware"), value)
    return named_hardware(value)


def draw(run: RunPlan, config: LemaConfig) -> Path:
    """Draw the step into ``output_dir``; returns the file. Raises ConfigError where that cannot be done."""
    from lema.plotting import draw_step

    layout, far_slots = run.work.model.layout, None if run.machine.shares_ram else run.sizes.ram_slots
    drawn = picture(run.prediction, run.steady, layout.granules, layout.slot_bytes, run.near_slots, far_slots)
    path = Path(config.output_dir).absolute() / PLOT_FILE
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"output_dir: {path.parent}: cannot be made: {error.strerror or error}") from error
    draw_step(drawn, path, f"{config.model_name_or_path} on {run.machine.rates.name}: one step, {_shape(run)}")
    return path


def sections(run: RunPlan, model: str) -> dict[str, list[Row]]:
    """All that a plan says, by section."""
    tiers = tier_memory(run)
    return {
        "Run": [Row("model", model), Row("a step", _shape(run)), Row("activations", run.schedule.describe())],
        "Machine": list(_machine(run.machine)),
        **{f"Peak in {_TIER_NAMES[tier]}": list(_memory(memory)) for tier, memory in tiers.items()},
        "Windows": [Row(*sentence.split(": ", 1)) for sentence in run.budget.because],
        "A step": list(_step(run)),
        "Bytes that a step moves": list(_moved(run)),
        "What 1 GB more would buy": list(_next_gb(run)),
    }


def _shape(run: RunPlan) -> str:
    one, largest = run.work.typical.micro_batches[0], run.work.shape.micro_batches[0]
    shape = f"{len(run.work.typical.micro_batches)} x {one.rows} rows of {one.tokens} tokens"
    if one == largest:
        return shape
    return f"{shape} and {one.n_targets} targets in the mean; memory is for rows of {largest.tokens}"


def _machine(machine: Machine) -> Iterator[Row]:
    rates = machine.rates
    yield Row("name", f"{rates.name} ({rates.source})")
    yield Row("disk", f"{format_bytes(int(rates.disk_bytes_per_s))}/s")
    if rates.link_bytes_per_s is not None:
        yield Row("link to the device", f"{format_bytes(int(rates.link_bytes_per_s))}/s")
    yield Row("memory", f"{format_bytes(int(rates.memory_bytes_per_s))}/s read and written")
    tokens, flops = rates.gemm[-1]
    yield Row("products", f"{flops / 1e9:,.0f} GFLOP/s in {rates.compute_dtype} from {tokens} tokens on")
    if machine.flight is not None:
        yield Row("this model's steps", f"{rates.pace:.2f} times what these rates say, as some of its layers took")


def _memory(memory: TierMemory) -> Iterator[Row]:
    if memory.held:
        yield Row("process before the first step", format_bytes(memory.held))
    yield Row("window of weights", format_bytes(memory.weights))
    if memory.activations or memory.states:
        yield Row("activations", format_bytes(memory.activations))
        yield Row("gradients and moments", format_bytes(memory.states))
        yield Row("gaps and scratch memory", format_bytes(memory.slack))
    yield Row("in all", f"{format_bytes(memory.total)} of {format_bytes(memory.limit)}")


def _step(run: RunPlan) -> Iterator[Row]:
    step, tokens = run.prediction, run.work.typical.tokens
    yield Row("time", f"{_seconds(step.step_s)}, {tokens / step.step_s:,.4g} tokens/s, bound by {step.bound_by}")
    yield Row("compute", f"{_seconds(step.compute_s)}, of which {_seconds(step.memory_s)} beside products")
    yield Row("waiting for weights", _seconds(step.wait_s))
    yield Row("disk is busy", _seconds(step.disk_s))
    if not run.machine.shares_ram:
        yield Row("link is busy", _seconds(step.link_s))
    floor = floor_s(run.trace, step, run.machine.rates)
    yield Row("floor", f"{_seconds(floor)}: products, reads and copies, each alone")
    yield Row("prefetch distance", str(run.prefetch_distance))


def _moved(run: RunPlan) -> Iterator[Row]:
    step, model = run.prediction, run.work.model
    yield Row("weights, disk to RAM", format_bytes(step.read_bytes))
    if not run.machine.shares_ram:
        yield Row("weights, RAM to device", format_bytes(step.copied_bytes))
    if run.state_traffic is not None:
        yield Row("moments, gradients, new weights", f"{format_bytes(run.state_traffic.written_bytes)} to disk")
        yield Row("the same, disk to RAM", format_bytes(run.state_traffic.read_bytes))
        if not run.machine.shares_ram:
            yield Row("moments, gradients, RAM and device", format_bytes(run.state_traffic.copied_bytes))
    # Which rows a step needs, and which of them are there already, only its tokens say.
    yield Row("embedding rows, disk to RAM", f"at most {format_bytes(run.work.typical.tokens * model.row_bytes)}")
    below = {tier: sum(sizes) for tier, sizes in run.typical_boundaries.items() if sizes and tier is not Tier.DEVICE}
    for tier, nbytes in below.items():
        where = "RAM" if tier is Tier.RAM else "disk"
        yield Row(f"activations, to {where} and back", format_bytes(nbytes))
    if not below:
        yield Row("activations", "none: they stay where they are computed")


def _next_gb(run: RunPlan) -> Iterator[Row]:
    machine = run.machine
    if not machine.shares_ram:
        bought = what_next_gb_buys(lambda device: run.step_s(device=device), machine.device_free)
        yield Row("of device memory", _bought(bought))
    yield Row("of RAM", _bought(what_next_gb_buys(lambda ram: run.step_s(ram=ram), machine.ram_limit)))


def _bought(seconds: float) -> str:
    return f"{_seconds(seconds)} a step" if seconds > 0 else "nothing"


def _seconds(value: float) -> str:
    return f"{value:.3g} s" if value >= 1 else f"{1000 * value:.3g} ms"
