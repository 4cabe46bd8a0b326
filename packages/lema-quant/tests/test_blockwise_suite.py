"""The 8-bit codecs in the exam that all codecs take."""

from __future__ import annotations

from lema_core.testing.codec_suite import StateCodecSuite
from lema_quant.blockwise import BlockwiseCodec


class TestBlockwiseCodec(StateCodecSuite):
    def make_codec(self, kind: str) -> BlockwiseCodec:
        return BlockwiseCodec(kind)
