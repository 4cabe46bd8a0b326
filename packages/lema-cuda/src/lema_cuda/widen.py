"""bf16 and fp16 to fp32 on the CPU, in liblema: one thread, without the interpreter's lock."""

from __future__ import annotations

import torch
from torch import Tensor

from lema_core.errors import PluginError
from lema_cuda.library import open_library, raise_for

#: enum lema_dtype
_DTYPES = {torch.float16: 1, torch.bfloat16: 2}


class NativeWiden:
    """As :class:`lema_core.ops.widen.Widen`. Raises PluginError for tensors that it does not serve."""

    def __init__(self) -> None:
        self._library = open_library()

    def __call__(self, source: Tensor, target: Tensor) -> None:
        serves = source.dtype in _DTYPES and target.dtype == torch.float32 and source.shape == target.shape
        if not serves or not all(each.is_contiguous() and each.device.type == "cpu" for each in (source, target)):
            raise PluginError(
                f"cpp kernel: {source.dtype} {list(source.shape)} on {source.device} to {target.dtype} "
                f"{list(target.shape)} on {target.device}: expected contiguous fp16 or bf16 to fp32 of one shape on "
                "the CPU"
            )
        dtype, count = _DTYPES[source.dtype], source.numel()
        raise_for(self._library.lema_widen(source.data_ptr(), dtype, count, target.data_ptr()))
