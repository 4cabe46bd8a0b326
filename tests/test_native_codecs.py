"""The native packer and the codecs in plain torch write the same bytes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lema_core.ops.quantize import native_quantize
from lema_core.quantization.codec import WeightCodec
from lema_core.quantization.formats import wire_formats
from lema_quant.custom.int4 import Int4Codec
from lema_quant.custom.int8 import Int8Codec
from lema_quant.custom.nf4 import NF4Codec

CODECS = {"int8": Int8Codec, "nf4": NF4Codec} | {
    f"int4-{each}": (lambda each=each: Int4Codec(each)) for each in (32, 64, 128)
}
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def hard_weights(k: int) -> Tensor:
    """Rows of every size, of few values so that there are ties, of zeros, of equal numbers, with an outlier, of halves
    between codes."""
    generator = torch.Generator().manual_seed(k)
    normal = torch.randn(60, k, generator=generator)
    sizes = torch.logspace(-45, 37, 60)[:, None]
    integers = torch.randint(-16, 17, (20, k), generator=generator) / 2
    special = torch.zeros(4, k)
    special[1] = -0.0
    special[2] = 3.0
    special[3, :: max(1, k // 3)] = -1e30
    halves = (torch.arange(k) % 33 - 16.0)[None] * 0.5
    return torch.cat((normal, normal * sizes, integers, special, halves, -halves))


@pytest.mark.parametrize("name", sorted(CODECS))
@pytest.mark.parametrize("dtype", DTYPES)
def test_same_bytes(name: str, dtype: torch.dtype) -> None:
    native = native_quantize()
    if native is None:
        pytest.skip("no native packer is installed")
    assert name in native.formats
    codec: WeightCodec = CODECS[name]()
    form = wire_formats()[name]
    for k in (64, 320) if name == "nf4" else (1, 31, 64, 97, 300):
        weight = hard_weights(k).clamp(-6e4, 6e4).to(dtype) if dtype == torch.float16 else hard_weights(k).to(dtype)
        found, expected = (
            tuple(torch.zeros(part.shape, dtype=part.dtype) for part in form.parts(weight.shape)) for _ in range(2)
        )
        assert native(name, weight, found)
        codec.encode(weight, expected)
        for part, right in zip(found, expected, strict=True):
            assert torch.equal(part, right), (k, (part != right).nonzero()[:5])
