"""AdamW, and the states of any optimizer as named tensors.

AdamW is Loshchilov & Hutter 2019, "Decoupled Weight Decay Regularization" (arXiv:1711.05101), algorithm 2, rounding
as ``torch.optim.AdamW(foreach=False)`` does, but for the last place of its square roots, which depends on the CPU
there. It is not a ``torch.optim.Optimizer``: making one of those imports torch's compiler, 74 MB and 2 s. It has the
same surface (``param_groups``, ``state``, ``step``, ``zero_grad``, ``state_dict``, ``load_state_dict``) and the same
state (``step``, ``exp_avg``, ``exp_avg_sq``), so either continues from the other's files.

Files hold states by name: ``<parameter>.<key>`` for a tensor, ``<parameter>.<key>:int|float|bool`` for a number.
Hyperparameters are not stored: after a resume those of the new run count, in the bias correction too.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from lema_core.checkpoint.describe import shorten
from lema_core.errors import CheckpointError, ConfigError
from lema_core.ops.adamw import AdamWKernel, AdamWRates, TorchAdamW
from lema_core.training import Optimizer

_NUMBERS = {"int": torch.int64, "float": torch.float64, "bool": torch.bool}


class AdamW:
    """AdamW over fp32 ``params``, one at a time, by ``kernel`` (default: plain torch).

    With gradient g, moments m (``exp_avg``) and v (``exp_avg_sq``), step t, rate lr and decay w::

        m = b1 m + (1 - b1) g        v = b2 v + (1 - b2) g^2
        p = p (1 - lr w) - lr / (1 - b1^t) * m / (sqrt(v) / sqrt(1 - b2^t) + eps)

    All options live in ``param_groups[0]``; the trainer sets ``lr`` there before each step. A parameter without
    ``grad`` is left alone. Raises ConfigError for an option out of range.
    """

    def __init__(
        self,
        params: Iterable[Tensor],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        kernel: AdamWKernel | None = None,
    ) -> None:
        _check_range("learning_rate", lr, 0.0, math.inf)
        _check_range("adam_beta1", betas[0], 0.0, 1.0)
        _check_range("adam_beta2", betas[1], 0.0, 1.0)
        _check_range("adam_epsilon", eps, 0.0, math.inf)
        _check_range("weight_decay", weight_decay, 0.0, math.inf)
        group = {"params": list(params), "lr": lr, "betas": tuple(betas), "eps": eps, "weight_decay": weight_decay}
        self.param_groups: list[dict[str, Any]] = [group]
        self._kernel = kernel or TorchAdamW()
        # made now, not in the first step, so that memory is known before a run begins
        self.state: dict[Tensor, dict[str, Tensor]] = {
            param: {
                "step": torch.tensor(0.0, dtype=torch.float32),
                "exp_avg": torch.zeros_like(param, requires_grad=False),
                "exp_avg_sq": torch.zeros_like(param, requires_grad=False),
            }
            for param in group["params"]
        }

    @torch.no_grad()
    def step(self) -> None:
        """One update of every parameter that has a gradient."""
        for group in self.param_groups:
            lr, (beta1, beta2), eps, decay = group["lr"], group["betas"], group["eps"], group["weight_decay"]
            for param in group["params"]:
                grad = param.grad
                if grad is None:
                    continue
                state = self.state[param]
                exp_avg, exp_avg_sq = state["exp_avg"], state["exp_avg_sq"]
                state["step"] += 1
                rates = AdamWRates(lr, beta1, beta2, eps, decay, int(state["step"].item()))
                self._kernel.update(param, grad, exp_avg, exp_avg_sq, rates)

    def zero_grad(self, set_to_none: bool = True) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                if set_to_none:
                    param.grad = None
                elif param.grad is not None:
                    param.grad.zero_()

    def state_dict(self) -> dict[str, Any]:
        """As ``torch.optim.Optimizer.state_dict``: states by the parameter's number, holding the tensors themselves."""
        groups, state, number = [], {}, 0
        for group in self.param_groups:
            numbers = range(number, number + len(group["params"]))
            groups.append({**group, "params": list(numbers)})
            state.update({index: self.state[param] for index, param in zip(numbers, group["params"], strict=True)})
            number = numbers.stop
        return {"state": state, "param_groups": groups}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over the states of ``state_dict``, the tensors themselves where dtype and device allow, and its options.

        Raises CheckpointError for a missing state or another shape; then nothing has changed.
        """
        params = [param for group in self.param_groups for param in group["params"]]
        loaded = state_dict["state"]
        for index, param in enumerate(params):
            for key, own in self.state[param].items():
                value = loaded.get(index, {}).get(key)
                if not isinstance(value, Tensor):
                    found = "none" if value is None else f"a {type(value).__name__}"
                    raise CheckpointError(
                        f"optimizer state: {key!r} of parameter {index}: a tensor expected, {found} found"
                    )
                if tuple(value.shape) != tuple(own.shape):
                    raise CheckpointError(
                        f"optimizer state: {key!r} of parameter {index}: "
                        f"shape {list(own.shape)} expected, {list(value.shape)} found"
                    )
            if unknown := sorted(set(loaded[index]) - set(self.state[param])):
                raise CheckpointError(f"optimizer state: parameter {index} has {', '.join(unknown)}, which AdamW lacks")
        for index, param in enumerate(params):
            for key, own in self.state[param].items():
                self.state[param][key] = loaded[index][key].to(device=own.device, dtype=own.dtype)
        for group, options in zip(self.param_groups, state_dict["param_groups"], strict=True):
            group.update({key: value for key, value in options.items() if key != "params"})


def optimizer_state_tensors(optimizer: Optimizer, names: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The states of ``optimizer`` by name, in the order of its parameters; the tensors themselves, not copies.

    ``names`` maps parameter names to the parameters. Raises CheckpointError for a state that is neither tensor nor
    number (a resumable checkpoint of such an optimizer cannot be written), and for a parameter that has no name.
    """
    tensors: dict[str, Tensor] = {}
    states = optimizer.state_dict()["state"]
    for index, name in enumerate(_names_in_order(optimizer, names)):
        for key, value in states.get(index, {}).items():
            kind = type(value).__name__
            if isinstance(value, Tensor):
                tensors[f"{name}.{key}"] = value
            elif kind in _NUMBERS:
                tensors[f"{name}.{key}:{kind}"] = torch.tensor(value, dtype=_NUMBERS[kind])
            else:
                raise CheckpointError(
                    f"optimizer {type(optimizer).__name__}: state {key!r} of {name} is a {kind}; a checkpoint that can "
                    "be resumed holds tensors and numbers only: use another optimizer"
                )
    return tensors


