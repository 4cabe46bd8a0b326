"""Which kernels a run computes with.

Every operation has a plain-torch kernel, named ``torch``; ``cpp`` is what compiled packages register.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Any

import torch

from lema_core.copies import Copies
from lema_core.errors import ConfigError, PluginError
from lema_core.ops.adamw import AdamWEither, AdamWKernel, TorchAdamW
from lema_core.ops.attention import AttentionKernel, TorchAttention
from lema_core.ops.elementwise import ElementwiseKernel, TorchElementwise
from lema_core.ops.linear import LinearKernel
from lema_core.ops.widen import TorchWiden, Widen
from lema_core.plugins import PluginManager, get_plugin_manager
from lema_core.records import Kernel, load_object
from lema_core.store.reads import PythonReads, Reads

#: values of the option ``backend``, and the kernels they stand for
_NAMES = {"auto": "auto", "cpp": "cpp", "python": "torch"}


@dataclass(frozen=True)
class Kernels:
    """What serves each operation; by default plain torch and Python."""

    linear: LinearKernel = field(default_factory=LinearKernel)
    elementwise: ElementwiseKernel = field(default_factory=TorchElementwise)
    attention: AttentionKernel = field(default_factory=TorchAttention)
    adamw: AdamWKernel = field(default_factory=TorchAdamW)
    read: Reads = field(default_factory=PythonReads)
    widen: Widen = field(default_factory=TorchWiden)


def choose_kernel(op: str, backend: str, device_type: str, plugins: PluginManager | None = None) -> Kernel:
    """The record of the kernel that serves ``op``. ``backend``: ``auto`` takes the best there is, ``cpp`` a native one,
    ``python`` plain torch.

    An operation of which no ``cpp`` kernel is registered is computed by plain torch under ``cpp`` too. Raises
    ConfigError where ``cpp`` is asked for and is not installed, or has a kernel that cannot serve here.
    """
    plugins = plugins or get_plugin_manager()
    name = _NAMES[backend]
    if name == "cpp":
        native_ops = {kernel.op for kernel in plugins.kernels() if kernel.name == "cpp"}
        if not native_ops:
            raise ConfigError("backend: 'cpp' is not installed, packages/lema-cuda brings it; or use backend=auto")
        if op not in native_ops:
            name = "torch"
    try:
        return plugins.choose_kernel(op, None, device_type, name)[0]
    except PluginError as error:
        if backend == "auto":
            raise
        raise ConfigError(f"backend: {backend!r} cannot serve here: {error}; use backend=auto") from error


def choose_kernels(
    backend: str, device_type: str, plugins: PluginManager | None = None, weights_compute: str = "auto"
) -> Kernels:
    """Every kernel of a run, made; ``linear`` with ``weights_compute`` where that is ``w8a8``. Raises as
    :func:`choose_kernel` does."""

    def make(op: str, where: str = device_type) -> Any:
        impl = load_object(choose_kernel(op, backend, where, plugins).impl)
        return impl(weights_compute=weights_compute) if op == "linear" and weights_compute == "w8a8" else impl()

    made = {each.name: make(each.name) for each in fields(Kernels)}
    if device_type != "cpu" and type(in_ram := make("adamw", "cpu")) is not type(made["adamw"]):
        made["adamw"] = AdamWEither(in_ram, made["adamw"])
    return Kernels(**made)


def choose_copies(backend: str, plugins: PluginManager | None = None) -> Callable[[torch.device], Copies]:
    """What makes the ``copy`` kernel of a CUDA device; it is chosen when one is opened, and raises then as
    :func:`choose_kernel` does."""
    return lambda device: load_object(choose_kernel("copy", backend, "cuda", plugins).impl)(device)
