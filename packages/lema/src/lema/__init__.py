"""lema: fine-tune and run language models larger than memory."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from lema.config import LemaConfig, MemoryStrategy

if TYPE_CHECKING:
    from lema.model import LemaModel
    from lema_core.low_memory import (
        empty_model,
        get_keys_to_submodule,
        load_checkpoint_with_low_memory,
        load_state_dict_with_low_memory,
    )

__all__ = [
    "LemaConfig",
    "LemaModel",
    "MemoryStrategy",
    "empty_model",
    "get_keys_to_submodule",
    "load_checkpoint_with_low_memory",
    "load_state_dict_with_low_memory",
]

# torch is imported with these, not by `python -m lema --help`
_HOMES = {
    "LemaModel": "lema.model",
    "empty_model": "lema_core.low_memory",
    "get_keys_to_submodule": "lema_core.low_memory",
    "load_checkpoint_with_low_memory": "lema_core.low_memory",
    "load_state_dict_with_low_memory": "lema_core.low_memory",
}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'lema' has no attribute {name!r}")
