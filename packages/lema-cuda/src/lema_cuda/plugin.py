"""The kernels of this package."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from lema_core.hookspecs import hookimpl
from lema_core.records import Kernel
from lema_cuda.library import cuda_refusals, device_refusals, instructions, library_refusals, refusals


def _unsupported(request: Any) -> list[str]:
    return refusals()


def _unsupported_on_any_cpu(request: Any) -> list[str]:
    return library_refusals()


def _unsupported_without_cuda(request: Any) -> list[str]:
    return cuda_refusals()


def _unsupported_on_the_device(request: Any) -> list[str]:
    """Of the device that torch computes on; of the first where torch has none."""
    # Imported here: --help and a mistyped option do not wait for torch.
    import torch

    return device_refusals(torch.cuda.current_device() if torch.cuda.is_available() else 0)


_ON_THE_CPU = {
    "linear": "lema_cuda.linear:NativeLinear",
    "elementwise": "lema_cuda.elementwise:NativeElementwise",
    "attention": "lema_cuda.attention:NativeAttention",
    "adamw": "lema_cuda.elementwise:NativeAdamW",
    "quantize": "lema_cuda.quantize:NativeQuantize",
}


@hookimpl
def lema_kernels() -> Iterable[Kernel]:
    for op, impl in _ON_THE_CPU.items():
        variant = instructions if op in ("linear", "attention") else None
        yield Kernel("cpp", op, "cpu", impl, priority=10, unsupported=_unsupported, variant=variant)
    yield Kernel("cpp", "read", "*", "lema_cuda.read:NativeReads", priority=10, unsupported=_unsupported_on_any_cpu)
    yield Kernel("cpp", "widen", "*", "lema_cuda.widen:NativeWiden", priority=10, unsupported=_unsupported)
    yield Kernel(
        "cpp", "copy", "cuda", "lema_cuda.copy:NativeCopies", priority=10, unsupported=_unsupported_without_cuda
    )
    device_linear = "lema_cuda.device_linear:DeviceLinear"
    yield Kernel("cpp", "linear", "cuda", device_linear, priority=10, unsupported=_unsupported_on_the_device)
