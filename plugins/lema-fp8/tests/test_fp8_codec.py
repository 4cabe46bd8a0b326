"""FP8 in the exam that all codecs take, and against E4M3 written down once more."""

from __future__ import annotations

import pytest
import torch

from lema_core.plugins import PluginManager
from lema_core.quantization.backends import WeightQuantizer
from lema_core.testing.weight_codec_suite import WeightCodecSuite
from lema_fp8 import plugin
from lema_fp8.codec import Fp8Codec, Fp8Rows


class TestFp8(WeightCodecSuite):
    # Half a step of 2^-3 at the top of a binade is 2^-4; on average over numbers of one binade, 0.026.
    most_error, most_row_error, least_number = 0.029, 1 / 28 * 1.001, 1e-36
    most_bytes = 1.001

    def make_codec(self) -> Fp8Codec:
        return Fp8Codec()


def e4m3() -> torch.Tensor:
    """Every number that E4M3 has, by its definition: 4 bits of exponent with bias 7, 3 bits of mantissa."""
    below_one = [2.0**-6 * mantissa / 8 for mantissa in range(8)]
    others = [2.0 ** (exponent - 7) * (1 + mantissa / 8) for exponent in range(1, 16) for mantissa in range(8)]
    sizes = torch.tensor([*below_one, *others[:-1]])  # the last code is NaN
    return torch.cat([-sizes, sizes]).unique()


def test_each_number_goes_to_the_nearest_that_e4m3_has() -> None:
    weight = torch.randn(20, 100, generator=torch.Generator().manual_seed(0))
    parts = tuple(torch.zeros(part.shape, dtype=part.dtype) for part in Fp8Rows().parts((20, 100)))
    Fp8Codec().encode(weight, parts)
    scaled = (weight / (weight.abs().amax(1) / 448)[:, None]).double()
    nearest = e4m3().double()[(scaled[..., None] - e4m3().double()).abs().argmin(-1)]
    assert parts[0].double().equal(nearest)


def test_it_serves_by_name_and_is_not_taken_by_itself() -> None:
    manager = PluginManager()
    assert manager.admit("lema-fp8", "fp8", lambda: plugin), manager.problems
    codec = WeightQuantizer(manager, "fp8").codec((4, 33), bits=8)
    assert (codec.backend, codec.format.name) == ("fp8", "fp8-e4m3")
    assert type(manager.wire_format("fp8-e4m3")) is Fp8Rows
    names = [each.name for each in manager.quant_backends()]
    assert names[-1] == "fp8" and manager.quant_backends()[-1].priority < 0


@pytest.mark.parametrize("rows", [1, 70])
def test_the_largest_number_is_exact(rows: int) -> None:
    weight = torch.randn(rows, 64, generator=torch.Generator().manual_seed(rows))
    parts = tuple(torch.zeros(part.shape, dtype=part.dtype) for part in Fp8Rows().parts((rows, 64)))
    Fp8Codec().encode(weight, parts)
    assert (parts[0].float().abs().amax(1) == 448).all()
