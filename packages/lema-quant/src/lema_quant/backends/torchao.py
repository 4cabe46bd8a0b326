"""int8 by torchao's ``Int8Tensor``."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from lema_quant.backends.importing import quietly, unavailable, version_of
from lema_quant.backends.rows import RowsByLibrary

NO_4_BITS = "its weights of 4 bits (Int4Tensor) need mslk and have a zero point for each group, which int4 here has not"


class TorchaoInt8(RowsByLibrary):
    """``Int8Tensor.from_hp(weight, PerRow(), scale=absmax / 127).qdata``.

    The scale is given, because torchao's own, absmax / 127.5, has the largest number clipped and codes of -128.
    """

    def __init__(self) -> None:
        self._int8_tensor, self._per_row = _load()
        self.version = version_of("torchao")

    def codes(self, numbers_rK: Tensor, scale_r1: Tensor) -> Tensor:
        return self._int8_tensor.from_hp(numbers_rK, self._per_row(), scale=scale_r1).qdata


def unavailable_int8(device_type: str) -> str | None:
    return unavailable("torchao", _load)


def unavailable_int4(device_type: str) -> str | None:
    return NO_4_BITS


def _load() -> tuple[Any, Any]:
    with quietly():
        from torchao.quantization import Int8Tensor, PerRow
    return Int8Tensor, PerRow
