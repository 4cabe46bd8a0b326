"""For tests: native kernels held to one set of instructions after another."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from lema_cuda.library import INSTRUCTIONS, instructions, open_library, raise_for, refusals

#: its sums have an order of their own; all others are of vector registers
AMX = "amx"


def levels() -> tuple[str, ...]:
    """Of INSTRUCTIONS: the oldest, the newest in vector registers, and AMX, as far as they are here."""
    here = INSTRUCTIONS[:1] if refusals() else INSTRUCTIONS[: INSTRUCTIONS.index(instructions()) + 1]
    in_registers = [level for level in here if level != AMX]
    return tuple(dict.fromkeys((here[0], in_registers[-1], here[-1])))


@contextmanager
def held_to(level: str) -> Iterator[None]:
    """Kernels use nothing newer than ``level``; afterwards what they used before. Raises PluginError where there are
    none."""
    library, before = open_library(), instructions()
    raise_for(library.lema_cpu_limit(INSTRUCTIONS.index(level)))
    try:
        yield
    finally:
        raise_for(library.lema_cpu_limit(INSTRUCTIONS.index(before)))
