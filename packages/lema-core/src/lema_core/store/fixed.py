"""Weights that are others than the checkpoint's, to compute with and not to train: fp32, in a file without a name."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from lema_core.checkpoint.reading import tensor_bytes
from lema_core.device import map_ram
from lema_core.store.model import StreamedModel, TrainedGranule, numbers_of
from lema_core.store.unnamed import UnnamedFile

#: by stored name, first number and count: fp32 [count], row-major
Values = Callable[[str, int, int], Tensor]


def fixed_weights(model: StreamedModel, folder: Path, values: Values) -> UnnamedFile:
    """The working file of all weights that ``model`` streams from one, on the disk of ``folder``. Raises TransferError
    where that has no room."""
    scratch = map_ram(max(each.granule.nbytes for each in model.trained))
    memory = tensor_bytes(scratch)
    file = UnnamedFile(folder, "weights")
    try:
        file.reserve(model.space.nbytes)
        for each in model.trained:
            set_granule(each, scratch, values)
            file.write(each.file_offset, memory[: each.granule.nbytes])
    except BaseException as error:
        file.close()
        if isinstance(error, OSError):
            raise file.refused("written", error, model.space.nbytes) from error
        raise
    finally:
        memory.release()
    return file


def set_granule(each: TrainedGranule, memory: Tensor, values: Values) -> None:
    """Fill the uint8 ``memory`` of a granule with what its weights are."""
    numbers = memory[: each.granule.nbytes].view(torch.float32)
    numbers.zero_()
    for part in each.parts:
        row = math.prod(part.shape[1:])
        numbers_of(part, numbers).copy_(values(part.tensor, part.start * row, math.prod(part.shape)))
