"""Which kernel serves which operation under each backend."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import pytest
import torch

from lema_core import builtin
from lema_core.errors import ConfigError, PluginError
from lema_core.hookspecs import hookimpl
from lema_core.ops.adamw import AdamWRates, TorchAdamW
from lema_core.ops.attention import TorchAttention
from lema_core.ops.elementwise import TorchElementwise
from lema_core.ops.kernels import Kernels, choose_copies, choose_kernel, choose_kernels
from lema_core.ops.linear import LinearKernel
from lema_core.ops.widen import TorchWiden
from lema_core.plugins import PluginManager
from lema_core.records import Kernel
from lema_core.store.reads import PythonReads

OPS = ("linear", "elementwise", "attention", "adamw", "read", "widen")


class Native:
    """Native kernels for two operations; ``reasons`` why they cannot serve."""

    def __init__(self, *reasons: str) -> None:
        self.reasons = list(reasons)

    @hookimpl
    def lema_kernels(self) -> Iterable[Kernel]:
        for op in ("linear", "adamw"):
            yield Kernel("cpp", op, "cpu", "nowhere:Nothing", priority=10, unsupported=lambda request: self.reasons)


def plugins_with(*more: object) -> PluginManager:
    manager = PluginManager()
    manager.admit("lema-core", "core", lambda: builtin)
    for plugin in more:
        assert manager.admit("lema-native", "native", lambda plugin=plugin: plugin)
    return manager


@pytest.mark.parametrize("backend", ["auto", "python"])
def test_plain_torch_serves_every_operation_on_every_device(backend: str) -> None:
    plugins = plugins_with()
    for op in OPS:
        for device_type in ("cpu", "cuda", "mps"):
            assert choose_kernel(op, backend, device_type, plugins).name == "torch"
    chosen = choose_kernels(backend, "cuda", plugins)
    kinds = (LinearKernel, TorchElementwise, TorchAttention, TorchAdamW, PythonReads, TorchWiden)
    assert tuple(type(getattr(chosen, op)) for op in OPS) == kinds
    assert tuple(type(getattr(Kernels(), op)) for op in OPS) == kinds


class Counting(TorchAdamW):
    """A kernel of the CPU's."""

    updates = 0

    def update(self, param: torch.Tensor, *arguments: Any) -> None:
        assert param.device.type == "cpu"
        Counting.updates += 1


class CountingPlugin:
    @hookimpl
    def lema_kernels(self) -> Iterable[Kernel]:
        yield Kernel("cpp", "adamw", "cpu", f"{__name__}:Counting", priority=10, unsupported=lambda request: [])


def test_weights_in_ram_are_updated_by_the_cpus_kernel_beside_a_device() -> None:
    adamw = choose_kernels("auto", "cuda", plugins_with(CountingPlugin())).adamw
    rates = AdamWRates(1e-3, 0.9, 0.999, 1e-8, 0.0, 1)
    adamw.update(*(torch.zeros(4) for _ in range(4)), rates)
    assert Counting.updates == 1
    elsewhere = [torch.zeros(4, device="meta") for _ in range(4)]
    adamw.update(*elsewhere, rates)
    assert Counting.updates == 1


def test_native_kernels_where_there_are_some() -> None:
    plugins = plugins_with(Native())
    names = {op: choose_kernel(op, "cpp", "cpu", plugins).name for op in OPS}
    assert names == {op: "cpp" if op in ("linear", "adamw") else "torch" for op in OPS}
    assert {op: choose_kernel(op, "auto", "cpu", plugins).name for op in OPS} == names
    assert {choose_kernel(op, "python", "cpu", plugins).name for op in OPS} == {"torch"}


def test_native_kernels_asked_for_and_missing() -> None:
    with pytest.raises(ConfigError, match="'cpp' is not installed, packages/lema-cuda brings it"):
        choose_kernel("linear", "cpp", "cpu", plugins_with())
    for op in OPS:
        with pytest.raises(ConfigError, match="not installed"):
            choose_kernel(op, "cpp", "cpu", plugins_with())


def test_native_kernels_asked_for_that_cannot_serve() -> None:
    plugins = plugins_with(Native("no AVX2"))
    expected = re.escape("backend: 'cpp' cannot serve here: no kernel for linear on cpu: cpp: no AVX2")
    with pytest.raises(ConfigError, match=expected):
        choose_kernels("cpp", "cpu", plugins)
    with pytest.raises(ConfigError, match="cpp: for cpu only"):
        choose_kernel("linear", "cpp", "cuda", plugins_with(Native()))
    assert choose_kernel("linear", "auto", "cpu", plugins).name == "torch"


def test_what_copies_to_a_device_is_chosen_when_one_is_opened() -> None:
    class Copying:
        reasons = ["no driver"]

        @hookimpl
        def lema_kernels(self) -> Iterable[Kernel]:
            yield Kernel("cpp", "copy", "cuda", "builtins:repr", priority=10, unsupported=lambda request: self.reasons)

    plugin = Copying()
    make = choose_copies("cpp", plugins_with(plugin))
    with pytest.raises(
        ConfigError, match="backend: 'cpp' cannot serve here: no kernel for copy on cuda: cpp: no driver"
    ):
        make(torch.device("cuda:1"))
    plugin.reasons = []
    assert make(torch.device("cuda:1")) == repr(torch.device("cuda:1"))
    assert choose_kernel("copy", "python", "cuda", plugins_with(plugin)).impl == "lema_core.copies:TorchCopies"


def test_no_kernel_at_all() -> None:
    with pytest.raises(PluginError, match="no kernel for linear on cpu: none is installed"):
        choose_kernel("linear", "auto", "cpu", PluginManager())
