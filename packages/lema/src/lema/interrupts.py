"""Ctrl-C and SIGTERM: training finishes the step and saves, everything else stops at once; a second signal always does.

Exit codes are 128 + the signal's number, as a shell gives them: 130 and 143.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType

from lema_core.errors import LemaError

_STDERR = 2
_STOPPING = b"lema: stopping after this step; once more stops at once and keeps the last checkpoint\n"


class Interrupted(LemaError):
    """The task was asked to stop and did; ``exit_code`` is 128 + the signal's number."""

    def __init__(self, message: str, signal_number: int) -> None:
        super().__init__(message)
        self.exit_code = 128 + signal_number


class _StopNow(KeyboardInterrupt):
    """Raised by the handler wherever the program is; as no Exception, only StopRequest catches it."""


class StopRequest:
    """Catches SIGINT and SIGTERM while entered; does nothing outside the main thread, which alone gets signals.

    A signal raises :class:`Interrupted` from the ``with`` block at once; ``remains`` is what its message says about
    what is left behind. The first signal inside :meth:`finishing_steps` is only noted.
    """

    def __init__(self, remains: str = "") -> None:
        self._remains = remains
        self._signal: int | None = None
        self._count = 0
        self._finishing = False
        self._previous: dict[int, object] = {}

    def requested(self) -> bool:
        return self._signal is not None

    def raise_if_requested(self, outcome: str) -> None:
        """Raise Interrupted, with ``outcome`` in its message, after a signal that was noted."""
        if self._signal is not None:
            raise self._interrupted(outcome)

    @contextmanager
    def finishing_steps(self) -> Iterator[None]:
        """The first signal in this block makes :meth:`requested` true and nothing else; the second stops at once."""
        self._finishing = True
        try:
            yield
        finally:
            self._finishing = False

    def unless_stopped(self, work: Callable[[], None]) -> None:
        """Run ``work``. The first signal ends it, at once, and nothing else; after a signal it is not begun."""
        finishing = self._finishing
        try:
            self._finishing = False
            if not self.requested():
                work()
        except _StopNow:
            if self._count > 1:
                raise
        finally:
            self._finishing = finishing

    def _caught(self, number: int, frame: FrameType | None) -> None:
        self._signal = self._signal or number
        self._count += 1
        if self._count == 1 and self._finishing:
            # Past Python's buffers, which the interrupted code may be writing to; the stop does not depend on a reader.
            with suppress(OSError):
                os.write(_STDERR, _STOPPING)
            return
        raise _StopNow

    def _interrupted(self, outcome: str) -> Interrupted:
        words = [f"stopped by {signal.Signals(self._signal).name}", outcome]
        return Interrupted("; ".join(word for word in words if word), self._signal)

    def __enter__(self) -> StopRequest:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._previous[number] = signal.signal(number, self._caught)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        if isinstance(error, _StopNow):
            raise self._interrupted(self._remains) from error
