"""Finds out, from PyTorch itself, which tensor of a state dict goes where in a module."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from lema_core.low_memory.tensors import module_tensors


@dataclass
class Target:
    """One parameter or buffer (``before`` None: a name that held nothing), every place that holds it, and the state
    dict's tensor that it is to get (``value`` None: it has none)."""

    name: str
    before: Tensor | None
    persistent: bool
    slots: list[tuple[nn.Module, str]] = field(default_factory=list)
    value: Tensor | None = None


class Before:
    """What a module held, to give it back or to compare with."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._tensors = {module: module_tensors(module) for module in model.modules()}
        self._extra = [
            (module, module.get_extra_state())
            for module in self._tensors
            if type(module).set_extra_state is not nn.Module.set_extra_state
        ]

    def restore(self) -> None:
        """Give the module its tensors back."""
        for module, tensors in self._tensors.items():
            for name, value in module_tensors(module).items():
                if name not in tensors:
                    delattr(module, name)
                elif value is not tensors[name]:
                    setattr(module, name, tensors[name])

    def restore_extra_state(self) -> None:
        """Give the modules that have extra state theirs back."""
        for module, state in self._extra:
            module.set_extra_state(state)

    def put(self, target: Target, tensor: Tensor, forget: bool = False) -> None:
        """``tensor`` into every place of ``target``; ``forget``: what was there is let go and not given back."""
        for module, name in target.slots:
            setattr(module, name, tensor)  # not into the dict: an LSTM keeps a second list of its weights
            if forget:
                self._tensors[module][name] = tensor
        if forget:
            target.before = None

    def targets(self) -> list[Target]:
        """What was in the module, beside what is. Of several values for one tensor the last to be copied counts; in the
        order of these copies, which matters where tensors share memory."""
        targets: dict[object, Target] = {}
        seen: set[tuple[nn.Module, str]] = set()
        for prefix, module in self._model.named_modules(remove_duplicate=False):
            for name, value in module_tensors(module).items():
                before = self._tensors[module].get(name)
                key = (module, name) if before is None else id(before)
                persistent = name not in module._non_persistent_buffers_set
                target = targets.setdefault(key, Target(f"{prefix}.{name}".lstrip("."), before, persistent))
                if (module, name) not in seen:
                    seen.add((module, name))
                    target.slots.append((module, name))
                if value is not before and value is not None:
                    target.value = value.detach()
                    targets[key] = targets.pop(key)
        return list(targets.values())


@contextmanager
def postponed_hooks(model: nn.Module) -> Iterator[tuple[bool, list[nn.Module]]]:
    """Hooks that follow a load are to see loaded data. Yields whether there are any, and the list of the modules whose
    turn it would have been, in that order."""
    finished: list[nn.Module] = []
    hooks = [(module, module._load_state_dict_post_hooks) for module in model.modules()]
    hooks = [(module, registered) for module, registered in hooks if registered]
    for module, _ in hooks:
        module._load_state_dict_post_hooks = OrderedDict({0: lambda module, report: finished.append(module)})
    try:
        yield bool(hooks), finished
    finally:
        for module, registered in hooks:
            module._load_state_dict_post_hooks = registered


@contextmanager
def assignable(model: nn.Module) -> Iterator[None]:
    """``assign=True`` refuses integers for a parameter that requires grad, where copying would cast, and with a switch
    of PyTorch's it swaps the contents of objects."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad and not is_lazy(parameter)]
    swap = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(False)
    try:
        for parameter in trained:
            parameter.requires_grad_(False)
        yield
    finally:
        for parameter in trained:
            parameter.requires_grad_(True)
        torch.__future__.set_swap_module_params_on_conversion(swap)


def report_text(model: nn.Module, keys: Any) -> str:
    """What PyTorch says of keys that do not fit."""
    found = {"Missing": keys.missing_keys, "Unexpected": keys.unexpected_keys}
    quoted = {what: ", ".join(f'"{name}"' for name in names) for what, names in found.items() if names}
    lines = [f"{what} key(s) in state_dict: {names}. " for what, names in quoted.items()]
    return "Error(s) in loading state_dict for {}:\n\t{}".format(type(model).__name__, "\n\t".join(lines))
