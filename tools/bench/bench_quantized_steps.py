"""Steps on quantized weights beside the bf16 ones: from a slow disk, in a small group, and quantized on the fly.

1.1 B shape, LoRA r=16 on all linears, sides in turns as bench_lora has them:

    slow-disk    16 tokens, reads held at 200 MB/s: int8 and int4 against bf16
    cap          one sequence of 256 in int4 inside 1.0 GB, no memory option, against bf16 inside 2.0 GB
    on-the-fly   reads held at 200 MB/s: what a run of one step that is given bf16 and ``weights_bits`` takes more than
                 one on the quantized folder, beside reading the model once; and later steps of both

    python tools/bench/bench_quantized_steps.py [--pairs 3] [--parts slow-disk,cap] [--model FOLDER] [--quick]
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from cgroup import Cgroup
from contest import Entrant, Result, announce, contest, ratios, spread, verdict
from shapes import SHAPES, add_model_options, model_folder, scratch_folder
from workers import ENVIRONMENT, drop_cached_pages, measure_machine

PARTS = ("slow-disk", "cap", "on-the-fly")


class Format(NamedTuple):
    """``slow_disk``: what a step from the slow disk may take against bf16."""

    name: str
    bits: int
    slow_disk: float


FORMATS = (Format("int8", 8, 0.55), Format("int4-32", 4, 0.32))
SLOW_TOKENS, CAP_TOKENS = 16, 256
CAPS_MB, CAP_AT_MOST = (1000, 2000), 1.05
ON_THE_FLY_FIRST, ON_THE_FLY_LATER = 1.05, 1.02


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_model_options(parser, "1b")
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--parts", default=",".join(PARTS), help="some of them, separated by commas")
    parser.add_argument("--disk-mb-s", type=float, default=200)
    parser.add_argument("--caps-mb", type=int, nargs=2, default=CAPS_MB, help="of int4 and of bf16")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--quick", action="store_true", help="the tiny shape, one pair, small caps: does it run?")
    a = parser.parse_args()
    if a.quick:
        a.shape, a.pairs, a.disk_mb_s, a.caps_mb = "tiny", 1, 10, (450, 450)
    parts = a.parts.split(",")
    if unknown := set(parts) - set(PARTS):
        parser.error(f"no such part: {', '.join(unknown)}; there are {', '.join(PARTS)}")
    with model_folder(a) as model, scratch_folder(a.scratch) as scratch:
        quantized = {each.name: _quantized(model, scratch, each) for each in FORMATS}
        if "slow-disk" in parts:
            _from_slow_disk(model, quantized, a)
        if "cap" in parts:
            measure_machine(str(quantized["int4-32"]), a.threads)
            measure_machine(str(model), a.threads)
            _in_small_group(model, quantized["int4-32"], a)
        if "on-the-fly" in parts:
            _on_the_fly(model, quantized, a)


def _quantized(model: Path, scratch: Path, chosen: Format) -> Path:
    """The folder of ``model`` in another format, made unless it is there."""
    folder = scratch / f"{model.name}-{chosen.name}"
    if not (folder / "config.json").exists():
        announce(f"{model.name} in {chosen.name}", _bytes(model) / 0.2e9)
        _lema(task="quantize", model_name_or_path=model, output_dir=folder, **_options(chosen))
    print(f"{chosen.name}: {_bytes(folder) / 1e9:.3f} GB of {_bytes(model) / 1e9:.3f} GB", flush=True)
    return folder


def _options(chosen: Format) -> dict[str, Any]:
    return {"weights_bits": chosen.bits, "weights_format": chosen.name, "quant_backend": "custom"}


def _bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.glob("*.safetensors"))


def _lema(environment: Mapping[str, str] | None = None, group: Cgroup | None = None, **options: object) -> None:
    words = [f"{name}={value}" for name, value in options.items()]
    command = [sys.executable, "-m", "lema", *words]
    done = subprocess.run(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, **ENVIRONMENT["lema"], **(environment or {})},
        preexec_fn=group.enter if group is not None else None,
    )
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} ended with {done.returncode}: {done.stdout.strip().splitlines()[-1]}")


def _side(folder: Path, tokens: int, threads: int | None, **config: object) -> dict[str, Any]:
    return {"folder": str(folder), "tokens": tokens, "rank": 16, "threads": threads, "config": config}


def _from_slow_disk(model: Path, quantized: Mapping[str, Path], a: argparse.Namespace) -> None:
    rate = round(1e6 * a.disk_mb_s)
    announce("slow-disk, at most", (a.pairs + 1) * 2 * 2 * _bytes(model) / rate)
    sides = {"bf16": model, **quantized}
    # Of each the same share stays: half of what bf16 weights take would hold all of the others.
    share = 0.2
    entrants = [
        Entrant(
            name,
            "lema",
            _side(folder, SLOW_TOKENS, a.threads, weights_ram=f"{share * _bytes(folder) / 1e6:.0f}MB"),
            read_bytes_per_s=rate,
        )
        for name, folder in sides.items()
    ]
    found = contest(entrants, a.pairs)
    print(f"\nfrom a disk of {a.disk_mb_s:g} MB/s, {SLOW_TOKENS} tokens, {share:.0%} of each one's weights in memory")
    _table(found)
    for each in FORMATS:
        _judge(found[each.name], found["bf16"], each.slow_disk)


def _in_small_group(model: Path, int4: Path, a: argparse.Namespace) -> None:
    announce("cap", 60 + 2 * (a.pairs + 1) * SHAPES[a.shape].step_flops(CAP_TOKENS, True) / 50e9)
    small, large = (round(1e6 * cap) for cap in a.caps_mb)
    found = contest(
        [
            Entrant("int4-32", "lema", _side(int4, CAP_TOKENS, a.threads), small),
            Entrant("bf16", "lema", _side(model, CAP_TOKENS, a.threads), large),
        ],
        a.pairs,
    )
    print(f"\nint4-32 in {small / 1e6:.0f} MB and bf16 in {large / 1e6:.0f} MB, {CAP_TOKENS} tokens")
    _table(found)
    _judge(found["int4-32"], found["bf16"], CAP_AT_MOST)


def _on_the_fly(model: Path, quantized: Mapping[str, Path], a: argparse.Namespace) -> None:
    rate = round(1e6 * a.disk_mb_s)
    announce("on-the-fly", len(FORMATS) * (4 * a.pairs + 6) * _bytes(model) / rate)
    for each in FORMATS:
        more, read_s = _first_runs(model, quantized[each.name], each, a)
        ratio = median(more) / median(read_s)
        print(
            f"\n{each.name}: a first run on the fly takes {spread(more)} s more, reading the model {spread(read_s)} s\n"
            f"  {ratio:.3f} x, at most {ON_THE_FLY_FIRST}: {verdict(ratio <= ON_THE_FLY_FIRST)}",
            flush=True,
        )
        share = f"{0.2 * _bytes(quantized[each.name]) / 1e6:.0f}MB"
        sides = {"on the fly": (model, _options(each)), each.name: (quantized[each.name], {})}
        found = contest(
            [
                Entrant(
                    name,
                    "lema",
                    _side(folder, SLOW_TOKENS, a.threads, weights_ram=share, **options),
                    read_bytes_per_s=rate,
                )
                for name, (folder, options) in sides.items()
            ],
            a.pairs,
        )
        _judge(found["on the fly"], found[each.name], ON_THE_FLY_LATER)


def _first_runs(model: Path, quantized: Path, chosen: Format, a: argparse.Namespace) -> tuple[list[float], list[float]]:
    """Seconds that runs of one step take more where they begin with quantizing, and that reading the model takes, in
    turns; what a run finds out about the machine is known before."""
    more, read_s = [], []
    with tempfile.TemporaryDirectory(dir=a.scratch) as output, Cgroup.create(read_from=model) as group:
        group.limit_reads(round(1e6 * a.disk_mb_s))
        rows, cache = Path(output) / "rows.jsonl", Path(output) / "cache"
        rows.write_text('{"input_ids": [1, 2, 3, 4, 5, 6, 7, 8]}\n')

        def run(folder: Path, **options: object) -> float:
            drop_cached_pages(folder)
            for made in (cache / "quantized", Path(output) / "out"):
                shutil.rmtree(made, ignore_errors=True)
            started = time.perf_counter()
            _lema(
                {"LEMA_CACHE": str(cache)},
                group,
                model_name_or_path=folder,
                task="train",
                train_file=rows,
                max_steps=1,
                save_steps="null",
                output_dir=Path(output) / "out",
                **options,
            )
            return time.perf_counter() - started

        for turn in range(a.pairs + 1):
            seconds = run(model, **_options(chosen)) - run(quantized)
            if turn:
                more.append(seconds)
                read_s.append(_read_s(model, group))
    return more, read_s


#: a process that reads every weight of a folder once, and prints the seconds
_READ = """
import sys, time
from pathlib import Path
memory, started = bytearray(16 << 20), time.perf_counter()
for path in sorted(Path(sys.argv[1]).glob("*.safetensors")):
    with path.open("rb", buffering=0) as file:
        while file.readinto(memory):
            pass
