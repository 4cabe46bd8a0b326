"""How long programs take to start and how much memory they reach, in turn."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from contest import spread


class Start(NamedTuple):
    seconds: float
    rss_peak_bytes: int


def start_ups(model: str, tokens: int, rounds: int) -> None:
    """``import torch``, ``--help`` and a run until its first step begins; a round that is not counted warms the page
    cache."""
    with tempfile.TemporaryDirectory() as folder:
        rows = Path(folder) / "rows.jsonl"
        rows.write_text(json.dumps({"input_ids": list(range(1, tokens + 1))}) + "\n")
        programs: dict[str, Callable[[], Start]] = {
            'python -c "import torch"': lambda: _whole(["-c", "import torch"]),
            "python -m lema --help": lambda: _whole(["-m", "lema", "--help"]),
            f"a run of {model}, until its first step": lambda: _until_first_step(model, rows, tokens),
        }
        taken: dict[str, list[Start]] = {name: [] for name in programs}
        for turn in range(rounds + 1):
            for name, program in programs.items():
                start = program()
                if turn:
                    taken[name].append(start)
    print(f"{'start-up':<52} {'seconds':>18} {'rss peak MB':>18}")
    for name, starts in taken.items():
        peaks = spread([start.rss_peak_bytes / 1e6 for start in starts], 0)
        print(f"{name:<52} {spread([start.seconds for start in starts]):>18} {peaks:>18}")
    print("(the run's peak is that of the whole run, with one step)", flush=True)


def _whole(arguments: Sequence[str]) -> Start:
    started = time.perf_counter()
    process = subprocess.Popen([sys.executable, *arguments], stdout=subprocess.DEVNULL)
    return _finished(process, lambda: time.perf_counter() - started)


def _until_first_step(model: str, rows: Path, tokens: int) -> Start:
    """The first line of metrics.jsonl says how long its step took."""
    with tempfile.TemporaryDirectory() as output:
        options = [f"model_name_or_path={model}", f"train_file={rows}", f"max_seq_length={tokens}", "max_steps=1"]
        command = [sys.executable, "-m", "lema", "task=train", *options, "save_steps=null", f"output_dir={output}"]
        metrics = Path(output) / "metrics.jsonl"
        started = time.perf_counter()
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        while not (metrics.exists() and metrics.read_text().endswith("\n")) and process.poll() is None:
            time.sleep(0.005)
        seconds = time.perf_counter() - started
        start = _finished(process, lambda: seconds)
        first = json.loads(metrics.read_text().splitlines()[0])
        return Start(start.seconds - first["step_s"], start.rss_peak_bytes)


def _finished(process: subprocess.Popen, seconds: Callable[[], float]) -> Start:
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"{' '.join(map(str, process.args))} ended with {process.returncode}")
    return Start(seconds(), usage.ru_maxrss * 1024)
