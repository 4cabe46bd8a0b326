"""fp16 or bf16 to fp32 on the CPU: the contract of a ``widen`` kernel, and plain torch's."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class Widen(Protocol):
    """Kernels of the operation ``widen``."""

    def __call__(self, source: Tensor, target: Tensor) -> None:
        """Copy fp16 or bf16 to fp32, of one shape, both contiguous and on the CPU."""


class TorchWiden:
    """By ``copy_``."""

    def __call__(self, source: Tensor, target: Tensor) -> None:
        target.copy_(source)
