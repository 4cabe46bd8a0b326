"""The exam of weight codecs: a plain one passes, and each fault that one may have is found by a test named for it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from lema_core.quantization.codec import WeightCodec, row_absmax, row_chunks
from lema_core.quantization.formats import Int8Rows, WirePart
from lema_core.testing.weight_codec_suite import WeightCodecSuite


class Plain(WeightCodec):
    """int8 in four lines."""

    format = Int8Rows()

    def encode(self, weight_rK: Tensor, parts: tuple[Tensor, ...]) -> None:
        for rows_rK, (codes_rK, scale_r), first in row_chunks(weight_rK, parts):
            scale_r.copy_(self.scales(rows_rK.float(), first).clamp(max=2.67e36))
            divisor_r1 = scale_r.where(scale_r > 0, 1)[:, None]
            codes_rK.copy_((rows_rK.float() / divisor_r1).round_().clamp_(-127, 127))

    def scales(self, rows_rK: Tensor, first: int) -> Tensor:
        return row_absmax(rows_rK, first) / 127


class Suite(WeightCodecSuite):
    most_error, most_row_error, least_number = 0.009, 0.5 / 127 * 1.01, 1e-36


class TestPlain(Suite):
    def make_codec(self) -> WeightCodec:
        return Plain()


class Coarse(Plain):
    def scales(self, rows_rK: Tensor, first: int) -> Tensor:
        return super().scales(rows_rK, first) * 2


class OneScale(Plain):
    def scales(self, rows_rK: Tensor, first: int) -> Tensor:
        return super().scales(rows_rK, first).amax().expand(len(rows_rK))


class Unchecked(Plain):
    def scales(self, rows_rK: Tensor, first: int) -> Tensor:
        return rows_rK.nan_to_num(0, 0, 0).abs().amax(1) / 127


class Wrapping(Plain):
    """Sums are not finite where numbers are huge."""

    def scales(self, rows_rK: Tensor, first: int) -> Tensor:
        return row_absmax(rows_rK, first) * 2 / 254


class Forgetful(Plain):
    """Leaves the last column as it was."""

    def encode(self, weight_rK: Tensor, parts: tuple[Tensor, ...]) -> None:
        kept = parts[0][:, -1].clone()
        super().encode(weight_rK, parts)
        parts[0][:, -1] = kept


class Spoiling(Plain):
    def encode(self, weight_rK: Tensor, parts: tuple[Tensor, ...]) -> None:
        super().encode(weight_rK, parts)
        weight_rK.zero_()


class Hungry(Plain):
    def encode(self, weight_rK: Tensor, parts: tuple[Tensor, ...]) -> None:
        super().encode(weight_rK.double().float(), parts)


class Exactly32(Plain):
    def encode(self, weight_rK: Tensor, parts: tuple[Tensor, ...]) -> None:
        super().encode(weight_rK if weight_rK.dtype == torch.float32 else weight_rK.float() * 1.01, parts)


class Biased(Plain):
    def scales(self, rows_rK: Tensor, first: int) -> Tensor:
        return super().scales(rows_rK, first) + 1e-3 * torch.rand(1)


class WholePart(Int8Rows):
    """Says that a weight has one scale."""

    def parts(self, shape: tuple[int, int]) -> tuple[WirePart, ...]:
        return WirePart("", torch.int8, shape), WirePart(".scale", torch.float32, (1,))


class NotByRow(Plain):
    format = WholePart()


FAULTS: dict[str, tuple[Callable[[], WeightCodec], str]] = {
    "coarse": (Coarse, "test_the_error_is_bounded"),
    "one scale": (OneScale, "test_one_large_number_spoils_its_own_row_at_most"),
    "one scale, cut": (OneScale, "test_any_cut_gives_the_same_bytes"),
    "unchecked": (Unchecked, "test_what_is_not_finite_is_refused"),
    "wrapping": (Wrapping, "test_tiny_and_huge_rows"),
    "forgetful": (Forgetful, "test_the_same_numbers_give_the_same_bytes"),
    "spoiling": (Spoiling, "test_the_same_numbers_give_the_same_bytes"),
    "hungry": (Hungry, "test_it_needs_little_memory"),
    "another dtype": (Exactly32, "test_the_numbers_count_and_not_their_dtype"),
    "random": (Biased, "test_the_same_numbers_give_the_same_bytes"),
    "not by row": (NotByRow, "test_the_format_says_what_lies_where"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_found(fault: str) -> None:
    make, test = FAULTS[fault]

    class Faulty(Suite):
        def make_codec(self) -> WeightCodec:
            return make()

    with pytest.raises((AssertionError, pytest.fail.Exception)):
        getattr(Faulty(), test)()
