"""AdapterSuite for models with experts: LoRA on stacked parameters as PEFT lays it out.

PEFT puts LoRA on a stacked parameter [E, out, in] through ``target_parameters``: one ``lora_A`` [E r, in], expert after
expert, and one ``lora_B`` [out, r E] whose columns are grouped by rank. Of two parameters of one module, the second is
wrapped around the first. Shapes: E experts, r rank.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from lema_core.adapter import ModelAdapter, TensorSpec
from lema_core.ops.low_rank import LowRankUpdate
from lema_core.testing.adapter_case import Pair
from lema_core.testing.adapter_suite import AdapterSuite


class ExpertAdapterSuite(AdapterSuite):
    """``experts``: the module that holds stacked ``gate_up_proj`` and ``down_proj``, ``router`` the one that picks."""

    experts: ClassVar[str] = "mlp.experts"
    router: ClassVar[str] = "mlp.gate"

    def linear_names(self, model: Any) -> set[str]:
        names = super().linear_names(model)
        for name, module in model.named_modules():
            if name.endswith(f".{self.experts}"):
                numbers = range(len(module.down_proj))
                names |= {f"{name}.{number}.{part}" for number in numbers for part in ("gate_up_proj", "down_proj")}
            if name.endswith(f".{self.router}"):
                names.add(name)
        return names

    def lora(self, adapter: ModelAdapter, dropout: float = 0.0, seed: int = 1) -> dict[str, LowRankUpdate]:
        """Without dropout on what PEFT cannot put it on."""
        stacked = {spec.module for spec in adapter.linear_modules() if spec.expert is not None}
        return {
            module: replace(update, dropout=0.0) if module in stacked else update
            for module, update in super().lora(adapter, dropout, seed).items()
        }

    def peft_config(self, adapter: ModelAdapter) -> dict[str, Any]:
        config = super().peft_config(adapter)
        plain = [spec.module for spec in adapter.linear_modules() if spec.expert is None and spec.role != "router"]
        stacked = [f"{self.experts}.gate_up_proj", f"{self.experts}.down_proj", f"{self.router}.weight"]
        return config | {"target_modules": plain, "target_parameters": stacked}

    def to_peft(self, adapter: ModelAdapter, pairs: Mapping[str, Pair]) -> dict[str, Tensor]:
        specs = [spec for spec in adapter.linear_modules() if spec.module in pairs]
        plain = {spec.module: pairs[spec.module] for spec in specs if spec.expert is None}
        found = super().to_peft(adapter, plain)
        for stack, members in _stacks(specs).items():
            lora_A = torch.cat([pairs[spec.module][0] for spec in members])
            lora_B = torch.stack([pairs[spec.module][1] for spec in members], dim=-1).flatten(1)
            found[f"{_key(stack)}.lora_A.weight"], found[f"{_key(stack)}.lora_B.weight"] = lora_A, lora_B
        return found

    def from_peft(self, adapter: ModelAdapter, tensors: Mapping[str, Tensor]) -> dict[str, Pair]:
        found = super().from_peft(adapter, tensors)
        for stack, members in _stacks(list(adapter.linear_modules())).items():
            lora_A, lora_B = tensors[f"{_key(stack)}.lora_A.weight"], tensors[f"{_key(stack)}.lora_B.weight"]
            parts_A = lora_A.unflatten(0, (len(members), -1))
            parts_B = lora_B.unflatten(1, (-1, len(members)))
            for number, spec in enumerate(members):
                found[spec.module] = parts_A[number], parts_B[..., number]
        return found

    def weight_gradients(self, adapter: ModelAdapter, model: Any) -> dict[str, Tensor]:
        found = super().weight_gradients(adapter, model)
        for spec in adapter.tensors():
            if spec.role == "expert":
                stack, _, name = spec.stack.rpartition(".")
                gate, up = found[f"{stack}.gate_up_proj"][spec.expert].chunk(2)
                down = found[f"{stack}.down_proj"][spec.expert]
                found[spec.name] = {"gate_proj": gate, "up_proj": up, "down_proj": down}[name]
        return {spec.name: found[spec.name] for spec in adapter.tensors() if spec.name in found}


def _stacks(specs: list[TensorSpec]) -> dict[str, list[TensorSpec]]:
    stacks: dict[str, list[TensorSpec]] = {}
    for spec in specs:
        if spec.expert is not None:
            stacks.setdefault(spec.stack, []).append(spec)
    return stacks


def _key(stack: str) -> str:
    module, _, parameter = stack.rpartition(".")
    return f"base_model.model.{module}" + (".base_layer" if parameter == "gate_up_proj" else "")
