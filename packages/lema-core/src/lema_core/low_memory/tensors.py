"""What takes the place of a parameter or buffer in a module."""

from __future__ import annotations

from math import prod

import torch
from torch import Tensor
from torch.nn import Parameter


def module_tensors(module: torch.nn.Module) -> dict[str, Tensor | None]:
    """The parameters and buffers that ``module`` itself holds, in the order of its state dict."""
    return {**module._parameters, **module._buffers}


def alike(old: Tensor, data: Tensor) -> Tensor:
    """A leaf with the values (and the memory) of ``data`` that is otherwise what ``old`` is: its class,
    ``requires_grad``, attributes and hooks on its gradient."""
    if type(old) is Parameter:
        new: Tensor = Parameter(data, requires_grad=old.requires_grad)
    elif isinstance(old, Parameter):
        new = torch.Tensor._make_subclass(type(old), data, old.requires_grad)
    else:
        new = data.detach().requires_grad_(old.requires_grad)
    new.__dict__.update(old.__dict__)
    # torch calls these from the tensor that has them; the handles that remove them know the dict, not the tensor
    new._backward_hooks = old._backward_hooks
    new._post_accumulate_grad_hooks = old._post_accumulate_grad_hooks  # type: ignore[attr-defined]
    return new


def place(tensor: Tensor) -> tuple[object, ...]:
    """Equal for two tensors that are the same elements of the same memory, on the meta device too."""
    return (storage_id(tensor), tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype)


def storage_id(tensor: Tensor) -> int:
    """Equal for living tensors that share a storage, on the meta device too, where all addresses are 0."""
    return int(tensor.untyped_storage()._cdata)


def empty_like(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """An empty CPU tensor in the memory format of ``tensor``, row-major where that has holes or overlaps.

    ``torch.empty_like`` does the same, but for a tensor on meta it loads torch's compiler.
    """
    steps = sorted((step, size) for step, size in zip(tensor.stride(), tensor.shape, strict=True) if size != 1)
    packed = all(step == prod(size for _, size in steps[:i]) for i, (step, _) in enumerate(steps))
    if packed and tensor.numel():
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=dtype, device="cpu")
    return torch.empty(tensor.shape, dtype=dtype, device="cpu")


def is_extra_state(key: str) -> bool:
    """Whether a state dict's key is that of what a module's ``get_extra_state`` gave."""
    return key.rpartition(".")[2] == "_extra_state"
