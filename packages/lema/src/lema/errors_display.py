"""What the user sees of an exception, and the exit code: one line on stderr, the traceback only under debug=true."""

from __future__ import annotations

import sys
import traceback
from typing import TextIO

from lema_core.errors import LemaError

EXIT_INTERRUPTED = 130
EXIT_INTERNAL = 1


def report(error: BaseException, debug: bool, out: TextIO | None = None) -> int:
    """Write ``error`` to ``out`` (stderr); return the exit code: a LemaError's own, 130 for Ctrl-C, 1 for a defect."""
    out = out or sys.stderr
    if debug:
        traceback.print_exception(error, file=out)
    if isinstance(error, LemaError):
        print(f"lema: error: {_one_line(error)}", file=out)
        return error.exit_code
    if isinstance(error, KeyboardInterrupt):
        print("lema: interrupted", file=out)
        return EXIT_INTERRUPTED
    hint = "" if debug else "; debug=true shows where"
    print(f"lema: error: {type(error).__name__}: {_one_line(error)}{hint}", file=out)
    return EXIT_INTERNAL


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())
