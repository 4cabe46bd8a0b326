"""Any ``torch.nn.Module`` from a checkpoint, with the memory of the module alone.

::

    with empty_model():
        model = MyModule(...)
    load_checkpoint_with_low_memory(model, "model.safetensors")
"""

from __future__ import annotations

from lema_core.low_memory.empty import empty_model
from lema_core.low_memory.filling import DTypePolicy
from lema_core.low_memory.loading import (
    StateDictError,
    get_keys_to_submodule,
    load_checkpoint_with_low_memory,
    load_state_dict_with_low_memory,
)

__all__ = [
    "DTypePolicy",
    "StateDictError",
    "empty_model",
    "get_keys_to_submodule",
    "load_checkpoint_with_low_memory",
    "load_state_dict_with_low_memory",
]
