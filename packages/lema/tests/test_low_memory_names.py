"""What lema hands on from lema_core.low_memory."""

from __future__ import annotations

import subprocess
import sys

import pytest

import lema
import lema_core.low_memory

NAMES = [
    "empty_model", "get_keys_to_submodule", "load_checkpoint_with_low_memory", "load_state_dict_with_low_memory"
]  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_they_are_the_same_objects(name: str) -> None:
    assert getattr(lema, name) is getattr(lema_core.low_memory, name) and name in lema.__all__


def test_torch_comes_with_the_first_of_them() -> None:
    code = "import sys, lema; before = 'torch' in sys.modules; lema.empty_model; print(before, 'torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "False True\n"
