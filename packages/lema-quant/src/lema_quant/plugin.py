"""The codecs of this package."""

from __future__ import annotations

from collections.abc import Iterable

from lema_core.hookspecs import hookimpl
from lema_core.records import StateCodec


@hookimpl
def lema_state_codecs() -> Iterable[StateCodec]:
    yield StateCodec("blockwise", bits=8, codec="lema_quant.blockwise:BlockwiseCodec")