print(time.perf_counter() - started)
"""


def _read_s(folder: Path, group: Cgroup) -> float:
    """Reading every weight once, past the page cache, in ``group``."""
    drop_cached_pages(folder)
    command = [sys.executable, "-c", _READ, str(folder)]
    return float(subprocess.run(command, stdout=subprocess.PIPE, check=True, preexec_fn=group.enter).stdout)


def _table(found: Mapping[str, Result]) -> None:
    print(f"{'':<8} {'step s':>18} {'read GB':>8} {'waited %':>8} {'group peak MB':>13} {'first loss':>10}")
    for name, result in found.items():
        waited = 100 * median(row["wait_s"] / row["step_s"] for row in result.rows)
        print(
            f"{name:<8} {spread(result.figures('outside_s')):>18} {median(result.figures('read_bytes')) / 1e9:>8.3f} "
            f"{waited:>8.1f} {result.group_peak_bytes / 1e6:>13.0f} {result.first['loss']:>10.4f}"
        )


def _judge(ours: Result, theirs: Result, at_most: float) -> None:
    each = ratios(ours, theirs)
    print(
        f"  {ours.entrant.name} / {theirs.entrant.name}: {spread(each, 3)}, at most {at_most}: "
        f"{verdict(median(each) <= at_most)}",
        flush=True,
    )


if __name__ == "__main__":
    main()
