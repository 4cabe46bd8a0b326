"""What lema predicts of a run beside what the run then takes, over 40 configurations.

Shapes, windows and hard caps, micro-batches, strategies, recomputation, prefetch distances: every configuration is a
run of ``python -m lema task=train`` in a process of its own, and its summary.json holds ``prediction`` and
``measured``. Shown are measured / predicted. Aims: the peak of each tier equal, the process's peak within 5 % and never
more than predicted, bytes read equal, the step's time (median over the steps after the first) within 15 % on a quiet
machine.

    python tools/bench/bench_predictions.py [--steps 6] [--only NUMBER,NUMBER] [--scratch FOLDER] [--quick]
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from contest import announce, spread, verdict
from shapes import Shape, made_model, scratch_folder
from workers import ENVIRONMENT, drop_cached_pages, measure_machine

PROCESS_PEAK_WITHIN = 0.05
STEP_TIME_WITHIN = 0.15


class Model(NamedTuple):
    """``little_ram``, ``little_for_activations``: options that leave it less than it would take."""

    shape: Shape
    dtype: str
    little_ram: str
    little_for_activations: str


MODELS = {
    "small": Model(Shape(512, 1408, 8, 8, 8, 8000), "bfloat16", "450MB", "30MB"),
    "deep": Model(Shape(512, 1408, 24, 8, 2, 8000), "bfloat16", "450MB", "30MB"),
    "fp32": Model(Shape(768, 2048, 8, 12, 4, 8000), "float32", "450MB", "42MB"),
    "middle": Model(Shape(1024, 2816, 12, 16, 4, 32000), "bfloat16", "600MB", "80MB"),
}


class Variant(NamedTuple):
    """Options of a run. ``window``: share of the weights that fits into weights_ram, None leaves it to the planner."""

    window: float | None = None
    tokens: int = 128
    batch_size: int = 1
    micro_batches: int = 1
    options: tuple[str, ...] = ()
    little: str | None = None

    def words(self, model: Model) -> list[str]:
        """Its options for ``model``; ``little``: the one that is as the model says."""
        given = {"ram_budget": model.little_ram, "activations_ram": model.little_for_activations}
        return [*self.options, *([f"{self.little}={given[self.little]}"] if self.little else [])]


VARIANTS = (
    Variant(),
    Variant(window=0.25),
    Variant(window=0.6, micro_batches=4),
    Variant(options=("strategy=resident",), micro_batches=2),
    Variant(little="ram_budget", tokens=192),
    Variant(window=0.3, options=("gradient_checkpointing=true",)),
    Variant(window=0.3, options=("gradient_checkpointing=false",)),
    Variant(window=0.4, tokens=64, batch_size=4, micro_batches=2),
    Variant(window=0.25, tokens=96, options=("prefetch_distance=2",), micro_batches=3, little="activations_ram"),
    Variant(window=0.5, tokens=256, options=("trainable_layers=[last:2]", "lora_rank=4")),
)


class Outcome(NamedTuple):
    """Of one run: measured / predicted of each figure; None where nothing was predicted and nothing measured."""

    ram_peak: float | None
    device_peak: float | None
    process_peak: float | None
    read: float | None
    step: float | None
    step_s: float
    process_peak_bytes: int

    def failures(self) -> list[str]:
        """What is not as aimed at."""
        wrong = []
        if self.ram_peak not in (None, 1.0) or self.device_peak not in (None, 1.0):
            wrong.append("tier")
        if self.process_peak is None or not 1 - PROCESS_PEAK_WITHIN <= self.process_peak <= 1:
            wrong.append("process")
        if self.read not in (None, 1.0):
            wrong.append("bytes")
        if self.step is None or abs(self.step - 1) > STEP_TIME_WITHIN:
            wrong.append("time")
        return wrong


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scratch", type=Path, help="where the four models are made, and found again")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--only", help="numbers of configurations, separated by commas")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--quick", action="store_true", help="three configurations of the small model, three steps")
    a = parser.parse_args()
    runs = [(model, variant) for model in MODELS for variant in VARIANTS]
    chosen = range(1, len(runs) + 1)
    if a.quick:
        a.steps, chosen = 3, [1, 2, 8]
    if a.only:
        chosen = [int(number) for number in a.only.split(",")]
    with scratch_folder(a.scratch) as scratch:
        needed = dict.fromkeys(runs[number - 1][0] for number in chosen)
        folders = {
            name: made_model(scratch / f"predictions-{name}", MODELS[name].shape, MODELS[name].dtype) for name in needed
        }
        measure_machine(str(next(iter(folders.values()))), a.threads)
        announce(f"{len(chosen)} runs of {a.steps} steps", len(chosen) * (8 + 1.0 * a.steps))
        print("measured / predicted:")
        print(f"{'':>2} {'model':<7} {'ram':>7} {'device':>7} {'process':>8} {'read':>7} {'step':>6}", end="")
        print(f" {'step s':>7} {'process MB':>10}  {'not as aimed at':<22} configuration", flush=True)
        outcomes = []
        for number in chosen:
            model, variant = runs[number - 1]
            outcome = _run(folders[model], MODELS[model], variant, a.steps, a.threads)
            if isinstance(outcome, str):
                print(f"{number:>2} {model:<7} {outcome}  {_described(variant, MODELS[model])}", flush=True)
                continue
            outcomes.append(outcome)
            shares = (outcome.ram_peak, outcome.device_peak, outcome.process_peak, outcome.read, outcome.step)
            ram, device, process, read, step = ("-" if s is None else f"{s:.4f}" for s in shares)
            print(
                f"{number:>2} {model:<7} {ram:>7} {device:>7} {process:>8} {read:>7} {step[:5]:>6} "
                f"{outcome.step_s:>7.3f} {outcome.process_peak_bytes / 1e6:>10.0f}  "
                f"{', '.join(outcome.failures()) or 'all as aimed at':<22} {_described(variant, MODELS[model])}",
                flush=True,
            )
        _sum_up(outcomes, len(chosen))


def _sum_up(outcomes: list[Outcome], asked: int) -> None:
    if not outcomes:
        raise SystemExit("no run came to an end")
    print(f"{len(outcomes)} of {asked} runs came to an end")
    for what, aim in (
        ("tier", "peak of each tier as predicted"),
        ("process", f"process peak within {100 * PROCESS_PEAK_WITHIN:.0f} % and never exceeded"),
        ("bytes", "bytes read as predicted"),
        ("time", f"step time within {100 * STEP_TIME_WITHIN:.0f} %"),
    ):
        met = sum(what not in outcome.failures() for outcome in outcomes)
        print(f"  {aim}: {met} of {len(outcomes)}: {verdict(met == asked)}")
    off = [abs(outcome.step - 1) for outcome in outcomes if outcome.step is not None]
    if off:
        print(f"  step time is off by {100 * median(off):.1f} % (median), {100 * max(off):.1f} % at most")
    peaks = [outcome.process_peak for outcome in outcomes if outcome.process_peak is not None]
    if peaks:
        print(f"  process peak, measured / predicted: {spread(peaks, 3)}")


def _run(folder: Path, model: Model, variant: Variant, steps: int, threads: int | None) -> Outcome | str:
    """One run, or the line that it ended with."""
    shape = model.shape
    drop_cached_pages(folder)
    with tempfile.TemporaryDirectory() as output:
        rows = Path(output) / "rows.jsonl"
        n_rows = steps * variant.batch_size * variant.micro_batches
        rows.write_text("".join(json.dumps({"input_ids": _ids(row, variant, shape)}) + "\n" for row in range(n_rows)))
        options = {
            "model_name_or_path": folder,
            "train_file": rows,
            "max_seq_length": variant.tokens,
            "batch_size": variant.batch_size,
            "gradient_accumulation_steps": variant.micro_batches,
            "max_steps": steps,
            "save_steps": "null",
            "output_dir": Path(output) / "run",
            **({} if threads is None else {"num_threads": threads}),
        }
        if variant.window is not None:
            weights_bytes = shape.parameters * (4 if model.dtype == "float32" else 2)
            options["weights_ram"] = f"{variant.window * weights_bytes / 1e6:.1f}MB"
        words = [f"{name}={value}" for name, value in options.items()]
        done = subprocess.run(
            [sys.executable, "-m", "lema", "task=train", *words, *variant.words(model)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            # Each run measures the machine just before it: others' load comes and goes.
            env=os.environ | ENVIRONMENT["lema"] | {"LEMA_CACHE": str(Path(output) / "cache")},
            check=False,
        )
        if done.returncode:
            return f"ended with {done.returncode}: {done.stdout.strip().splitlines()[-1]}"
        summary = json.loads((Path(output) / "run/summary.json").read_text())
    return _outcome(summary["prediction"], summary["measured"])


def _outcome(predicted: dict[str, Any], measured: dict[str, Any]) -> Outcome:
    def share(name: str) -> float | None:
        if not predicted[name]:
            return None if not measured[name] else float("inf")
        return measured[name] / predicted[name]

    names = ("ram_peak_bytes", "device_peak_bytes", "process_peak_bytes", "read_bytes", "step_s")
    return Outcome(*map(share, names), measured["step_s"], measured["process_peak_bytes"])


def _ids(row: int, variant: Variant, shape: Shape) -> list[int]:
    draw = random.Random(row)
    return [draw.randrange(shape.vocab) for _ in range(variant.tokens)]


def _described(variant: Variant, model: Model) -> str:
    window = [] if variant.window is None else [f"window {variant.window:g} W"]
    rows = f"{variant.micro_batches} x {variant.batch_size} x {variant.tokens} tokens"
    return "; ".join([*window, rows, *variant.words(model)])


if __name__ == "__main__":
    main()
