"""Native kernels for the tests, with the oldest instructions that they are made for and with the newest that are here,
those of AMX apart.
Where there is none, the tests that compute with it say why they are left out."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from lema_cuda.library import INSTRUCTIONS, instructions, open_library, refusals

OLDEST, AMX = INSTRUCTIONS[0], INSTRUCTIONS[-1]
HERE = (OLDEST,) if refusals() else INSTRUCTIONS[: INSTRUCTIONS.index(instructions()) + 1]
#: the oldest and the newest that compute in vector registers
IN_REGISTERS = tuple(dict.fromkeys((OLDEST, [level for level in HERE if level != AMX][-1])))
LEVELS = (*IN_REGISTERS, AMX) if AMX in HERE else IN_REGISTERS


def hold_to(level: str) -> None:
    assert open_library().lema_cpu_limit(INSTRUCTIONS.index(level)) == 0


@pytest.fixture(params=LEVELS)
def level(request: pytest.FixtureRequest) -> Iterator[str]:
    """Instructions that native kernels are held to for a test."""
    if reasons := refusals():
        pytest.skip("; ".join(reasons))
    hold_to(request.param)
    yield request.param
    hold_to(LEVELS[-1])


def called_at(levels: tuple[str, ...]) -> Iterator[Callable[..., list[Any]]]:
    """Calls a function at these levels, one after another: what it returned each time."""

    def called(function: Callable[..., Any], *given: Any) -> list[Any]:
        found = []
        for level in levels:
            hold_to(level)
            found.append(function(*given))
        return found

    yield called
    hold_to(LEVELS[-1])


@pytest.fixture
def old_and_new() -> Iterator[Callable[..., list[Any]]]:
    """Calls a function with the oldest instructions, then with the newest in vector registers."""
    if IN_REGISTERS == (OLDEST,):
        pytest.skip(f"no newer instructions than {OLDEST} are here")
    yield from called_at(IN_REGISTERS)


@pytest.fixture
def old_and_amx() -> Iterator[Callable[..., list[Any]]]:
    """Calls a function with the oldest instructions, then with AMX."""
    if AMX not in LEVELS:
        pytest.skip("no AMX is here")
    yield from called_at((OLDEST, AMX))


@pytest.fixture
def native(level: str) -> object:
    from lema_cuda.linear import NativeLinear

    return NativeLinear()


@pytest.fixture(autouse=True)
def threads_as_before() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)
