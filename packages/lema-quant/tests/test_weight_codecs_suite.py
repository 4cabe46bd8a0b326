"""Every codec of this package in the exam that all codecs take; libraries that are not installed are skipped."""

from __future__ import annotations

import pytest

from lema_core.quantization.codec import WeightCodec
from lema_core.testing.weight_codec_suite import WeightCodecSuite
from lema_quant.custom import codecs
from lema_quant.custom.int4 import Int4Codec
from lema_quant.custom.int8 import Int8Codec
from lema_quant.custom.nf4 import NF4Codec


class Int8Suite(WeightCodecSuite):
    most_error, most_row_error, least_number = 0.009, 0.5 / 127 * 1.001, 1e-36
    most_bytes = 1.001


class Int4Suite(WeightCodecSuite):
    most_error, most_row_error = 0.1, 0.126
    least_number = 1e-38
    most_bytes = 0.563


class NF4Suite(WeightCodecSuite):
    # The two largest values that codes have are -1 and -0.696.
    most_error, most_row_error = 0.1, 0.153
    least_number = 1e-37
    most_bytes = 0.563


class TestCustomInt8(Int8Suite):
    def make_codec(self) -> WeightCodec:
        return Int8Codec()


class TestCustomInt4Groups32(Int4Suite):
    def make_codec(self) -> WeightCodec:
        return Int4Codec(32)


class TestCustomInt4Groups64(Int4Suite):
    most_bytes = 0.532

    def make_codec(self) -> WeightCodec:
        return Int4Codec(64)


class TestCustomInt4Groups128(Int4Suite):
    most_error, most_bytes = 0.11, 0.516

    def make_codec(self) -> WeightCodec:
        return Int4Codec(128)


class TestCustomNF4(NF4Suite):
    def make_codec(self) -> WeightCodec:
        return NF4Codec()


def native(codec: codecs.NativeOrTorch) -> WeightCodec:
    if not codec.is_native:
        pytest.skip("no native kernel for it is installed")
    return codec


class TestNativeInt8(Int8Suite):
    def make_codec(self) -> WeightCodec:
        return native(codecs.int8())


class TestNativeInt4Groups32(Int4Suite):
    def make_codec(self) -> WeightCodec:
        return native(codecs.int4_32())


class TestNativeInt4Groups128(Int4Suite):
    most_error, most_bytes = 0.11, 0.516

    def make_codec(self) -> WeightCodec:
        return native(codecs.int4_128())


class TestNativeNF4(NF4Suite):
    def make_codec(self) -> WeightCodec:
        return native(codecs.nf4())


class TestTorchaoInt8(Int8Suite):
    def make_codec(self) -> WeightCodec:
        pytest.importorskip("torchao.quantization")
        from lema_quant.backends.torchao import TorchaoInt8

        return TorchaoInt8()


class TestQuantoInt8(Int8Suite):
    def make_codec(self) -> WeightCodec:
        pytest.importorskip("optimum.quanto")
        from lema_quant.backends.quanto import QuantoInt8

        return QuantoInt8()


class TestBitsandbytesInt8(Int8Suite):
    def make_codec(self) -> WeightCodec:
        pytest.importorskip("bitsandbytes")
        from lema_quant.backends.bitsandbytes import BitsandbytesInt8

        return BitsandbytesInt8()


class TestBitsandbytesNF4(NF4Suite):
    def make_codec(self) -> WeightCodec:
        pytest.importorskip("bitsandbytes")
        from lema_quant.backends.bitsandbytes import BitsandbytesNF4

        return BitsandbytesNF4()