def load_optimizer_state(
    optimizer: Optimizer, names: Mapping[str, Tensor], tensors: Mapping[str, Tensor], written_by: str
) -> None:
    """Give ``optimizer`` the states that :func:`optimizer_state_tensors` returned; its own options (rate, betas) stay.

    ``written_by`` is the class name of the optimizer they come from (``TrainerState.optimizer``). Raises
    CheckpointError, with nothing changed, when that is another, or ``tensors`` belong to other parameters, miss
    some, or differ in shape from the parameter where the state is as large as one (``exp_avg``, momentum).
    """
    if type(optimizer).__name__ != written_by:
        raise CheckpointError(
            f"optimizer state of {written_by} found, {type(optimizer).__name__} is to be resumed: use {written_by}, or "
            "start a new run from the checkpoint's LoRA weights"
        )
    order = _names_in_order(optimizer, names)
    index_of = {name: index for index, name in enumerate(order)}
    states: dict[int, dict[str, Any]] = {}
    foreign = []
    for full_name, tensor in tensors.items():
        name, _, key = full_name.rpartition(".")
        if name not in index_of:
            foreign.append(full_name)
            continue
        key, _, kind = key.partition(":")
        if not kind and key in ("exp_avg", "exp_avg_sq", "momentum_buffer") and tensor.shape != names[name].shape:
            raise CheckpointError(
                f"optimizer state {full_name}: shape {list(names[name].shape)} expected, {list(tensor.shape)} found"
            )
        states.setdefault(index_of[name], {})[key] = tensor.item() if kind else tensor
    if foreign:
        raise CheckpointError(
            f"optimizer state of {len(foreign)} tensors that do not train in this run: {shorten(foreign)}; "
            "resume with the options of the run that wrote it"
        )
    missing = [name for name in order if index_of[name] not in states]
    # torch's optimizers have no state at all before their first step
    if missing and states:
        raise CheckpointError(
            f"no optimizer state for {len(missing)} parameters that train in this run: {shorten(missing)}; "
            "resume with the options of the run that wrote it"
        )
    optimizer.load_state_dict({"state": states, "param_groups": optimizer.state_dict()["param_groups"]})


def _names_in_order(optimizer: Optimizer, names: Mapping[str, Tensor]) -> list[str]:
    name_of = {id(parameter): name for name, parameter in names.items()}
    order = []
    for group in optimizer.param_groups:
        for param in group["params"]:
            if id(param) not in name_of:
                raise CheckpointError(
                    f"optimizer {type(optimizer).__name__}: a parameter of shape {list(param.shape)} is not one of "
                    "this model's trainable parameters: give it those that get_trainable_parameters() returns"
                )
            order.append(name_of[id(param)])
    return order


def _check_range(option: str, value: float, low: float, below: float) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not low <= value < below:
        raise ConfigError(f"{option}: a number from {low:g} to below {below:g} expected, {value!r} found")
