"""What lema finds through the entry point ``gguf``."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from lema_core.hookspecs import hookimpl
from lema_core.records import CheckpointSource
from lema_gguf.refs import find_gguf, refuses


def _locate(ref: str) -> Path:
    """The cached folder of ``ref``, converted when it is not there yet. Raises CheckpointError."""
    # Imported here: gguf and torch cost a second that only a GGUF model should pay.
    from lema_gguf.cache import cached_folder

    return cached_folder(find_gguf(ref))


@hookimpl
def lema_checkpoint_sources() -> Iterable[CheckpointSource]:
    """GGUF files, by path or inside an installed package."""
    yield CheckpointSource("gguf", refuses, _locate, priority=50)
