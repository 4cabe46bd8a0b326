"""A shorter way to torch for ``python -m lema``.

A third of a plain ``import torch`` is the garbage collector, which walks again and again through all that was imported
so far and finds nothing.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def quick_imports() -> Iterator[None]:
    """For the imports of a program that is about to work with torch; nothing special where torch is there already.

    What is imported here never becomes garbage: the collector rests meanwhile, and its later rounds skip it.
    """
    if "torch" in sys.modules:
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
