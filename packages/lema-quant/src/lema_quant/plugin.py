"""The codecs and backends of this package."""

from __future__ import annotations

from collections.abc import Iterable

from lema_core.hookspecs import hookimpl
from lema_core.records import QuantBackend, StateCodec
from lema_quant.backends import bitsandbytes, quanto, torchao


@hookimpl
def lema_state_codecs() -> Iterable[StateCodec]:
    yield StateCodec("blockwise", bits=8, codec="lema_quant.blockwise:BlockwiseCodec")


@hookimpl
def lema_quant_backends() -> Iterable[QuantBackend]:
    """Preferred in the order torchao, quanto, bitsandbytes, custom."""
    backends = "lema_quant.backends"
    by_torchao, by_quanto = f"{backends}.torchao:TorchaoInt8", f"{backends}.quanto:QuantoInt8"
    yield QuantBackend("torchao", 8, "int8", by_torchao, 30, torchao.unavailable_int8)
    yield QuantBackend("torchao", 4, "int4-32", by_torchao, 30, torchao.unavailable_int4)
    yield QuantBackend("quanto", 8, "int8", by_quanto, 20, quanto.unavailable_int8)
    yield QuantBackend("quanto", 4, "int4-32", by_quanto, 20, quanto.unavailable_int4)
    yield QuantBackend(
        "bitsandbytes", 8, "int8", f"{backends}.bitsandbytes:BitsandbytesInt8", 10, bitsandbytes.unavailable_here
    )
    yield QuantBackend(
        "bitsandbytes", 4, "nf4", f"{backends}.bitsandbytes:BitsandbytesNF4", 10, bitsandbytes.unavailable_here
    )
    yield QuantBackend("custom", 8, "int8", "lema_quant.custom.codecs:int8")
    for group in (32, 64, 128):
        yield QuantBackend("custom", 4, f"int4-{group}", f"lema_quant.custom.codecs:int4_{group}")
    yield QuantBackend("custom", 4, "nf4", "lema_quant.custom.codecs:nf4")
