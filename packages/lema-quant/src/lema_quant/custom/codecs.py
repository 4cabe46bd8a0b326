"""What records name: the codecs of ``custom``, each computed by a native kernel where one is installed."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from torch import Tensor

from lema_core.ops.quantize import native_quantize
from lema_core.quantization.codec import WeightCodec
from lema_quant.custom.int4 import Int4Codec
from lema_quant.custom.int8 import Int8Codec
from lema_quant.custom.nf4 import NF4Codec


class NativeOrTorch(WeightCodec):
    """A codec in plain torch and the kernel that writes the same bytes faster, if there is one for its format."""

    def __init__(self, twin: Callable[[], WeightCodec]) -> None:
        self._twin = twin()
        self.format = self._twin.format
        self.version = self._twin.version
        kernel = native_quantize()
        self._kernel = kernel if kernel is not None and self.format.name in kernel.formats else None

    @property
    def is_native(self) -> bool:
        return self._kernel is not None

    def encode(self, weight_rK: Tensor, parts: tuple[Tensor, ...]) -> None:
        # What is not finite is not encoded by the kernel; its twin says where it is.
        served = self._kernel is not None and weight_rK.is_contiguous()
        if not served or not self._kernel(self.format.name, weight_rK, parts):
            self._twin.encode(weight_rK, parts)


int8 = partial(NativeOrTorch, Int8Codec)
int4_32 = partial(NativeOrTorch, partial(Int4Codec, 32))
int4_64 = partial(NativeOrTorch, partial(Int4Codec, 64))
int4_128 = partial(NativeOrTorch, partial(Int4Codec, 128))
nf4 = partial(NativeOrTorch, NF4Codec)
