"""Modules without memory: what a checkpoint will bring is on the meta device, what it will not bring is computed."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import (
    register_module_buffer_registration_hook,
    register_module_parameter_registration_hook,
)
from torch.nn.parameter import is_lazy
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakIdKeyDictionary

from lema_core.low_memory.tensors import alike, module_tensors, storage_id

_VALUES = """normal_ uniform_ random_ bernoulli_ exponential_ geometric_ log_normal_ cauchy_ erfinv_ fill_ zero_ clamp_
    masked_fill_ tril_ triu_ add_ sub_ mul_ div_"""
#: what changes the values of its first argument and nothing else
_SETS_VALUES: frozenset[Any] = frozenset(
    [getattr(Tensor, name) for name in _VALUES.split()]
    + [function for name, function in vars(nn.init).items() if name.endswith("_") and not name.startswith("_")]
)


class _NoValues(TorchFunctionMode):
    """Initializing what has no memory is left out: many such functions would first load torch's compiler, which takes
    75 MB and seconds."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _SETS_VALUES:
            target = args[0] if args else kwargs.get("tensor")
            if isinstance(target, Tensor) and target.is_meta:
                return target
        return func(*args, **kwargs)


_here = threading.local()


def inside_empty_model() -> bool:
    """Whether the calling thread is in a ``with empty_model()``."""
    return getattr(_here, "depth", 0) > 0


@contextmanager
def empty_model() -> Iterator[None]:
    """Modules built inside have their parameters and persistent buffers on the meta device.

    Everything else is as without it: non-persistent buffers, which no checkpoint has, and plain attributes keep the
    values that ``__init__`` computed. A parameter goes to meta when it is registered, so that initializing it costs
    nothing and at most one is in memory; persistent buffers go there at the end, since others may be computed from
    them. Tied tensors stay tied. Modules built in other threads meanwhile are left alone.

    A non-persistent buffer that is computed from a *parameter* is on meta after all; loading says so. What parameters
    on meta would have taken from torch's random generator is not taken, so later random numbers differ.
    """
    thread = threading.get_ident()
    built: dict[int, weakref.ref[nn.Module]] = {}
    moved = WeakIdKeyDictionary()

    def to_meta(module: nn.Module, name: str, parameter: Tensor | None) -> Tensor | None:
        if threading.get_ident() != thread or parameter is None:
            return None
        built[id(module)] = weakref.ref(module)
        if parameter.is_meta or is_lazy(parameter):  # a lazy one has no memory yet
            return None
        if parameter not in moved:
            moved[parameter] = alike(parameter, parameter.detach().to("meta"))
        return moved[parameter]

    def note(module: nn.Module, name: str, buffer: Tensor | None) -> None:
        if threading.get_ident() == thread:
            built[id(module)] = weakref.ref(module)

    handles = [register_module_parameter_registration_hook(to_meta), register_module_buffer_registration_hook(note)]
    _here.depth = getattr(_here, "depth", 0) + 1
    try:
        with _NoValues():
            yield
    finally:
        _here.depth -= 1
        for handle in handles:
            handle.remove()
    _empty([module for reference in built.values() if (module := reference()) is not None])


def _empty(modules: list[nn.Module]) -> None:
    """Move what the checkpoint will bring to meta; tensors that are one, or share memory, still do there."""
    moved: dict[int, Tensor] = {}
    storages: dict[int, torch.UntypedStorage] = {}
    for module in modules:
        for name, tensor in module_tensors(module).items():
            if tensor is None or tensor.is_meta or is_lazy(tensor) or name in module._non_persistent_buffers_set:
                continue
            if id(tensor) not in moved:
                key = storage_id(tensor)
                if key not in storages:
                    storages[key] = torch.UntypedStorage(tensor.untyped_storage().nbytes(), device="meta")
                data = torch.empty(0, dtype=tensor.dtype, device="meta")
                data.set_(storages[key], tensor.storage_offset(), tensor.shape, tensor.stride())
                moved[id(tensor)] = alike(tensor, data)
    for module in modules:
        for name, tensor in module_tensors(module).items():
            if id(tensor) in moved:
                setattr(module, name, moved[id(tensor)])
