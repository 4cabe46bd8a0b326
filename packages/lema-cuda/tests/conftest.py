"""Native kernels for the tests, with the oldest instructions that they are made for and with the newest that are here,
those of AMX apart.
Where there is none, the tests that compute with it say why they are left out."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from lema_cuda.library import refusals
from lema_cuda.testing import AMX, held_to, levels

LEVELS = levels()
OLDEST, *NEWER = (level for level in LEVELS if level != AMX)

Called = Callable[..., list[Any]]


@pytest.fixture(params=LEVELS)
def level(request: pytest.FixtureRequest) -> Iterator[str]:
    """Instructions that native kernels are held to for a test."""
    if reasons := refusals():
        pytest.skip("; ".join(reasons))
    with held_to(request.param):
        yield request.param


def called_at(*some: str) -> Called:
    """Calls a function at these levels, one after another: what it returned each time."""

    def called(function: Callable[..., Any], *given: Any) -> list[Any]:
        found = []
        for each in some:
            with held_to(each):
                found.append(function(*given))
        return found

    return called


@pytest.fixture
def old_and_new() -> Called:
    """Calls a function with the oldest instructions, then with the newest in vector registers."""
    if not NEWER:
        pytest.skip(f"no newer instructions than {OLDEST} are here")
    return called_at(OLDEST, *NEWER)


@pytest.fixture
def old_and_amx() -> Called:
    """Calls a function with the oldest instructions, then with AMX."""
    if AMX not in LEVELS:
        pytest.skip("no AMX is here")
    return called_at(OLDEST, AMX)


@pytest.fixture
def native(level: str) -> object:
    from lema_cuda.linear import NativeLinear

    return NativeLinear()


@pytest.fixture(autouse=True)
def threads_as_before() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)
