"""A machine's figures in milliseconds, for tests that need some and do not look at them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from lema_core.planning import flight
from lema_core.runtime import rehearsal

_SMALL = flight._Sizes(128, 256, 20 << 20)
_QUICK = {
    flight: {
        **dict.fromkeys(("_READ_S", "_MEMORY_S", "_LINK_S", "_PRODUCT_S", "_OVERHEAD_S", "_DRAG_S"), 0.0),
        "_IN_RAM": _SMALL,
        "_ON_DEVICE": _SMALL,
    },
    rehearsal: {"_SECONDS": 0.0},
}


@contextmanager
def quick_figures() -> Iterator[None]:
    """Flight checks and rehearsals of this process, and of those forked from it, time little and once or twice."""
    kept = [(module, name, getattr(module, name)) for module, names in _QUICK.items() for name in names]
    for module, names in _QUICK.items():
        for name, value in names.items():
            setattr(module, name, value)
    try:
        yield
    finally:
        for module, name, value in kept:
            setattr(module, name, value)
