"""The codecs and backends of this package."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from lema_core.hookspecs import hookimpl
from lema_core.records import QuantBackend, StateCodec, load_object


@hookimpl
def lema_state_codecs() -> Iterable[StateCodec]:
    yield StateCodec("blockwise", bits=8, codec="lema_quant.blockwise:BlockwiseCodec")


@hookimpl
def lema_quant_backends() -> Iterable[QuantBackend]:
    """Preferred in the order torchao, quanto, bitsandbytes, custom."""
    backends = "lema_quant.backends"
    by_torchao, by_quanto = f"{backends}.torchao:TorchaoInt8", f"{backends}.quanto:QuantoInt8"
    yield QuantBackend("torchao", 8, "int8", by_torchao, 30, _asks("torchao:unavailable_int8"))
    yield QuantBackend("torchao", 4, "int4-32", by_torchao, 30, _asks("torchao:unavailable_int4"))
    yield QuantBackend("quanto", 8, "int8", by_quanto, 20, _asks("quanto:unavailable_int8"))
    yield QuantBackend("quanto", 4, "int4-32", by_quanto, 20, _asks("quanto:unavailable_int4"))
    by_bitsandbytes, asked = f"{backends}.bitsandbytes", _asks("bitsandbytes:unavailable_here")
    yield QuantBackend("bitsandbytes", 8, "int8", f"{by_bitsandbytes}:BitsandbytesInt8", 10, asked)
    yield QuantBackend("bitsandbytes", 4, "nf4", f"{by_bitsandbytes}:BitsandbytesNF4", 10, asked)
    yield QuantBackend("custom", 8, "int8", "lema_quant.custom.codecs:int8")
    for group in (32, 64, 128):
        yield QuantBackend("custom", 4, f"int4-{group}", f"lema_quant.custom.codecs:int4_{group}")
    yield QuantBackend("custom", 4, "nf4", "lema_quant.custom.codecs:nf4")


def _asks(function: str) -> Callable[[str], str | None]:
    """What imports a backend's module when somebody wants to know: it needs torch, which --help does not wait for."""

    def unavailable(device_type: str) -> str | None:
        found: str | None = load_object(f"lema_quant.backends.{function}")(device_type)
        return found

    return unavailable
