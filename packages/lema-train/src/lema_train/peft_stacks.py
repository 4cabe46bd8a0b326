"""LoRA on experts and routers as PEFT's files have it, through ``target_parameters``.

transformers holds a layer's experts in stacked parameters [E, out, in], and PEFT 0.21 puts one LoRA on such a stack:
``lora_A`` [E r, in] expert after expert, ``lora_B`` [out, r E] with the experts side by side for each rank. Of two
stacks of one module the later one is wrapped around the earlier, whose keys then have ``base_layer`` in them.
``all-linear`` gives the stack of gate and up twice the rank, as they were two linears once.

Shapes: E experts, r rank.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lema_core.adapter import TensorSpec

#: of the stacks of one module, in the order in which PEFT wraps them
_WRAPPED = ("gate_up_proj", "down_proj")


def is_parameter(spec: TensorSpec) -> bool:
    """Whether PEFT reaches this linear through ``target_parameters``."""
    return spec.expert is not None or spec.role == "router"


def parameter_name(spec: TensorSpec) -> str:
    """What transformers calls it: ``model.layers.3.mlp.experts.gate_up_proj``, ``model.layers.3.mlp.gate.weight``."""
    return spec.name if spec.expert is None else spec.stack


def stacks_of(specs: Iterable[TensorSpec]) -> dict[str, list[TensorSpec]]:
    """Experts' linears by their stack, in the order of experts."""
    stacks: dict[str, list[TensorSpec]] = {}
    for spec in specs:
        if spec.expert is not None:
            stacks.setdefault(spec.stack, []).append(spec)
    return stacks


def stack_keys(stacks: Iterable[str]) -> dict[str, str]:
    """The module path that each stack's LoRA has in a file."""
    stacks = set(stacks)
    keys = {}
    for stack in stacks:
        module, _, name = stack.rpartition(".")
        later = [other for other in _WRAPPED[_WRAPPED.index(name) + 1 :] if f"{module}.{other}" in stacks]
        keys[stack] = module + ".base_layer" * len(later)
    return keys


def targeted(config: Mapping[str, Any], spec: TensorSpec) -> bool:
    """Whether ``target_parameters`` names the parameter, by its path or the end of it at a dot."""
    name = parameter_name(spec)
    return any(name == target or name.endswith(f".{target}") for target in config.get("target_parameters") or ())


def compact_parameters(modules: Sequence[TensorSpec], linears: Sequence[TensorSpec]) -> list[str]:
    """``target_parameters`` that name exactly those of ``modules``: by their names below a layer, where that is
    exact."""
    chosen = {parameter_name(spec) for spec in modules if is_parameter(spec)}
    names = {parameter_name(spec): spec.layer for spec in linears if is_parameter(spec)}
    ends = {name.partition(f".{names[name]}.")[2] for name in chosen}
    if {name for name in names if any(name.endswith(f".{end}") for end in ends)} == chosen:
        return sorted(ends)
    return sorted(chosen)


def stacked(pairs: Sequence[tuple[Tensor, Tensor]], part: int) -> Tensor:
    """``lora_A`` (part 0) or ``lora_B`` of a stack, from the experts' own; of one pair, its own."""
    tensors = [pair[part] for pair in pairs]
    if len(tensors) == 1:
        return tensors[0]
    return torch.cat(tensors) if part == 0 else torch.stack(tensors, dim=-1).flatten(1)


def unstacked(tensor: Tensor, part: int, number: int, n_experts: int) -> Tensor:
    """One expert's ``lora_A`` (part 0) or ``lora_B`` of its stack's."""
    if part == 0:
        return tensor.unflatten(0, (n_experts, -1))[number]
    return tensor.unflatten(1, (-1, n_experts))[:, :, number]
