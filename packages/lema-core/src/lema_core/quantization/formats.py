"""Wire formats of quantized weights: what lies in a file, in a slot, and before a kernel, byte for byte.

A matrix [R, K] becomes a payload and scales, each with R rows of its own, so that a block of rows is a block of rows of
each. In a file the payload has the weight's name, and what belongs to it that name with a suffix (``.scale``).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from math import isfinite, prod

import torch
from torch import Tensor

#: numbers that one scale of NF4 is for, as in bitsandbytes
NF4_BLOCK = 64
INT4_GROUPS = (32, 64, 128)
#: as many numbers as torch does not share out over threads
_ONE_THREAD = 1 << 15
#: the quantiles of a normal distribution that NF4's codes stand for (Dettmers et al. 2023, "QLoRA", arXiv:2305.14314,
#: appendix E; as fp32 in bitsandbytes)
NF4_VALUES = (
    -1.0,
    -0.6961928009986877,
    -0.5250730514526367,
    -0.39491748809814453,
    -0.28444138169288635,
    -0.18477343022823334,
    -0.09105003625154495,
    0.0,
    0.07958029955625534,
    0.16093020141124725,
    0.24611230194568634,
    0.33791524171829224,
    0.44070982933044434,
    0.5626170039176941,
    0.7229568362236023,
    1.0,
)


@dataclass(frozen=True)
class WirePart:
    """One of the tensors that a quantized weight is made of; ``suffix``: what its name has behind the weight's, "" for
    the payload, which comes first. Its first dimension are the weight's rows."""

    suffix: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


class WireFormat(ABC):
    """How a weight [R, K] lies in fewer bits. ``name`` is what files and options call it; ``bits``: of a number's code,
    scales not counted. Shapes: R rows, K columns, r rows of a block."""

    name: str
    bits: int
    #: whether scales below zero mean something
    signed_scales = False

    @abstractmethod
    def refuses(self, shape: tuple[int, ...]) -> str | None:
        """Why a weight of this shape cannot be stored so; None when it can."""

    @abstractmethod
    def parts(self, shape: tuple[int, int]) -> tuple[WirePart, ...]:
        """What it is made of, the payload first."""

    @abstractmethod
    def decode(self, parts: tuple[Tensor, ...], out_rK: Tensor) -> None:
        """The numbers of a block of rows into fp32 ``out``, row-major. ``parts``: these rows of each part."""

    def nbytes(self, shape: tuple[int, int]) -> int:
        return sum(part.nbytes for part in self.parts(shape))

    def wrong_scales(self, scales: Iterable[Tensor]) -> str | None:
        """Why the ``scales`` of some rows are none: infinite, NaN, or below zero; None when they are."""
        for scale in scales:
            if scale.numel() == 0:
                continue
            # Few at a time: a thread that reads beside the compute shall not wake others up for it.
            for some in scale.flatten().split(_ONE_THREAD):
                # in one pass: the least and the greatest of numbers with a NaN among them are NaN
                least, greatest = (float(each) for each in torch.aminmax(some))
                if not (isfinite(least) and isfinite(greatest)):
                    return "infinite or NaN"
                if least < 0 and not self.signed_scales:
                    return f"{least:g}, below zero"
        return None


class Int8Rows(WireFormat):
    """``int8``: two's complement in [-127, 127] and one fp32 scale for each row; a number is code * scale."""

    name, bits = "int8", 8

    def refuses(self, shape: tuple[int, ...]) -> str | None:
        return _not_a_matrix(shape)

    def parts(self, shape: tuple[int, int]) -> tuple[WirePart, ...]:
        rows, columns = shape
        return WirePart("", torch.int8, (rows, columns)), WirePart(".scale", torch.float32, (rows,))

    def decode(self, parts: tuple[Tensor, ...], out_rK: Tensor) -> None:
        codes_rK, scale_r = parts
        out_rK.copy_(codes_rK).mul_(scale_r[:, None])


class Int4Groups(WireFormat):
    """``int4-32``, ``int4-64``, ``int4-128``: two codes in a byte, the even column's in the lower half; a number is
    (code - 8) * scale. One bf16 scale, of either sign, for so many columns of a row; the last group of a row may have
    fewer, and the last byte of an odd row one code and a zero."""

    bits = 4
    signed_scales = True

    def __init__(self, group: int) -> None:
        if group not in INT4_GROUPS:
            raise ValueError(f"group is {group}, expected one of {', '.join(map(str, INT4_GROUPS))}")
        self.group = group
        self.name = f"int4-{group}"

    def refuses(self, shape: tuple[int, ...]) -> str | None:
        return _not_a_matrix(shape)

    def parts(self, shape: tuple[int, int]) -> tuple[WirePart, ...]:
        rows, columns = shape
        return (
            WirePart("", torch.uint8, (rows, -(-columns // 2))),
            WirePart(".scale", torch.bfloat16, (rows, -(-columns // self.group))),
        )

    def decode(self, parts: tuple[Tensor, ...], out_rK: Tensor) -> None:
        codes_rB, scale_rG = parts
        columns = out_rK.shape[1]
        out_rK[:, ::2].copy_(codes_rB & 15)
        out_rK[:, 1::2].copy_((codes_rB >> 4)[:, : columns // 2])
        out_rK.sub_(8)
        whole = columns // self.group * self.group
        scale_rG = scale_rG.float()
        out_rK[:, :whole].unflatten(1, (-1, self.group)).mul_(scale_rG[:, : columns // self.group, None])
        if whole < columns:
            out_rK[:, whole:].mul_(scale_rG[:, -1:])


class NF4(WireFormat):
    """``nf4``: as bitsandbytes packs it (``quantize_4bit``, ``quant_type="nf4"``, ``blocksize=64``, fp32 absmax without
    a second quantization): two codes in a byte, the even column's in the upper half; a number is NF4_VALUES[code] *
    absmax. One absmax for 64 numbers, which never cross a row."""

    name, bits = "nf4", 4

    def refuses(self, shape: tuple[int, ...]) -> str | None:
        if (reason := _not_a_matrix(shape)) is not None:
            return reason
        return f"its {shape[1]} columns are no multiple of {NF4_BLOCK}" if shape[1] % NF4_BLOCK else None

    def parts(self, shape: tuple[int, int]) -> tuple[WirePart, ...]:
        rows, columns = shape
        return (
            WirePart("", torch.uint8, (rows, columns // 2)),
            WirePart(".scale", torch.float32, (rows, columns // NF4_BLOCK)),
        )

    def decode(self, parts: tuple[Tensor, ...], out_rK: Tensor) -> None:
        codes_rB, absmax_rG = parts
        values = torch.tensor(NF4_VALUES, device=out_rK.device)
        out_rK[:, ::2] = values[(codes_rB >> 4).int()]
        out_rK[:, 1::2] = values[(codes_rB & 15).int()]
        out_rK.unflatten(1, (-1, NF4_BLOCK)).mul_(absmax_rG[:, :, None])


@cache
def wire_formats() -> dict[str, WireFormat]:
    """Those that kernels may know, by name."""
    known = (Int8Rows(), *map(Int4Groups, INT4_GROUPS), NF4())
    return {each.name: each for each in known}


def _not_a_matrix(shape: tuple[int, ...]) -> str | None:
    if len(shape) != 2:
        return f"its shape is {list(shape)}, a matrix is expected"
    return None if prod(shape) else f"its shape is {list(shape)}: it is empty"
