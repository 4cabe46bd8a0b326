"""A step of 8 micro-batches from a slow disk: bytes read, and time against micro-batch-major.

1.1 B shape, 8 micro-batches of 16 tokens, LoRA r=16 on all linears, reads held at 200 MB/s by a blkio control group (or
by pacing the store's reads, where the kernel offers none). Every micro-batch passes a layer before the next layer's
weights come, so a step must read no more than 2 (W - C): W all weights, C the slots that they stream through; both are
printed, the slots counted at their full size. The kernel's own count of what it read for the group stands beside.

lema has no micro-batch-major schedule to compare with; it is taken as 8 steps of one micro-batch each, which move the
same bytes that it would.

    python tools/bench/bench_layer_major.py [--pairs 3] [--weights-ram 450MB] [--disk-mb-s 200] [--model FOLDER]
"""

from __future__ import annotations

import argparse
from contextlib import ExitStack
from statistics import median
from typing import Any

from contest import announce, spread, verdict
from shapes import SHAPES, add_model_options, model_folder
from workers import Worker, worker

BYTES_AT_MOST = 1.02
TIMES_FASTER = 5.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_model_options(parser, "1b")
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--micro-batches", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=16, help="of a micro-batch")
    parser.add_argument("--weights-ram", default="450MB")
    parser.add_argument("--disk-mb-s", type=float, default=200)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--quick", action="store_true", help="the tiny shape, one pair: does it run?")
    a = parser.parse_args()
    if a.quick:
        a.shape, a.pairs, a.weights_ram, a.disk_mb_s = "tiny", 1, "3MB", 10
    with model_folder(a) as model:
        options = {
            "folder": str(model),
            "tokens": a.tokens,
            "rank": 16,
            "threads": a.threads,
            "config": {"weights_ram": a.weights_ram},
        }
        read_s = 4 * SHAPES[a.shape].parameters / (1e6 * a.disk_mb_s)
        announce("in all, at most", 60 + (a.pairs + 1) * (1 + a.micro_batches) * read_s)
        _race(options, a.micro_batches, a.pairs, a.disk_mb_s)


def _race(options: dict[str, Any], micro_batches: int, pairs: int, disk_mb_s: float) -> None:
    rate = round(disk_mb_s * 1e6)
    with ExitStack() as stack:
        whole = stack.enter_context(worker("lema", {**options, "rows": micro_batches}, read_bytes_per_s=rate))
        single = stack.enter_context(worker("lema", {**options, "rows": 1}, read_bytes_per_s=rate))
        w, c, granule = (whole.ready[key] for key in ("weights_bytes", "slots_bytes", "granule_bytes"))
        bound = BYTES_AT_MOST * 2 * (w - c) + granule
        print(
            f"W {w / 1e9:.4f} GB, C {c / 1e9:.4f} GB in slots of {granule / 1e6:.2f} MB; 2 (W - C) = "
            f"{2 * (w - c) / 1e9:.4f} GB, at most {bound / 1e9:.4f} GB a step; disk {disk_mb_s:g} MB/s"
        )
        print(f"{'pair':>4} {'step s':>8} {'read GB':>8} {'kernel GB':>9} {'waited %':>8}", end="")
        print(f" {micro_batches:>3} {'steps s':>8} {'read GB':>8} {'times faster':>12}", flush=True)
        _take(whole, 1), _take(single, 1)  # their windows are empty
        times, reads = [], []
        for pair in range(1, pairs + 1):
            ours, theirs = _take(whole, 1), _take(single, micro_batches)
            times.append(theirs["outside_s"] / ours["outside_s"])
            reads.append(ours["read_bytes"])
            print(
                f"{pair:>4} {ours['outside_s']:>8.2f} {ours['read_bytes'] / 1e9:>8.4f} "
                f"{ours['group_read_bytes'] / 1e9:>9.4f} {100 * ours['wait_s'] / ours['step_s']:>8.2f} "
                f"{theirs['outside_s']:>12.2f} {theirs['read_bytes'] / 1e9:>8.4f} {times[-1]:>12.2f}",
                flush=True,
            )
    print(
        f"bytes read: {max(reads) / 1e9:.4f} GB, {max(reads) / (2 * (w - c)) if w > c else 0:.4f} x 2 (W - C): "
        f"{verdict(max(reads) <= bound)}"
    )
    print(f"times faster: {spread(times)}, at least {TIMES_FASTER}: {verdict(median(times) >= TIMES_FASTER)}")


def _take(child: Worker, steps: int) -> dict[str, float]:
    """So many steps one after another, their figures added."""
    rows = [child.step() for _ in range(steps)]
    return {key: sum(row[key] for row in rows) for key in rows[0] if isinstance(rows[0][key], int | float)}


if __name__ == "__main__":
    main()
