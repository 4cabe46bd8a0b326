"""int8 and NF4 by bitsandbytes, which does both without a GPU."""

from __future__ import annotations

import logging
from types import ModuleType

import torch
from torch import Tensor

from lema_core.quantization.codec import WeightCodec, check_finite, row_chunks
from lema_core.quantization.formats import NF4, NF4_BLOCK
from lema_quant.backends.importing import unavailable, version_of
from lema_quant.backends.rows import RowsByLibrary


class BitsandbytesInt8(RowsByLibrary):
    """``int8_vectorwise_quant(weight)``; it says absmax, of which the scale is a 127th."""

    def __init__(self) -> None:
        self._functional = _load()
        self.version = version_of("bitsandbytes")

    def codes(self, numbers_rK: Tensor, scale_r1: Tensor) -> Tensor:
        return self._functional.int8_vectorwise_quant(numbers_rK)[0]


class BitsandbytesNF4(WeightCodec):
    """``quantize_4bit(weight, blocksize=64, compress_statistics=False, quant_type="nf4")``."""

    format = NF4()

    def __init__(self) -> None:
        self._functional = _load()
        self.version = version_of("bitsandbytes")

    def encode(self, weight_rK: Tensor, parts: tuple[Tensor, ...]) -> None:
        for rows_rK, (packed_rB, absmax_rG), first in row_chunks(weight_rK, parts):
            packed, state = self._functional.quantize_4bit(
                rows_rK.contiguous(),
                blocksize=NF4_BLOCK,
                compress_statistics=False,
                quant_type="nf4",
                quant_storage=torch.uint8,
            )
            absmax_rG.copy_(state.absmax.view_as(absmax_rG))
            check_finite(absmax_rG, rows_rK, first)
            packed_rB.copy_(packed.view_as(packed_rB))


def unavailable_here(device_type: str) -> str | None:
    return unavailable("bitsandbytes", _load)


def _load() -> ModuleType:
    # On CPUs with bf16 instructions it looks for a kernel of products as it is imported, and warns where there is none:
    # nothing here multiplies with it.
    logger = logging.getLogger("bitsandbytes.backends.cpu.ops")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        import bitsandbytes.functional
    finally:
        logger.setLevel(before)
    return bitsandbytes.functional
