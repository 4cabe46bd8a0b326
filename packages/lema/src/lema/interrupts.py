"""Ctrl-C and SIGTERM during a run: the first finishes the step and saves, the second stops at once."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType

from lema_core.errors import LemaError


class Interrupted(LemaError):
    """The run was asked to stop and did, with a checkpoint; ``exit_code`` is 128 + the signal's number."""

    def __init__(self, message: str, signal_number: int) -> None:
        super().__init__(message)
        self.exit_code = 128 + signal_number


class Terminated(KeyboardInterrupt):
    """A second signal: stop now, leave the last checkpoint as it is."""


class StopRequest:
    """Catches SIGINT and SIGTERM while entered; does nothing outside the main thread, which alone gets signals."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._signal: int | None = None
        self._previous: dict[int, object] = {}

    def requested(self) -> bool:
        return self._signal is not None

    def raise_if_stopped(self, stopped: bool, checkpoint: Path | None) -> None:
        """Raise Interrupted when the run ended early because of a signal."""
        if stopped and self._signal is not None:
            raise Interrupted(
                f"stopped by {signal.Signals(self._signal).name}; the run is saved in {checkpoint}; "
                "go on with resume=auto",
                self._signal,
            )

    def _caught(self, number: int, frame: FrameType | None) -> None:
        if self._signal is not None:
            raise Terminated
        self._signal = number
        self._say("stopping after this step; once more stops at once and keeps the last checkpoint")

    def __enter__(self) -> StopRequest:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._previous[number] = signal.signal(number, self._caught)
        return self

    def __exit__(self, *exc_info: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
