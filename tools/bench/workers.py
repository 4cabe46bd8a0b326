"""Children that train, each in a process of its own, and do one step when they are told to: so two of them can take
turns step by step, whatever else the machine does."""

from __future__ import annotations

import json
import os
import selectors
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from cgroup import Cgroup

_HERE = Path(__file__).parent
#: As ``python -m lema`` has it; PEFT is left as torch's users run it.
ENVIRONMENT = {"lema": {"OMP_WAIT_POLICY": "passive"}, "peft": {}}


class ChildFailed(Exception):
    """A child ended, or did not answer in time. ``killed``: by the kernel for want of memory, or by us after
    ``timeout_s``."""

    def __init__(self, text: str, killed: bool) -> None:
        super().__init__(text)
        self.killed = killed


class Worker:
    """``lema_side.py`` or ``peft_side.py`` at the other end of two pipes. Made by :func:`worker`."""

    def __init__(
        self,
        side: str,
        options: dict[str, Any],
        group: Cgroup,
        errors: IO[str],
        environment: dict[str, str],
        timeout_s: float | None,
    ) -> None:
        self.side = side
        self.group = group
        self.timeout_s = timeout_s
        self._errors = errors
        self._process = subprocess.Popen(
            [sys.executable, str(_HERE / f"{side}_side.py"), json.dumps(options)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            preexec_fn=group.enter,
            env={**os.environ, **ENVIRONMENT[side], **environment},
        )
        self.pid = self._process.pid
        #: what the child said of itself before its first step
        self.ready: dict[str, Any] = {}

    def wait_until_ready(self) -> None:
        """Raises ChildFailed when it will not be."""
        self.ready = self._answer()

    def step(self) -> dict[str, Any]:
        """One optimizer step; its metrics with ``outside_s``, the seconds as they pass out here, and
        ``group_read_bytes``, what the kernel read from the disk for it."""
        read = self.group.disk_read_bytes()
        started = time.perf_counter()
        with suppress(BrokenPipeError):  # it is gone; _answer says why
            self._process.stdin.write("step\n")
            self._process.stdin.flush()
        row = self._answer()
        row["outside_s"] = time.perf_counter() - started
        row["group_read_bytes"] = self.group.disk_read_bytes() - read
        return row

    def _answer(self) -> dict[str, Any]:
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            if not selector.select(self.timeout_s):
                raise ChildFailed(f"{self.side}: no answer in {self.timeout_s:.0f} s", killed=True)
        line = self._process.stdout.readline()
        if not line:
            code = self._process.wait()
            self._errors.seek(0)
            said = self._errors.read().strip().splitlines()[-1:]
            raise ChildFailed(f"{self.side} ended with {code}: {' '.join(said)}", killed=code == -signal.SIGKILL)
        return json.loads(line)

    def close(self) -> None:
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()
        with suppress(BrokenPipeError):  # a last line that nobody read
            self._process.stdin.close()


@contextmanager
def worker(
    side: str,
    options: dict[str, Any],
    cap_bytes: int | None = None,
    read_bytes_per_s: int | None = None,
    timeout_s: float | None = None,
) -> Iterator[Worker]:
    """A child in a group of its own, model loaded, no step done. The model's and torch's cached pages are dropped
    first: reads come from the disk, and the group is charged for the libraries that it maps.

    Behind a slow disk (``read_bytes_per_s``) lema measures that disk, and keeps the figures to itself; libraries stay
    cached there. Raises ChildFailed, then and at each step.
    """
    folder = Path(options["folder"])
    drop_cached_pages(folder)
    slow = read_bytes_per_s is not None
    if not slow:
        drop_cached_pages(Path(sysconfig.get_path("platlib")) / "torch/lib")
    with (
        tempfile.TemporaryFile("w+") as errors,
        tempfile.TemporaryDirectory() as cache,
        Cgroup.create(cap_bytes, read_from=folder) as group,
    ):
        group.limit_reads(read_bytes_per_s)
        if slow and "reads" in group.missing:
            print(f"the {side} child paces its own reads instead", flush=True)
            options = {**options, "paced_bytes_per_s": read_bytes_per_s}
        environment = {"LEMA_CACHE": cache} if slow else {}
        made = Worker(side, options, group, errors, environment, timeout_s)
        try:
            made.wait_until_ready()
            yield made
        finally:
            made.close()


def measure_machine(model: str, threads: int | None = None) -> None:
    """Let lema measure this machine anew with a model's file, and show the figures: its plans start from them."""
    options = [f"model_name_or_path={model}", *([f"num_threads={threads}"] if threads else [])]
    command = [sys.executable, "-m", "lema", "task=doctor", *options]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False, env=os.environ | ENVIRONMENT["lema"])
    _, found, rest = done.stdout.partition("Flight check")
    if not found:
        raise SystemExit(f"{' '.join(command)} ended with {done.returncode} and shows no flight check")
    print(f"flight check{rest.split(chr(10) * 2)[0]}", flush=True)


def drop_cached_pages(folder: Path) -> None:
    """Forget the page cache of every file of a folder; pages that a process has mapped stay."""
    for path in folder.iterdir():
        if path.is_file():
            file = os.open(path, os.O_RDONLY)
            os.fsync(file)
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(file)
