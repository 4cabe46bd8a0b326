"""The memory that loading a module takes: lema's low-memory loading beside torch's and accelerate's.

Each loads the same module of 1 GB in a child of its own, in a control group, which is charged for page cache too. The
files' pages are dropped from the cache first. Peaks are beyond what the child held once everything was imported.

    python tools/bench/bench_low_memory.py [--folder .] [--gigabytes 1.0]
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from cgroup import Cgroup
from safetensors.torch import load_file, save_file
from torch import nn

from lema_core.low_memory import empty_model, load_checkpoint_with_low_memory
from lema_core.memory import peak_rss_bytes, reset_peak_rss, rss_bytes

WIDTH = 2048
LAYER_BYTES = 4 * WIDTH * WIDTH


def make(layers: int) -> nn.Module:
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers)))


def lema_way(layers: int, path: Path) -> nn.Module:
    with empty_model():
        module = make(layers)
    load_checkpoint_with_low_memory(module, path)
    return module


def torch_way(layers: int, path: Path) -> nn.Module:
    module = make(layers)
    module.load_state_dict(torch.load(path) if path.suffix == ".pt" else load_file(path))
    return module


def mmap_way(layers: int, path: Path) -> nn.Module:
    with torch.device("meta"):
        module = make(layers)
    # safetensors maps its files anyway
    module.load_state_dict(torch.load(path, mmap=True) if path.suffix == ".pt" else load_file(path), assign=True)
    return module


def accelerate_way(layers: int, path: Path) -> nn.Module:
    from accelerate import init_empty_weights, load_checkpoint_in_model

    with init_empty_weights():
        module = make(layers)
    load_checkpoint_in_model(module, str(path), device_map={"": "cpu"})
    return module


WAYS = {
    "lema: empty_model, load_checkpoint_with_low_memory": (lema_way, ("safetensors", "shards", "torch.save")),
    "load, load_state_dict": (torch_way, ("safetensors", "torch.save")),
    "mmap, load_state_dict(assign=True)": (mmap_way, ("safetensors", "torch.save")),
    "accelerate: load_checkpoint_in_model": (accelerate_way, ("safetensors", "shards", "torch.save")),
}


def write(folder: Path, layers: int) -> dict[str, Path]:
    """The same weights as one safetensors file, a folder of four, and a torch.save file."""
    state = {f"{i}.weight": torch.full((WIDTH, WIDTH), float(i)) for i in range(layers)}
    torch.save(state, folder / "model.pt")
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    shards = folder / "shards"
    shards.mkdir()
    names = {key: f"model-{number % 4 + 1:05}-of-00004.safetensors" for number, key in enumerate(state)}
    for file in set(names.values()):
        part = {key: tensor for key, tensor in state.items() if names[key] == file}
        save_file(part, shards / file, metadata={"format": "pt"})
    index = {"metadata": {"total_size": layers * LAYER_BYTES}, "weight_map": names}
    (shards / "model.safetensors.index.json").write_text(json.dumps(index))
    return {"torch.save": folder / "model.pt", "safetensors": folder / "model.safetensors", "shards": shards}


def drop_from_cache(path: Path) -> None:
    for file in [path] if path.is_file() else path.iterdir():
        with open(file, "rb") as opened:
            os.fsync(opened.fileno())
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def child(way: str, layers: int, path: Path, usage: Path | None) -> None:
    """Load, use every number once, and print the peak of RSS, the group's usage before it, and seconds."""
    load = WAYS[way][0]
    if load is accelerate_way:
        import accelerate  # noqa: F401
    reset_peak_rss()
    before, group_before, started = rss_bytes(), int(usage.read_text()) if usage else 0, time.perf_counter()
    module = load(layers, path)
    for parameter in module.parameters():
        parameter.sum()  # what is mapped is read, and counts, once it is used
    seconds = time.perf_counter() - started
    peak = peak_rss_bytes() - before
    assert all(layer.weight[0, 0] == i for i, layer in enumerate(module))  # type: ignore[arg-type]
    print(json.dumps({"rss": peak, "group_before": group_before, "seconds": seconds}))


def measure(way: str, layers: int, path: Path) -> dict[str, Any]:
    drop_from_cache(path)
    with Cgroup.create() as group:
        usage = group.memory / ("memory.usage_in_bytes" if group.v1 else "memory.current")
        arguments = [way, str(layers), str(path), str(usage) if usage.exists() else ""]
        run = subprocess.run(
            [sys.executable, __file__, "--child", *arguments], capture_output=True, text=True, preexec_fn=group.enter
        )
        if run.returncode:
            sys.exit(run.stderr)
        found: dict[str, Any] = json.loads(run.stdout)
        return {**found, "group": group.peak_bytes() - found["group_before"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path("."))
    parser.add_argument("--gigabytes", type=float, default=1.0)
    parser.add_argument("--child", nargs=4, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        way, layers, path, usage = options.child
        child(way, int(layers), Path(path), Path(usage) if usage else None)
        return
    layers = max(1, round(options.gigabytes * 1e9 / LAYER_BYTES))
    print(
        f"a module of {layers * LAYER_BYTES / 1e9:.2f} GB; peaks in multiples of that, page cache counted in the first"
    )
    print("| way | file | peak of the group | peak RSS | seconds |\n|---|---|---|---|---|")
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        paths = write(Path(folder), layers)
        for way, (_, kinds) in WAYS.items():
            for kind in kinds:
                found = measure(way, layers, paths[kind])
                group, rss = (found[key] / (layers * LAYER_BYTES) for key in ("group", "rss"))
                print(f"| {way} | {kind} | {group:.2f} | {rss:.2f} | {found['seconds']:.1f} |", flush=True)


if __name__ == "__main__":
    main()
