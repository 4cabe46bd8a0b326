"""Where lema keeps what is worth keeping between runs: ``$LEMA_CACHE``, by default ``~/.cache/lema``."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder(name: str) -> Path:
    """The folder ``name`` of the cache; not made here."""
    return Path(os.path.expanduser(os.environ.get("LEMA_CACHE") or "~/.cache/lema")) / name
