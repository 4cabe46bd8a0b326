"""Training of all weights in capped control groups: SmolLM2-135M at 512 tokens, and the 1.1 B shape.

capped   SmolLM2 with all states on disk in --cap-mb, against the larger of what a step computes (the same with all
         states in RAM, uncapped) and what its bytes take on this disk; beside it transformers' fp32 model under
         torch's AdamW, all in RAM
peft-group  the smallest group in which that keeps its speed (needs capped)
update   what updates add to a step that has its states in RAM, beside what AdamW alone takes for as many numbers
1b       13 GB of fp32 states and masters in --cap-1b-mb: three steps

python tools/bench/bench_full.py [--pairs 3] [--parts capped,peft-group,update,1b] [--model FOLDER] [--quick]
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

from bench_smollm2 import MODEL, locate
from contest import Entrant, Result, announce, contest, spread, verdict
from disk_floor import seconds_for
from shapes import add_model_options, model_folder
from versus_peft import peft_smallest_group
from workers import ChildFailed, measure_machine, worker

FLOOR_AT_MOST = 1.15
SHARE_AT_MOST = 1.1
PARTS = ("capped", "peft-group", "update", "1b")
FULL: dict[str, Any] = {"training_mode": "selective_full", "learning_rate": 1e-5}
#: an eighth of the numbers, eight times: what one thread of the native kernel takes for all
_ADAMW = """
import time, torch
from bench_adamw import RATES
from lema_cuda.elementwise import NativeAdamW
states, kernel, spent = [torch.rand(COUNT) + 1e-3 for _ in range(4)], NativeAdamW(), []
for _ in range(9):
    started = time.perf_counter()
    kernel.update(*states, RATES, 1)
    spent.append(time.perf_counter() - started)
