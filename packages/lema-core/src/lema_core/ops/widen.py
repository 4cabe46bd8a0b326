"""Kernels of the operation ``widen``: fp16 or bf16 to fp32 on the CPU; plain torch's is here."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

#: (source, target): fp16 or bf16 to fp32, of one shape, both contiguous and on the CPU
Widen = Callable[[Tensor, Tensor], None]


def widen(source: Tensor, target: Tensor) -> None:
    target.copy_(source)
