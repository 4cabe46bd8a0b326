"""lema: fine-tune and run language models larger than memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lema.config import LemaConfig, MemoryStrategy

if TYPE_CHECKING:
    from lema.model import LemaModel

__all__ = ["LemaConfig", "LemaModel", "MemoryStrategy"]


def __getattr__(name: str) -> Any:
    # torch is imported with the model, not by `python -m lema --help`.
    if name == "LemaModel":
        from lema.model import LemaModel

        return LemaModel
    raise AttributeError(f"module 'lema' has no attribute {name!r}")
