"""Shapes of the models that the benchmarks make, and the folder that one is made in. Imports no torch: what a benchmark
maps of it would not be charged to the control groups of its children."""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

_HERE = Path(__file__).parent


class Shape(NamedTuple):
    """A Llama without biases and with a head of its own."""

    hidden: int
    ffn: int
    layers: int
    heads: int
    kv_heads: int
    vocab: int

    @property
    def layer_parameters(self) -> int:
        key_value = self.hidden * self.kv_heads // self.heads
        return self.hidden * (2 * self.hidden + 2 * key_value + 3 * self.ffn + 2)

    @property
    def parameters(self) -> int:
        return self.layers * self.layer_parameters + 2 * self.vocab * self.hidden + self.hidden

    def step_flops(self, tokens: int, recompute: bool) -> float:
        """Of one LoRA step: 4 per parameter and token, 6 where the forward pass is made again."""
        return (6.0 if recompute else 4.0) * tokens * (self.parameters - self.vocab * self.hidden)


SHAPES = {
    "tiny": Shape(256, 688, 4, 8, 4, 2000),
    "1b": Shape(2048, 5632, 22, 32, 4, 32000),
    "7b": Shape(4096, 11008, 32, 32, 32, 32000),
}


def add_model_options(parser: argparse.ArgumentParser, shape: str) -> None:
    """--model, --scratch and --shape."""
    parser.add_argument("--model", type=Path, help="a model folder to use instead of making one")
    parser.add_argument(
        "--scratch", type=Path, help="where the model is made, and found again; default: a folder removed at the end"
    )
    parser.add_argument("--shape", choices=sorted(SHAPES), default=shape, help="tiny is for a quick look")


@contextmanager
def scratch_folder(given: Path | None) -> Iterator[Path]:
    """The folder given, made where it is missing, or a temporary one."""
    if given is not None:
        given.mkdir(parents=True, exist_ok=True)
        yield given
        return
    with tempfile.TemporaryDirectory(prefix="lema-bench-") as temporary:
        yield Path(temporary)


def made_model(folder: Path, shape: Shape, dtype: str = "bfloat16") -> Path:
    """``folder`` with a model of ``shape`` in it, made in a process of its own unless it is there already."""
    if (folder / "config.json").exists():
        return folder
    needed = shape.parameters * (4 if dtype == "float32" else 2)
    folder.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(folder).free
    if free < 1.05 * needed:
        raise SystemExit(
            f"{folder}: {needed / 1e9:.1f} GB are needed for the model, {free / 1e9:.1f} GB are free; "
            "give a folder on a larger disk with --scratch"
        )
    print(f"writing {needed / 1e9:.2f} GB into {folder}, about {10 + shape.parameters / 40e6:.0f} s", flush=True)
    options = [f"--{name.replace('_', '-')}={value}" for name, value in shape._asdict().items()]
    script = str(_HERE / "make_model.py")
    subprocess.run(
        [sys.executable, script, str(folder), *options, "--dtype", dtype], check=True, stdout=subprocess.DEVNULL
    )
    return folder


@contextmanager
def model_folder(given: argparse.Namespace) -> Iterator[Path]:
    """The model that --model, --scratch and --shape ask for."""
    if given.model is not None:
        yield given.model
        return
    with scratch_folder(given.scratch) as scratch:
        yield made_model(scratch / f"llama-{given.shape}", SHAPES[given.shape])
