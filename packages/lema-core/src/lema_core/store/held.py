"""A tensor that lies in one of several tiers, and comes back laid out as it was."""

from __future__ import annotations

from collections.abc import Hashable

import torch
from torch import Tensor

from lema_core.device import Event


class Held:
    """``tensor``: on the device; ``ram``: a range of the arena; ``offset``: in the file. ``counted``: towards the
    device's limit."""

    __slots__ = ("counted", "dtype", "key", "moving", "nbytes", "offset", "ram", "ready", "shape", "strides", "tensor")

    def __init__(self, key: Hashable, tensor: Tensor, ready: Event) -> None:
        self.key = key
        self.tensor: Tensor | None = tensor
        self.ram: Tensor | None = None
        self.offset: int | None = None
        self.ready = ready
        self.counted = self.moving = False
        self.nbytes = tensor.numel() * tensor.element_size()
        self.dtype, self.shape, self.strides = tensor.dtype, tensor.shape, tensor.stride()


def is_dense(tensor: Tensor) -> bool:
    """No gap and no overlap: some order of the dimensions makes it contiguous."""
    expected = 1
    for stride, size in sorted((s, n) for s, n in zip(tensor.stride(), tensor.shape, strict=True) if n != 1):
        if stride != expected:
            return False
        expected *= size
    return True


def bytes_of(tensor: Tensor) -> Tensor:
    """The bytes of a dense tensor in the order of their addresses, uint8 [nbytes]; the same memory."""
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)
