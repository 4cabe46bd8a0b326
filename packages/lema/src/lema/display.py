"""What a run shows: a live line on a terminal, one line per step when piped, and the summary at the end."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from lema_core.memory import format_bytes, rss_bytes

if TYPE_CHECKING:
    from rich.progress import Progress


class TrainingDisplay:
    """Shows the steps of a training run on ``out`` (stdout).

    :meth:`start` once, :meth:`step` after each optimizer step, :meth:`stop` at the end, also after an error. The line
    is drawn only when a step is done: no thread runs beside the training.
    """

    def __init__(self, out: TextIO | None = None) -> None:
        self._out = out or sys.stdout
        self._progress: Progress | None = None
        self._total_steps = self._steps_done = 0
        self._seconds = self._waited_s = 0.0
        self._budgets: dict[str, int] = {}

    def start(self, total_steps: int, start_step: int, budgets: Mapping[str, int]) -> None:
        """``start_step`` steps were done by earlier runs. ``budgets``: bytes of ``device`` and ``ram``, if limited."""
        self._total_steps, self._budgets = total_steps, dict(budgets)
        if self._out.isatty():
            self._progress = _live_line(self._out)
            self._progress.add_task("training", total=total_steps, completed=start_step, about="")
            self._progress.start()

    def step(self, metrics: Mapping[str, Any]) -> None:
        """Show one finished step; ``metrics`` as metrics.jsonl has them."""
        self._steps_done += 1
        self._seconds += metrics["step_s"]
        self._waited_s += metrics["wait_s"]
        if self._progress is None:
            print(f"step {metrics['step']}/{self._total_steps}  {self._describe(metrics)}", file=self._out, flush=True)
        else:
            self._progress.update(self._progress.task_ids[0], completed=metrics["step"], about=self._describe(metrics))
            self._progress.refresh()

    def message(self, text: str) -> None:
        """A line of its own, above the live line."""
        if self._progress is None:
            print(text, file=self._out, flush=True)
        else:
            self._progress.console.print(text, markup=False, highlight=False)

    def stop(self) -> None:
        """Leave the terminal as it was, the last line included."""
        if self._progress is not None:
            self._progress.stop()
            self._progress = None

    def _describe(self, metrics: Mapping[str, Any]) -> str:
        rate = metrics["tokens"] / metrics["step_s"] if metrics["step_s"] else 0.0
        left_s = self._seconds / self._steps_done * (self._total_steps - metrics["step"])
        parts = [
            f"loss {_number(metrics['loss'], '.4f')}",
            f"lr {metrics['lr']:.3g}",
            f"{rate:.0f} tok/s",
            f"eta {_clock(left_s)}",
            *(self._memory(tier, metrics.get(f"{tier}_peak_bytes")) for tier in ("device", "ram")),
            f"process {format_bytes(metrics['rss_peak_bytes'])}",
            f"waited {self._waited_s:.2f} s",
        ]
        return "  ".join(part for part in parts if part)

    def _memory(self, tier: str, used_bytes: int | None) -> str:
        if not used_bytes:
            return ""
        budget = self._budgets.get(tier)
        return f"{tier} {format_bytes(used_bytes)}" + (f" of {format_bytes(budget)}" if budget else "")


@contextmanager
def byte_progress(about: str, total_bytes: int | None, out: TextIO) -> Iterator[Callable[[int], None]]:
    """Shows how far a long transfer has come, when it will be through and what the process takes: a live line on a
    terminal, else one line when it begins.

    Yields what takes the bytes done since the last call; it may be called from any thread.
    """
    if not out.isatty():
        print(f"lema: {about}" + (f", {format_bytes(total_bytes)}" if total_bytes else ""), file=out, flush=True)
        yield lambda n_bytes: None
        return
    from rich.console import Console
    from rich.markup import escape
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        Progress,
        ProgressColumn,
        Task,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )
    from rich.text import Text

    class ProcessMemory(ProgressColumn):
        def render(self, task: Task) -> Text:
            return Text(f"process {format_bytes(rss_bytes())}")

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
        ProcessMemory(),
    )
    with Progress(*columns, console=Console(file=out)) as progress:
        task = progress.add_task(escape(about), total=total_bytes)
        yield lambda n_bytes: progress.advance(task, n_bytes)


def _live_line(out: TextIO) -> Progress:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
    from rich.table import Column

    about = TextColumn("{task.fields[about]}", markup=False, table_column=Column(no_wrap=True, overflow="ellipsis"))
    return Progress(MofNCompleteColumn(), BarColumn(bar_width=12), about, console=Console(file=out), auto_refresh=False)


def _number(value: float | None, spec: str) -> str:
    return "-" if value is None else format(value, spec)


def _clock(seconds: float) -> str:
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02}:{second:02}" if hours else f"{minute}:{second:02}"


def print_summary(summary: Mapping[str, Any], out: TextIO) -> None:
    """The result of a task, one ``name  value`` per line, paths absolute. ``text``, what was generated, comes first."""
    rows = {name: _shown(name, value) for name, value in _flat(summary) if name != "text" and value is not None}
    if "text" in summary:
        print(summary["text"], file=out)
    width = max(map(len, rows), default=0)
    for name, value in rows.items():
        print(f"{name:<{width}}  {value}", file=out)


def _flat(summary: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """``prediction`` and the like become ``prediction.step_s`` ...; an example's texts stay together."""
    for name, value in summary.items():
        if isinstance(value, Mapping) and name != "example":
            yield from ((f"{name}.{part}", figure) for part, figure in value.items())
        else:
            yield name, value


def _shown(name: str, value: Any) -> str:
    if isinstance(value, Path):
        return str(value.absolute())
    if name.endswith("_bytes") and isinstance(value, int):
        return format_bytes(value)
    if isinstance(value, float):
        return f"{value:.6g}" + (" s" if name.endswith("_s") else "")
    return str(value)
