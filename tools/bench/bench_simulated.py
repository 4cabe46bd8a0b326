"""How much of a step's floor the transfer engine reaches: on a simulated accelerator behind links of 1, 4 and 24 GB/s,
and on the CPU with a disk of 1 GB/s.

Floor: the longer of all compute and all transfers. Granules of 32 MB are stood in for by small ones that take as long,
so that what Python adds is what it adds to a real step, and memory is no bottleneck. The window is a share of all
granules; compute is a multiple of what the pass with less of it (forward or backward) transfers.

    python tools/bench/bench_simulated.py [--links 1,4,24] [--disks 1] [--ratios 1.2,2] [--steps 1]
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from lema_core.checkpoint import read_manifest, write_safetensors
from lema_core.device import CpuDevice
from lema_core.store.granules import GranuleLayout, StreamedTensor, lay_out
from lema_core.store.model import StreamedModel, WindowSizes
from lema_core.store.planner import TierPlan
from lema_core.store.reads import PythonReads, Range
from lema_core.store.store import TensorStore
from lema_core.store.trace import Trace
from lema_core.testing.simulated import SimulatedAccelerator

LAYERS, PER_LAYER, HEAD = 8, 7, 2
N_GRANULES = LAYERS * PER_LAYER + HEAD
GRANULE_BYTES = 32_000_000
STAND_IN = (64, 1024)
WINDOWS = (2, 4, 15, 29)


class Pace:
    """Things of a known length, one after another, by a clock that a late wake-up does not delay."""

    def __init__(self) -> None:
        self._until = 0.0

    def take(self, seconds: float, since: float | None = None) -> None:
        self._until = max(self._until, time.perf_counter() if since is None else since) + seconds
        while (left := self._until - time.perf_counter()) > 0:
            time.sleep(left)


class PacedReads:
    """Reads that take as long as a disk of ``bytes_per_s`` needs; None: as long as they take."""

    def __init__(self) -> None:
        self.bytes_per_s: float | None = None
        self._reads = PythonReads()
        self._pace = Pace()

    def read(self, ranges: Sequence[Range]) -> None:
        started = time.perf_counter()
        self._reads.read(ranges)
        if self.bytes_per_s:
            self._pace.take(sum(each.needed_bytes for each in ranges) / self.bytes_per_s, started)


def step_accesses(recomputed: bool) -> list[int]:
    """A layer-major training step: forward, head, backward, each block's products again first where ``recomputed``."""
    blocks = [list(range(layer * PER_LAYER, (layer + 1) * PER_LAYER)) for layer in range(LAYERS)]
    head = [LAYERS * PER_LAYER + i for i in range(HEAD)]
    accesses = [granule for block in blocks for granule in block] + head + head[::-1]
    for block in reversed(blocks):
        accesses += (block[:-1] if recomputed else []) + block[::-1]
    return accesses


def stand_ins(folder: Path) -> GranuleLayout:
    weight = torch.randn(STAND_IN)
    write_safetensors(
        folder / "model.safetensors",
        [(f"t{i:02}", weight.dtype, STAND_IN, lambda: weight) for i in range(N_GRANULES)],
        fsync=False,
    )
    tensors = read_manifest(folder).tensors
    return lay_out([StreamedTensor(name, info, None) for name, info in tensors.items()], 300_000)


@dataclass(frozen=True)
class Case:
    """``place``: what is slow, ``link`` or ``disk``; ``ratio``: compute per transfer of the pass with less of it."""

    place: str
    gb_per_s: float
    recomputed: bool
    ratio: float

    def __str__(self) -> str:
        kept = "recomputed" if self.recomputed else "kept"
        return f"{self.place} {self.gb_per_s:g} GB/s, {kept}, {self.ratio:g} x"


def floor_and_step(case: Case, layout: GranuleLayout, window: int, steps: int) -> tuple[float, float]:
    """Seconds; the step's are the median of ``steps`` or more after the window has warmed up."""
    load_s = GRANULE_BYTES / (case.gb_per_s * 1e9)
    bytes_per_s = layout.granules[0].nbytes / load_s
    reads, on_link = PacedReads(), case.place == "link"
    device = SimulatedAccelerator(runs_ahead=True) if on_link else CpuDevice()
    sizes = WindowSizes(N_GRANULES, window, 0) if on_link else WindowSizes(window, 0, 0)
    compute = device.compute if on_link else Pace().take
    accesses = step_accesses(case.recomputed)
    part_of = {part.granule: part for found in layout.parts.values() for part in found}
    trace = Trace("step", tuple(accesses))
    with TensorStore(StreamedModel(layout, {}), device, sizes, reads=reads) as store:

        def step(compute_s: float) -> tuple[float, TierPlan]:
            started = time.perf_counter()
            plan = store.begin_step(trace)
            for granule in accesses:
                with store.borrow(part_of[granule]):
                    compute(compute_s)
            store.end_step()
            device.host_wait(device.record())
            return time.perf_counter() - started, plan.near

        for _ in range(4):
            _, plan = step(0.0)
        (device if on_link else reads).bytes_per_s = bytes_per_s
        forward = sum(load.position < N_GRANULES for load in plan.loads)
        passes = (forward, N_GRANULES), (len(plan.loads) - forward, len(accesses) - N_GRANULES)
        compute_s = case.ratio * max(n_loads * load_s / n_accesses for n_loads, n_accesses in passes)
        # Fast links make short steps, of which one says little.
        n_steps = steps + int(1 / (compute_s * len(accesses)))
        took = statistics.median(step(compute_s)[0] for _ in range(n_steps))
    return max(compute_s * len(accesses), len(plan.loads) * load_s), took


def numbers(text: str) -> list[float]:
    return [float(number) for number in text.split(",") if number]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--links", type=numbers, default="1,4,24")
    parser.add_argument("--disks", type=numbers, default="1")
    parser.add_argument("--ratios", type=numbers, default="1.2,2")
    parser.add_argument("--steps", type=int, default=1)
    a = parser.parse_args()
    torch.set_num_threads(1)
    places = [("link", rate) for rate in a.links] + [("disk", rate) for rate in a.disks]
    cases = [Case(*place, again, ratio) for place in places for again in (False, True) for ratio in a.ratios]
    print(f"{N_GRANULES} granules of 32 MB; floor / step by slots of the window")
    print(f"{'':34}" + "".join(f"{window:>8}" for window in WINDOWS))
    worst = 1.0
    with tempfile.TemporaryDirectory() as folder:
        layout = stand_ins(Path(folder))
        for case in cases:
            print(f"{case!s:34}", end="", flush=True)
            for window in WINDOWS:
                floor, took = floor_and_step(case, layout, window, a.steps)
                print(f"{floor / took:>8.3f}", end="", flush=True)
                if case.ratio >= 1.2:
                    worst = min(worst, floor / took)
            print()
    print(f"worst where compute is 1.2 x transfers or more: {worst:.3f} (wanted: 0.95)")
    if worst < 0.95:
        sys.exit(1)


if __name__ == "__main__":
    main()
