"""The kernels of this package."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from lema_core.hookspecs import hookimpl
from lema_core.records import Kernel
from lema_cuda.library import library_refusals, refusals


def _unsupported(request: Any) -> list[str]:
    return refusals()


def _unsupported_on_any_cpu(request: Any) -> list[str]:
    return library_refusals()


@hookimpl
def lema_kernels() -> Iterable[Kernel]:
    yield Kernel("cpp", "linear", "cpu", "lema_cuda.linear:NativeLinear", priority=10, unsupported=_unsupported)
    elementwise = "lema_cuda.elementwise:NativeElementwise"
    yield Kernel("cpp", "elementwise", "cpu", elementwise, priority=10, unsupported=_unsupported)
    yield Kernel("cpp", "attention", "cpu", "lema_cuda.attention:NativeAttention", priority=10, unsupported=_unsupported)
    yield Kernel("cpp", "adamw", "cpu", "lema_cuda.elementwise:NativeAdamW", priority=10, unsupported=_unsupported)
    yield Kernel("cpp", "read", "*", "lema_cuda.read:NativeReads", priority=10, unsupported=_unsupported_on_any_cpu)
    yield Kernel("cpp", "widen", "*", "lema_cuda.widen:NativeWiden", priority=10, unsupported=_unsupported)
