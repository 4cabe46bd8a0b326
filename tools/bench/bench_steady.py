"""Nothing grows from step to step: resident memory, file handles and threads over 300 steps of a tiny model.

The model streams through a window smaller than itself, two micro-batches a step; a child process trains and looks at
/proc after every step. The slope of resident memory is the least-squares line from step 50 on.

    python tools/bench/bench_steady.py [--steps 300] [--after 50] [--window 0.6] [--model FOLDER]
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Sequence
from pathlib import Path

from contest import announce, verdict
from shapes import add_model_options, model_folder
from workers import worker

SLOPE_AT_MOST_BYTES = 1000
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_model_options(parser, "tiny")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--after", type=int, default=50, help="the step from which on nothing may grow")
    parser.add_argument("--window", type=float, default=0.6, help="share of the weights' bytes that weights_ram gives")
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--quick", action="store_true", help="60 steps, looked at from step 20 on: does it run?")
    a = parser.parse_args()
    if a.quick:
        a.steps, a.after = 60, 20
    if not 0 <= a.after < a.steps - 2:
        parser.error("--after: leave some steps to look at")
    with model_folder(a) as model:
        stored = sum(path.stat().st_size for path in model.glob("*.safetensors"))
        options = {
            "folder": str(model),
            "tokens": a.tokens,
            "rows": 2,
            "rank": 16,
            "threads": a.threads,
            "config": {"weights_ram": f"{a.window * stored / 1e6:.2f}MB"},
        }
        announce(f"{a.steps} steps", 10 + 0.1 * a.steps)
        with worker("lema", options) as child:
            print(f"weights {child.ready['weights_bytes']:,} bytes in slots of {child.ready['slots_bytes']:,}")
            rss, handles, threads, reads = [], [], [], []
            for _ in range(a.steps):
                reads.append(child.step()["read_bytes"])
                seen = Path(f"/proc/{child.pid}")
                rss.append(int((seen / "statm").read_text().split()[1]) * _PAGE_BYTES)
                handles.append(len(os.listdir(seen / "fd")))
                threads.append(len(os.listdir(seen / "task")))
    grown = slope(rss[a.after :])
    shown = [1, *range(50, a.steps, 50), a.steps]
    print("resident MB after step", ", ".join(f"{step}: {rss[step - 1] / 1e6:.2f}" for step in shown))
    print(
        f"slope from step {a.after} on: {grown:.0f} bytes a step, at most {SLOPE_AT_MOST_BYTES}: "
        f"{verdict(grown <= SLOPE_AT_MOST_BYTES)}"
    )
    for name, counts in (("file handles", handles), ("threads", threads), ("bytes read a step", reads)):
        values = sorted(set(counts[a.after :]))
        print(f"{name}: {json.dumps(values)}: {verdict(len(values) == 1)}")


def slope(values: Sequence[float]) -> float:
    """Of the least-squares line through values one step apart."""
    middle = (len(values) - 1) / 2
    mean = sum(values) / len(values)
    spread = sum((i - middle) ** 2 for i in range(len(values)))
    return sum((i - middle) * (value - mean) for i, value in enumerate(values)) / spread


if __name__ == "__main__":
    main()
