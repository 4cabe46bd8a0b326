"""A 7B shape in a control group of 1.2 GB: one whole step, and how the smallest group that runs grows with the layers.

32 layers, hidden 4096, ffn 11008, 32 heads, vocabulary 32000: 13.5 GB of bf16, made in --scratch layer by layer (the
versions of 8 and 16 layers are links to the same shards). LoRA r=8 on q, k, v, o, one sequence of 128 tokens, no memory
option: lema sees the group's limit. Swap is off; the group holds Python, torch's libraries and the page cache too.

    step      one whole step of all layers in --cap-mb: seconds, waits, peaks
    smallest  for 8, 16 and 32 layers the smallest group whose plan is accepted, to --resolution-mb, by opening the
              model only; then a whole step in it, in larger ones while it fails. The growth per layer stands beside
              LoRA states (weights, gradients, two moments) + boundary activations of a layer

    python tools/bench/bench_7b.py [--scratch FOLDER] [--parts step,smallest] [--cap-mb 1200] [--quick]
"""

from __future__ import annotations

import argparse
import json
from itertools import pairwise
from pathlib import Path
from typing import Any

from contest import announce, verdict
from make_model import first_layers
from shapes import SHAPES, add_model_options, model_folder, scratch_folder
from smallest import smallest_group
from workers import ChildFailed, measure_machine, worker

WAITS_AT_MOST = 5.0
GROWTH_AT_MOST = 1.1
#: bytes of a trained number: itself, its gradient, two moments
STATE_BYTES = 16
PARTS = ("step", "smallest")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_model_options(parser, "7b")
    parser.add_argument("--parts", default=",".join(PARTS), help="some of them, separated by commas")
    parser.add_argument("--cap-mb", type=int, default=1200, help="of the whole step; 1000 is the stretch")
    parser.add_argument("--steps", type=int, default=1, help="in --cap-mb")
    parser.add_argument("--layers", default="8,16,32", help="of the smallest groups")
    parser.add_argument("--resolution-mb", type=int, default=4, help="of the smallest groups")
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--quick", action="store_true", help="the tiny shape: does it run?")
    a = parser.parse_args()
    if a.quick:
        a.shape, a.cap_mb, a.layers, a.tokens = "tiny", 450, "2,4", 32
    parts = a.parts.split(",")
    if unknown := set(parts) - set(PARTS):
        parser.error(f"no such part: {', '.join(unknown)}; there are {', '.join(PARTS)}")
    layers = sorted(int(text) for text in a.layers.split(","))
    options = {"tokens": a.tokens, "rank": a.rank, "threads": a.threads}
    options["modules"] = ["q_proj", "k_proj", "v_proj", "o_proj"]
    with model_folder(a) as model, scratch_folder(None) as links:
        config = json.loads((model / "config.json").read_text())
        measure_machine(str(model), a.threads)
        step_s = SHAPES[a.shape].step_flops(a.tokens, True) / 50e9 + 20
        if "step" in parts:
            announce("a whole step", a.steps * step_s + 30)
            _whole_step({**options, "folder": str(model)}, a.cap_mb, a.steps)
        if "smallest" in parts:
            tries = (1000 // a.resolution_mb).bit_length()
            shares = sum(layers) / config["num_hidden_layers"]
            announce(f"smallest groups of {len(layers)} models", len(layers) * tries * 12 + 1.5 * shares * step_s)
            _growth(options, config, model, links, layers, a.cap_mb, a.resolution_mb)


def _whole_step(options: dict[str, Any], cap_mb: int, steps: int) -> None:
    try:
        with worker("lema", options, cap_mb * 1_000_000) as child:
            for line in child.ready["budget"]:
                print(f"  {line}")
            for number in range(1, steps + 1):
                row = child.step()
                waits = 100 * row["wait_s"] / row["step_s"]
                print(
                    f"step {number} in {cap_mb} MB: {row['outside_s']:.2f} s, loss {row['loss']:.4f}, read "
                    f"{row['read_bytes'] / 1e9:.3f} GB; waited {waits:.2f} % of it, at most {WAITS_AT_MOST:g}: "
                    f"{verdict(waits <= WAITS_AT_MOST)}",
                    flush=True,
                )
            print(
                f"  group peak {child.group.peak_bytes() / 1e6:.0f} MB, rss peak {row['rss_peak_bytes'] / 1e6:.0f} MB, "
                f"anonymous {row['anonymous_bytes'] / 1e6:.0f} MB of {cap_mb} MB: "
                f"{verdict(row['rss_peak_bytes'] <= cap_mb * 1e6)}",
                flush=True,
            )
    except ChildFailed as error:
        print(f"a whole step in {cap_mb} MB: {error}: {verdict(False)}", flush=True)


def _growth(
    options: dict[str, Any],
    config: dict[str, Any],
    model: Path,
    links: Path,
    layers: list[int],
    cap_mb: int,
    resolution_mb: int,
) -> None:
    hidden = config["hidden_size"]
    kv_width = hidden * config["num_key_value_heads"] // config["num_attention_heads"]
    lora = STATE_BYTES * options["rank"] * (2 * 2 * hidden + 2 * (hidden + kv_width))
    boundary = 4 * options["tokens"] * hidden
    found: dict[int, int] = {}
    for count in layers:
        folder = model if count == config["num_hidden_layers"] else first_layers(model, count, links / f"{count}")
        fewer = max(found, default=0)
        low = found.get(fewer, 150) - resolution_mb
        likely = low + round(1.5e-6 * (count - fewer) * (lora + boundary)) + 2 * resolution_mb
        found[count] = smallest_group(
            {**options, "folder": str(folder)},
            f"{count:>3} layers",
            low,
            max(1000, cap_mb),
            resolution_mb,
            likely if fewer else None,
        )
    print(
        f"of a layer: LoRA states {lora / 1e6:.2f} MB + boundary activations {boundary / 1e6:.2f} MB = "
        f"{(lora + boundary) / 1e6:.2f} MB"
    )
    for fewer, more in [*pairwise(layers), (layers[0], layers[-1])]:
        if fewer != more:
            growth = 1e6 * (found[more] - found[fewer]) / (more - fewer)
            ratio = growth / (lora + boundary)
            print(
                f"{fewer} -> {more} layers: {growth / 1e6:.2f} MB a layer, {ratio:.2f} x, at most {GROWTH_AT_MOST}: "
                f"{verdict(ratio <= GROWTH_AT_MOST)} (each found to {resolution_mb} MB)",
                flush=True,
            )


if __name__ == "__main__":
    main()
