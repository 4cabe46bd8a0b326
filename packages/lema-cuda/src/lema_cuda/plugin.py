"""The kernels of this package."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from lema_core.hookspecs import hookimpl
from lema_core.records import Kernel
from lema_cuda.library import refusals


def _unsupported(request: Any) -> list[str]:
    return refusals()


@hookimpl
def lema_kernels() -> Iterable[Kernel]:
    yield Kernel("cpp", "linear", "cpu", "lema_cuda.linear:NativeLinear", priority=10, unsupported=_unsupported)
