"""int8 by quanto's ``quantize_weight``."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from lema_quant.backends.importing import quietly, unavailable, version_of
from lema_quant.backends.rows import RowsByLibrary

NO_4_BITS = "its weights of 4 bits (qint4) have a shift for each group, which int4 here has not"


class QuantoInt8(RowsByLibrary):
    """``quantize_weight(weight, qint8, axis=0, scale=absmax / 127)``, a ``WeightQBytesTensor``; the scale is what
    quanto's ``AbsmaxOptimizer`` gives for fp32 weights."""

    def __init__(self) -> None:
        self._quantize_weight, self._qint8 = _load()
        self.version = version_of("optimum-quanto")

    def codes(self, numbers_rK: Tensor, scale_r1: Tensor) -> Tensor:
        # quanto takes one row for a tensor with one scale, and wants that without dimensions.
        scale = scale_r1 if len(numbers_rK) > 1 else scale_r1[0, 0]
        return self._quantize_weight(numbers_rK, self._qint8, axis=0, scale=scale)._data


def unavailable_int8(device_type: str) -> str | None:
    return unavailable("optimum-quanto", _load)


def unavailable_int4(device_type: str) -> str | None:
    return NO_4_BITS


def _load() -> tuple[Any, Any]:
    with quietly():
        from optimum.quanto import qint8, quantize_weight
    return quantize_weight, qint8
