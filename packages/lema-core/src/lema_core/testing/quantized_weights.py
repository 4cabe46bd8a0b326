"""Random weights in the wire formats, and products with them that are made in fp64."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lema_core.quantization.block import QuantizedBlock
from lema_core.quantization.formats import wire_formats

FORMATS = tuple(wire_formats())


def block_of(name: str, rows: int, k: int, seed: int = 0) -> QuantizedBlock:
    """Any codes that the format has; scales of about one, for int4 of either sign."""
    form, generator = wire_formats()[name], torch.Generator().manual_seed(seed)
    payload, scale = form.parts((rows, k))
    if name == "int8":
        codes = torch.randint(-127, 128, payload.shape, generator=generator, dtype=torch.int8)
    else:
        codes = torch.randint(0, 256, payload.shape, generator=generator, dtype=torch.uint8)
        if k % 2:
            codes[:, -1] &= 15
    scales = torch.rand(scale.shape, generator=generator) + 0.5
    if name.startswith("int4"):
        scales *= torch.randint(0, 2, scale.shape, generator=generator) * 2 - 1
    return QuantizedBlock(form, (rows, k), (codes, (scales / (60 if name == "int8" else 1)).to(scale.dtype)))


def decoded(block: QuantizedBlock) -> Tensor:
    block.decode(wide := torch.empty(block.shape))
    return wide


def rows_of(block: QuantizedBlock, rows: slice) -> QuantizedBlock:
    parts = tuple(part[rows] for part in block.parts)
    return QuantizedBlock(block.format, (len(parts[0]), block.shape[1]), parts)


def placed(block: QuantizedBlock, offset: int) -> QuantizedBlock:
    """The same ``offset`` bytes behind an aligned address, between bytes that are all ones."""
    parts = []
    for part in block.parts:
        stored = part.flatten().view(torch.uint8)
        memory = torch.full((offset + len(stored) + 64,), 255, dtype=torch.uint8)
        memory[offset : offset + len(stored)] = stored
        parts.append(
            torch.frombuffer(memory.numpy(), dtype=part.dtype, count=part.numel(), offset=offset).view(part.shape)
        )
    return QuantizedBlock(block.format, block.shape, tuple(parts))


@dataclass(frozen=True)
class Inputs:
    """x [K, N], dy [R, N]; B [R, r] and A [r, K], parts of larger matrices as stacked modules give; a, da [r, N]."""

    x: Tensor
    dy: Tensor
    lora_B: Tensor
    inner: Tensor
    lora_A: Tensor
    d_inner: Tensor


def inputs_for(rows: int, k: int, n: int, r: int = 3, seed: int = 0) -> Inputs:
    generator = torch.Generator().manual_seed(seed + 1)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    lora_B, lora_A = normal(rows, r + 2)[:, 1 : r + 1], normal(r + 2, k)[1 : r + 1]
    return Inputs(normal(k, n), normal(rows, n), lora_B, normal(r, n), lora_A, normal(r, n))
