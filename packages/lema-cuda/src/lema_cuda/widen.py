"""bf16 and fp16 to fp32 on the CPU, in liblema: one thread, without the interpreter's lock."""

from __future__ import annotations

import torch
from torch import Tensor

from lema_core.errors import PluginError
from lema_cuda.library import open_library

#: enum lema_dtype
_DTYPES = {torch.float16: 1, torch.bfloat16: 2}


def widen(source: Tensor, target: Tensor) -> None:
    """``target.copy_(source)``: source fp16 or bf16, target fp32, of one shape, both contiguous and on the CPU.

    Raises PluginError for others.
    """
    serves = source.dtype in _DTYPES and target.dtype == torch.float32 and source.shape == target.shape
    if not serves or not all(each.is_contiguous() and each.device.type == "cpu" for each in (source, target)):
        raise PluginError(
            f"cpp kernel: {source.dtype} {list(source.shape)} on {source.device} to {target.dtype} "
            f"{list(target.shape)} on {target.device}: expected contiguous fp16 or bf16 to fp32 of one shape on the CPU"
        )
    error = open_library().lema_widen(source.data_ptr(), _DTYPES[source.dtype], source.numel(), target.data_ptr())
    if error:
        raise PluginError(f"cpp kernel: liblema refused to widen: {error}")