print(8 * sorted(spent)[4])
"""
#: moments and gradients that stay in RAM: none
ON_DISK = {"opt_state_ram": "1B", "grad_acc_ram": "1B"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_model_options(parser, "1b")
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--parts", default=",".join(PARTS), help="some of them, separated by commas")
    parser.add_argument("--tokens", type=int, default=512, help="of SmolLM2's sequence")
    parser.add_argument("--cap-mb", type=int, default=700)
    parser.add_argument("--cap-1b-mb", type=int, default=2000)
    parser.add_argument("--steps-1b", type=int, default=3)
    parser.add_argument("--resolution-mb", type=int, default=100, help="of peft-group")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--quick", action="store_true", help="32 tokens, one pair, the tiny shape: does it run?")
    a = parser.parse_args()
    if a.quick:
        a.pairs, a.tokens, a.shape, a.cap_1b_mb, a.resolution_mb = 1, 32, "tiny", 600, 800
    parts = a.parts.split(",")
    if unknown := set(parts) - set(PARTS):
        parser.error(f"no such part: {', '.join(unknown)}; there are {', '.join(PARTS)}")
    with tempfile.TemporaryDirectory(dir=a.scratch) as scratch:
        if parts != ["1b"]:
            folder = locate(MODEL)
            measure_machine(folder, a.threads)
            options = {"folder": folder, "tokens": a.tokens, "threads": a.threads}
            if "capped" in parts:
                theirs = _capped(options, Path(scratch), a.cap_mb, a.pairs)
                if "peft-group" in parts and theirs is not None:
                    peft_smallest_group({**options, "full": True}, theirs, a.resolution_mb * 1_000_000)
            if "update" in parts:
                _update(options, Path(scratch), a.pairs)
        if "1b" in parts:
            with model_folder(a) as model:
                measure_machine(str(model), a.threads)
                options = {"folder": str(model), "tokens": 256, "threads": a.threads}
                _steps(_with(options, Path(scratch) / "1b"), a.cap_1b_mb, a.steps_1b)


def _with(options: dict[str, Any], output: Path, **config: Any) -> dict[str, Any]:
    return {**options, "config": {**FULL, "output_dir": str(output), **config}}


def _capped(options: dict[str, Any], scratch: Path, cap_mb: int, pairs: int) -> Result | None:
    name, resident, theirs = f"lema in {cap_mb} MB", "lema, all in RAM", "transformers + AdamW, all in RAM"
    announce("capped", 3 * (pairs + 1) * 10)
    found = contest(
        [
            Entrant(name, "lema", _with(options, scratch / "capped", **ON_DISK), cap_mb * 1_000_000),
            Entrant(resident, "lema", _with(options, scratch / "resident")),
            Entrant(theirs, "peft", {**options, "full": True}),
        ],
        pairs,
    )
    for each in found.values():
        print(f"{each.entrant.name}: step {spread(each.figures('outside_s'))} s, peak {each.memory_bytes / 1e6:.0f} MB")
    if name in found and resident in found:
        ours = found[name]
        read, written = (median(ours.figures(key)) for key in ("read_bytes", "written_bytes"))
        disk_s = seconds_for(scratch, read, written)
        floor_s = max(disk_s, found[resident].step_s)
        ratio = ours.step_s / floor_s
        print(
            f"  reads {read / 1e9:.2f} GB and writes {written / 1e9:.2f} GB a step: {disk_s:.2f} s on this disk; "
            f"computes {found[resident].step_s:.2f} s; step / the larger {ratio:.3f}, at most {FLOOR_AT_MOST}: "
            f"{verdict(ratio <= FLOOR_AT_MOST)}; group peak {ours.group_peak_bytes / 1e6:.0f} of {cap_mb} MB; "
            f"first loss {ours.first['loss']:.6f}, {found[resident].first['loss']:.6f} in RAM",
            flush=True,
        )
        if theirs in found:
            print(f"  step / transformers': {ours.step_s / found[theirs].step_s:.3f}", flush=True)
    return found.get(theirs)


def _update(options: dict[str, Any], scratch: Path, pairs: int) -> None:
    announce("update", 2 * (pairs + 1) * 8)
    with_it, without = "with updates", "without"
    found = contest(
        [
            Entrant(with_it, "lema", _with(options, scratch / "with")),
            Entrant(without, "lema", {**_with(options, scratch / "without"), "frozen": True}),
        ],
        pairs,
    )
    share = 1 - found[without].step_s / found[with_it].step_s
    numbers = found[with_it].ready["trained"]
    code = _ADAMW.replace("COUNT", str(numbers // 8))
    here = Path(__file__).parent
    answer = subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.PIPE, text=True, cwd=here)
    floor = float(answer.stdout) / found[with_it].step_s
    print(
        f"updates: step {spread(found[with_it].figures('outside_s'))} s, "
        f"without {spread(found[without].figures('outside_s'))} s: {100 * share:.1f} % of it; "
        f"AdamW alone {float(answer.stdout):.2f} s, {100 * floor:.1f} %: {share / floor:.2f} x, "
        f"at most {SHARE_AT_MOST}: {verdict(share <= SHARE_AT_MOST * floor)}",
        flush=True,
    )


def _steps(options: dict[str, Any], cap_mb: int, steps: int) -> None:
    try:
        with worker("lema", options, cap_mb * 1_000_000) as child:
            print(f"{child.ready['trained']:,} numbers train in {cap_mb} MB; {'; '.join(child.ready['budget'])}")
            for number in range(1, steps + 1):
                row = child.step()
                print(
                    f"step {number}: {row['outside_s']:.1f} s, loss {row['loss']:.4f}, "
                    f"read {row['read_bytes'] / 1e9:.1f} GB, written {row['written_bytes'] / 1e9:.1f} GB, "
                    f"waited {row['wait_s']:.1f} s; group peak {child.group.peak_bytes() / 1e6:.0f} MB, "
                    f"rss peak {row['rss_peak_bytes'] / 1e6:.0f} MB",
                    flush=True,
                )
    except ChildFailed as error:
        print(f"{steps} steps in {cap_mb} MB: {error}: {verdict(False)}", flush=True)


if __name__ == "__main__":
    main()
