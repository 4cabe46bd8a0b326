"""What lema finds through the entry point ``fp8``."""

from __future__ import annotations

from collections.abc import Iterable

from lema_core.hookspecs import hookimpl
from lema_core.records import QuantBackend


@hookimpl
def lema_quant_backends() -> Iterable[QuantBackend]:
    """The codec is imported when weights are written or read in this format, not before. A priority below zero:
    ``quant_backend=auto`` does not take it, since int8 loses a third of what FP8 loses."""
    yield QuantBackend("fp8", bits=8, format="fp8-e4m3", codec="lema_fp8.codec:Fp8Codec", priority=-10)
