"""What loading takes of the process's memory, and of its control group's, which is charged for page cache too."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

CGROUP = Path("/sys/fs/cgroup/memory")
WIDTH = 1024
#: builds a module of so many layers, alone or before what is to be measured, and prints peaks beyond what was there
CHILD = """
import contextlib, json, sys
import torch
from torch import nn
from lema_core.low_memory import empty_model, load_checkpoint_with_low_memory
from lema_core.memory import peak_rss_bytes, reset_peak_rss, rss_bytes

layers, width, path, build, group = json.loads(sys.argv[1])

def number(file):
    return int(open(f"{group}/{file}").read()) if group else 0

before, group_before = rss_bytes(), number("memory.usage_in_bytes")
assert reset_peak_rss()
if group:
    open(f"{group}/memory.max_usage_in_bytes", "w").write("0")
with empty_model() if build == "empty" else contextlib.nullcontext():
    module = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(layers)))
load_checkpoint_with_low_memory(module, path)
peaks = peak_rss_bytes() - before, number("memory.max_usage_in_bytes") - group_before
assert all((layer.weight == i).all() for i, layer in enumerate(module))
print(json.dumps([sum(weight.nbytes for weight in module.parameters()), *peaks]))
"""


def write(folder: Path, kind: str, layers: int) -> Path:
    state = {f"{i}.weight": torch.full((WIDTH, WIDTH), float(i)) for i in range(layers)}
    if kind == "zip":
        torch.save(state, folder / "model.pt")
        return folder / "model.pt"
    if kind == "safetensors":
        save_file(state, folder / "model.safetensors")
        return folder / "model.safetensors"
    names = {key: f"model-{number % 3}.safetensors" for number, key in enumerate(state)}
    for file in set(names.values()):
        save_file({key: state[key] for key in names if names[key] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    return folder


@contextmanager
def memory_group() -> Iterator[Path]:
    """A group under cgroup v1; skips where there is none to make."""
    group = CGROUP / f"lema-test-{os.getpid()}"
    try:
        group.mkdir()
    except OSError as error:
        pytest.skip(f"no memory group of cgroup v1 can be made here: {error}")
    try:
        yield group
    finally:
        (group / "memory.force_empty").write_text("0")
        group.rmdir()


def peaks(path: Path, layers: int, build: str, group: Path | None) -> tuple[int, int, int]:
    """Bytes of the module, and the peaks of the process's RSS and of the group beyond what was there before."""
    join = f"open('{group}/cgroup.procs', 'w').write('0')\n" if group else ""
    arguments = json.dumps([layers, WIDTH, str(path), build, str(group) if group else ""])
    run = subprocess.run([sys.executable, "-c", join + CHILD, arguments], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    return tuple(json.loads(run.stdout))


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
def test_a_small_module_takes_its_bytes_once(tmp_path: Path) -> None:
    module_bytes, rss_bytes, _ = peaks(write(tmp_path, "zip", 12), 12, "empty", None)
    print(f"{rss_bytes:,} of {module_bytes:,}")
    assert module_bytes == 12 * 4 * WIDTH**2
    # a piece of the file, and code that is used for the first time
    assert rss_bytes <= module_bytes + 16e6


@pytest.mark.slow
@pytest.mark.parametrize("build", ["empty", "filled"])
@pytest.mark.parametrize("kind", ["zip", "safetensors", "shards"])
def test_a_module_of_300_mb_takes_its_bytes_once(kind: str, build: str, tmp_path: Path) -> None:
    path = write(tmp_path, kind, 72)
    # the file's pages leave the cache: they would be charged to others
    for file in [path] if path.is_file() else path.iterdir():
        with open(file, "rb") as opened:
            os.fsync(opened.fileno())
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    with memory_group() if CGROUP.is_dir() else nullcontext() as group:
        module_bytes, rss_bytes, group_bytes = peaks(path, 72, build, group)
    print(f"RSS {rss_bytes:,}, group {group_bytes:,} of {module_bytes:,}")
    assert module_bytes > 300e6
    assert rss_bytes <= 1.05 * module_bytes
    assert group_bytes <= 1.05 * module_bytes
