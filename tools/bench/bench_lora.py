"""LoRA on the 1.1 B shape, streamed from disk inside capped control groups, against transformers + PEFT.

r=16 on all linears, one sequence of 256 tokens, fp32 compute; lema is given no memory option: it sees the group's
limit. Each side is a process of its own; they take turns step by step, timed from outside; the model's cached pages are
dropped first and lema reads past the page cache. What is compared:

    caps           2.0 GB and 1.25 GB against PEFT without checkpointing and against lema with everything resident
    checkpointing  800 MB against PEFT with checkpointing
    peft-group     the smallest group in which PEFT without checkpointing keeps its speed (needs caps)

    python tools/bench/bench_lora.py [--pairs 3] [--parts caps,checkpointing,peft-group] [--model FOLDER] [--quick]
"""

from __future__ import annotations

import argparse

from contest import announce
from shapes import SHAPES, add_model_options, model_folder
from versus_peft import Aim, against_peft, peft_smallest_group
from workers import measure_machine

#: cap in MB, and the most that the step may take against PEFT's
CAPS = ((2000, 0.88), (1250, 0.97))
CHECKPOINTING_CAP = (800, 0.85)
PARTS = ("caps", "checkpointing", "peft-group")


def megabytes(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_model_options(parser, "1b")
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--parts", default=",".join(PARTS), help="some of them, separated by commas")
    parser.add_argument("--caps-mb", type=megabytes, default=[cap for cap, _ in CAPS], help="default: 2000,1250")
    parser.add_argument("--checkpointing-cap-mb", type=int, default=CHECKPOINTING_CAP[0])
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--threads", type=int, help="of both sides; default: as each has it")
    parser.add_argument("--resolution-mb", type=int, default=250, help="of peft-group")
    parser.add_argument("--quick", action="store_true", help="the tiny shape, one pair, small caps: does it run?")
    a = parser.parse_args()
    if a.quick:
        a.shape, a.pairs, a.tokens, a.caps_mb, a.checkpointing_cap_mb, a.resolution_mb = "tiny", 1, 64, [450], 400, 100
    parts = a.parts.split(",")
    if unknown := set(parts) - set(PARTS):
        parser.error(f"no such part: {', '.join(unknown)}; there are {', '.join(PARTS)}")
    known = dict(CAPS)
    aims = [Aim(cap * 1_000_000, known.get(cap, CAPS[-1][1])) for cap in a.caps_mb]
    with model_folder(a) as model:
        measure_machine(str(model), a.threads)
        options = {"folder": str(model), "tokens": a.tokens, "rank": a.rank, "threads": a.threads}
        _announce_all(SHAPES[a.shape].step_flops(a.tokens, False), a.pairs, len(aims), parts)
        if "caps" in parts:
            uncapped = against_peft(options, options, aims, a.pairs, resident=True)
            if "peft-group" in parts and uncapped is not None:
                peft_smallest_group(options, uncapped, a.resolution_mb * 1_000_000)
        if "checkpointing" in parts:
            aim = Aim(a.checkpointing_cap_mb * 1_000_000, CHECKPOINTING_CAP[1])
            against_peft(options, {**options, "checkpointing": True}, [aim], a.pairs, resident=False)


def _announce_all(step_flops: float, pairs: int, n_caps: int, parts: list[str]) -> None:
    """At 50 GFLOP/s, which is what two cores may do; half a minute to start each child."""
    step_s = step_flops / 50e9
    seconds = 0.0
    if "caps" in parts:
        seconds += (n_caps + 2) * (30 + (pairs + 1) * step_s)
    if "peft-group" in parts:
        seconds += 5 * (30 + 3 * step_s)
    if "checkpointing" in parts:
        seconds += 2 * (30 + (pairs + 1) * 1.5 * step_s)
    announce("in all", seconds)


if __name__ == "__main__":
    main()
