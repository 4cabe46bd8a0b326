"""metrics.jsonl of a run: one JSON object per optimizer step, whole lines only, one line per step across resumes."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from lema_core.errors import ConfigError, DataError
from lema_core.files import replacing
from lema_train.checkpoint import find_checkpoints

METRICS_FILE = "metrics.jsonl"


def refuse_earlier_run(output_dir: str | Path, resume: str) -> None:
    """Raise ConfigError when ``output_dir`` holds an earlier run's checkpoints and this run would start among them."""
    if resume != "none":
        return
    earlier = find_checkpoints(Path(output_dir))
    if earlier:
        steps = ", ".join(str(step) for step, _ in earlier)
        raise ConfigError(
            f"output_dir: {Path(output_dir).absolute()} holds checkpoints of an earlier run (steps {steps}); "
            "go on from there with resume=auto, or give another output_dir"
        )


def read_steps(output_dir: str | Path, after: int = 0) -> Iterator[dict[str, Any]]:
    """What metrics.jsonl says of the steps after step ``after``."""
    with (Path(output_dir) / METRICS_FILE).open(encoding="utf-8") as file:
        for line in file:
            metrics = json.loads(line)
            if metrics["step"] > after:
                yield metrics


def finite_or_null(values: Mapping[str, Any]) -> dict[str, Any]:
    """``values`` for a JSON file: JSON has no NaN and no infinity, so they become null."""
    return {
        key: None if isinstance(value, float) and not math.isfinite(value) else value for key, value in values.items()
    }


class MetricsWriter:
    """Appends to ``output_dir/metrics.jsonl``; a line is in the file as soon as :meth:`write` returns.

    ``start_step`` is the step the run goes on from: later lines, which the interrupted run wrote after its last
    checkpoint, and a line that a crash cut are dropped. A fresh run (0) sets an earlier file aside under a number.
    ``say`` is told of both. Raises DataError naming the line of a file that is not metrics.
    """

    def __init__(
        self, output_dir: str | Path, start_step: int = 0, say: Callable[[str], None] = lambda text: None
    ) -> None:
        self.path = Path(output_dir).absolute() / METRICS_FILE
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if self.path.exists():
            if start_step == 0:
                self._set_aside(say)
            else:
                self._drop_after(start_step, say)
        self._file = self.path.open("a", encoding="utf-8", buffering=1)

    def write(self, metrics: Mapping[str, Any]) -> None:
        """Append one step; see :func:`finite_or_null`."""
        self._file.write(json.dumps(finite_or_null(metrics), allow_nan=False) + "\n")

    def close(self) -> None:
        self._file.close()

    def _set_aside(self, say: Callable[[str], None]) -> None:
        number = 1
        while (aside := self.path.with_name(f"metrics.{number}.jsonl")).exists():
            number += 1
        self.path.rename(aside)
        say(f"{self.path.name} of an earlier run is kept as {aside}")

    def _drop_after(self, start_step: int, say: Callable[[str], None]) -> None:
        lines = self.path.read_text(encoding="utf-8").splitlines(keepends=True)
        kept: list[str] = []
        for number, line in enumerate(lines, start=1):
            try:
                step = json.loads(line)["step"]
            except (json.JSONDecodeError, KeyError, TypeError):
                if not line.endswith("\n"):  # the last one, cut by a crash
                    break
                raise DataError(f"{self.path}:{number}: not a line of metrics; move the file away to go on") from None
            if step <= start_step:
                kept.append(line if line.endswith("\n") else line + "\n")
        if kept != lines:
            with replacing(self.path) as partial, partial.open("w", encoding="utf-8") as file:
                file.writelines(kept)
                file.flush()
                os.fsync(file.fileno())
        dropped = len(lines) - len(kept)
        if dropped:
            say(f"{self.path.name}: {dropped} line(s) after step {start_step} dropped, to be redone")
