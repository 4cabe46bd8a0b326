"""Native kernels for the tests, with the oldest instructions that they are made for and with the newest that are here.
Where there is none, the tests that compute with it say why they are left out."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from lema_cuda.library import INSTRUCTIONS, instructions, open_library, refusals

OLDEST = INSTRUCTIONS[0]
LEVELS = (OLDEST,) if refusals() or instructions() == OLDEST else (OLDEST, instructions())


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


@pytest.fixture
def old_and_new() -> Iterator[Callable[..., list[Any]]]:
    """Calls a function with the oldest instructions, then with the newest: what it returned both times."""
    if LEVELS == (OLDEST,):
        pytest.skip(f"no newer instructions than {OLDEST} are here")

    def called(function: Callable[..., Any], *given: Any) -> list[Any]:
        found = []
        for level in LEVELS:
            hold_to(level)
            found.append(function(*given))
        return found

    yield called
    hold_to(LEVELS[-1])


@pytest.fixture
def native(level: str) -> object:
    from lema_cuda.linear import NativeLinear

    return NativeLinear()


@pytest.fixture(autouse=True)
def threads_as_before() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)
