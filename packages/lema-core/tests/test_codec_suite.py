"""StateCodecSuite passes what is exact, and fails codecs that are wrong in one place each."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from lema_core.testing.codec_suite import StateCodecSuite


class ExactCodec:
    """fp32 as it is."""

    def __init__(self, kind: str) -> None:
        self.kind = kind

    def nbytes(self, n: int) -> int:
        return 4 * n

    def encode(self, values: Tensor, encoded: Tensor) -> None:
        encoded.view(torch.float32).copy_(values)

    def decode(self, encoded: Tensor, values: Tensor) -> None:
        values.copy_(encoded.view(torch.float32))


class TestExactCodec(StateCodecSuite):
    most_bytes = 4.0
    most_error = most_drift = most_added_error = 1e-6
    most_moved = 1.5
    least_share = 1.0

    def make_codec(self, kind: str) -> ExactCodec:
        return ExactCodec(kind)


class Linear(ExactCodec):
    """The obvious 8 bits: 127 even steps up to a block's largest, rounded to the nearest."""

    def nbytes(self, n: int) -> int:
        return n + -n % 4 + 4 * -(-n // 256)

    def encode(self, values: Tensor, encoded: Tensor) -> None:
        n = len(values)
        headers = encoded[n + -n % 4 :].view(torch.float32)
        encoded[n : n + -n % 4] = 0
        for block, header in zip(range(0, n, 256), headers, strict=True):
            part = values[block : block + 256]
            header.copy_(part.abs().amax())
            codes = part / header.clamp(min=1e-30) * 127
            encoded[:n].view(torch.int8)[block : block + 256] = codes.nan_to_num(0).round().clamp(-127, 127)

    def decode(self, encoded: Tensor, values: Tensor) -> None:
        n = len(values)
        headers = encoded[n + -n % 4 :].view(torch.float32)
        for block, header in zip(range(0, n, 256), headers, strict=True):
            values[block : block + 256] = encoded[:n].view(torch.int8)[block : block + 256] * (header / 127)


class RoundsToTheNearest(ExactCodec):
    """bf16: 0.4 % of error, and changes by 0.1 % are lost."""

    def encode(self, values: Tensor, encoded: Tensor) -> None:
        super().encode(values.bfloat16().float(), encoded)


class MovesZeros(ExactCodec):
    def decode(self, encoded: Tensor, values: Tensor) -> None:
        super().decode(encoded, values)
        values.clamp_(min=1e-12)


class HidesInfinities(ExactCodec):
    def encode(self, values: Tensor, encoded: Tensor) -> None:
        super().encode(values.nan_to_num(), encoded)


class KeepsWhatLayThere(ExactCodec):
    def nbytes(self, n: int) -> int:
        return 4 * n + 4

    def encode(self, values: Tensor, encoded: Tensor) -> None:
        super().encode(values, encoded[:-4])

    def decode(self, encoded: Tensor, values: Tensor) -> None:
        super().decode(encoded[:-4], values)


class NeedsACopy(ExactCodec):
    def encode(self, values: Tensor, encoded: Tensor) -> None:
        super().encode(values.clone(), encoded)


class RoundsAnew(ExactCodec):
    """What comes back is between two codes again."""

    def encode(self, values: Tensor, encoded: Tensor) -> None:
        super().encode(values * (1 - 2**-20), encoded)


CAUGHT: dict[type[ExactCodec], set[str]] = {
    Linear: {"nothing_of_exp_avg_sq_is_lost", "no_update_explodes"},
    RoundsToTheNearest: {"exp_avg_sq_follows_small_changes"},
    MovesZeros: {"zero_bytes_are_zeros_and_zeros_stay_zeros", "weights_without_gradient_do_not_move"},
    HidesInfinities: {"what_is_not_finite_is_seen"},
    KeepsWhatLayThere: {"the_same_numbers_give_the_same_bytes"},
    NeedsACopy: {"it_needs_little_memory"},
    RoundsAnew: {"decoded_gradients_encode_as_they_were"},
}


def suite_for(codec: Callable[[str], ExactCodec]) -> StateCodecSuite:
    class Tested(StateCodecSuite):
        def make_codec(self, kind: str) -> ExactCodec:
            return codec(kind)

    return Tested()


@pytest.mark.parametrize(
    ("codec", "test"), [(codec, test) for codec, tests in CAUGHT.items() for test in sorted(tests)]
)
def test_a_faulty_codec_is_caught(codec: type[ExactCodec], test: str) -> None:
    with pytest.raises(AssertionError):
        getattr(suite_for(codec), f"test_{test}")()
