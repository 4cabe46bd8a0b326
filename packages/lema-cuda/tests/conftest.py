"""Where there is no native kernel, the tests that compute with it say why they are left out."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from lema_cuda.library import refusals


@pytest.fixture
def native() -> object:
    if reasons := refusals():
        pytest.skip("; ".join(reasons))
    from lema_cuda.linear import NativeLinear

    return NativeLinear()


@pytest.fixture(autouse=True)
def threads_as_before() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)
