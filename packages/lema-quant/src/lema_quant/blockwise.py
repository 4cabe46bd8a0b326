"""States in 8 bits and 4 bytes per block of 256 (Dettmers et al. 2022, arXiv:2110.02861).

A record of n numbers: a code for each, filled up with zeros to a multiple of 64 bytes; an int32 header for each block,
filled up likewise. What codes and headers mean is in :mod:`lema_quant.roots` and :mod:`lema_quant.floats`. Every
operation is correctly rounded by IEEE 754 or on integers, so that other implementations can give the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from lema_quant import floats, roots

#: numbers of a block
BLOCK = 256
#: blocks worked on at a time: scratch of half a megabyte, which stays in a core's cache
_CHUNK = 128
_ALIGNMENT_BYTES = 64
_FORMATS = {"exp_avg": roots, "exp_avg_sq": floats, "grads": roots}

#: (values [K, B], codes [K, B], headers [K], scratch [S, K, B])
Work = Callable[[Tensor, Tensor, Tensor, Tensor], None]


class BlockwiseCodec:
    """Codec of one kind of state: ``exp_avg``, ``exp_avg_sq`` or ``grads``.

    Zero is exact, and a record of zero bytes holds zeros. Numbers that are not finite come back as NaN, with their
    block. A block's bits depend on its numbers alone. Calls from several threads do not meet.
    """

    def __init__(self, kind: str) -> None:
        if kind not in _FORMATS:
            raise ValueError(f"kind is {kind!r}, expected one of {', '.join(_FORMATS)}")
        self.kind = kind
        self._format = _FORMATS[kind]

    def nbytes(self, n: int) -> int:
        """Bytes of a record of ``n`` numbers, a multiple of 64."""
        return _codes_bytes(n) + _aligned(4 * -(-n // BLOCK))

    def encode(self, values: Tensor, encoded: Tensor) -> None:
        """fp32 [n] into uint8 [nbytes(n)], every byte of it."""
        n = len(values)
        self._check(values, encoded)
        encoded[n : _codes_bytes(n)].zero_()
        encoded[_codes_bytes(n) + 4 * -(-n // BLOCK) :].zero_()
        for chunk in self._chunks(values, encoded):
            self._format.encode(*chunk)

    def decode(self, encoded: Tensor, values: Tensor) -> None:
        """uint8 [nbytes(n)] into fp32 [n]."""
        self._check(values, encoded)
        for values_KB, codes_KB, headers_K, scratch_SKB in self._chunks(values, encoded):
            self._format.decode(codes_KB, headers_K, values_KB, scratch_SKB)

    def _chunks(self, values: Tensor, encoded: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor]]:
        """Values [K, B], codes [K, B], headers [K] and scratch [S, K, B] of some blocks after the other; what was
        changed of a last block that is not full is written back."""
        n = len(values)
        blocks = -(-n // BLOCK)
        full = n // BLOCK
        codes, headers = encoded[: _codes_bytes(n)], encoded[_codes_bytes(n) :][: 4 * blocks].view(torch.int32)
        scratch = values.new_empty(self._format.SCRATCH, min(_CHUNK, blocks), BLOCK)
        for first in range(0, full, _CHUNK):
            last = min(first + _CHUNK, full)
            of_chunk = slice(first * BLOCK, last * BLOCK)
            yield (
                values[of_chunk].view(-1, BLOCK),
                codes[of_chunk].view(-1, BLOCK),
                headers[first:last],
                scratch[:, : last - first],
            )
        if full < blocks:
            rest = slice(full * BLOCK, n)
            values_1B, codes_1B = values.new_zeros(1, BLOCK), codes.new_zeros(1, BLOCK)
            values_1B[0, : n % BLOCK], codes_1B[0, : n % BLOCK] = values[rest], codes[rest]
            yield values_1B, codes_1B, headers[full:], scratch[:, :1]
            values[rest], codes[rest] = values_1B[0, : n % BLOCK], codes_1B[0, : n % BLOCK]

    def _check(self, values: Tensor, encoded: Tensor) -> None:
        for what, tensor, dtype, length in (
            ("values", values, torch.float32, len(values)),
            ("encoded", encoded, torch.uint8, self.nbytes(len(values))),
        ):
            if tensor.dtype != dtype or tensor.shape != (length,) or not tensor.is_contiguous():
                raise ValueError(
                    f"{what} is {tensor.dtype} {list(tensor.shape)}, expected contiguous {dtype} [{length}]"
                )


def _codes_bytes(n: int) -> int:
    return _aligned(n)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
