"""Records: their layout, their independence, what is refused, and the way in through the hook."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lema_core.plugins import get_plugin_manager
from lema_core.records import load_object
from lema_quant.blockwise import BLOCK, BlockwiseCodec

KINDS = ("exp_avg", "exp_avg_sq", "grads")


def values_of(kind: str, n: int, seed: int = 0) -> Tensor:
    values = torch.randn(n, generator=torch.Generator().manual_seed(seed))
    return values.square() if kind == "exp_avg_sq" else values


def encode(codec: BlockwiseCodec, values: Tensor) -> Tensor:
    encoded = torch.empty(codec.nbytes(len(values)), dtype=torch.uint8)
    codec.encode(values, encoded)
    return encoded


def test_it_comes_through_the_hook() -> None:
    record = get_plugin_manager().state_codec(8)
    assert (record.name, record.bits, load_object(record.codec)) == ("blockwise", 8, BlockwiseCodec)


@pytest.mark.parametrize(
    ("n", "nbytes"), [(0, 0), (1, 128), (64, 128), (65, 192), (256, 320), (257, 384), (4097, 4288), (1 << 20, 65 << 14)]
)
def test_sizes(n: int, nbytes: int) -> None:
    assert BlockwiseCodec("grads").nbytes(n) == nbytes


@settings(max_examples=40, deadline=None)
@given(st.sampled_from(KINDS), st.integers(0, 1200), st.integers(0, 1200), st.integers(0, 100))
def test_a_block_depends_on_nothing_else(kind: str, before: int, n: int, seed: int) -> None:
    """Whole blocks before it, and what follows, change no bit of its codes, header or numbers."""
    codec = BlockwiseCodec(kind)
    start = before // BLOCK * BLOCK
    values = torch.cat([values_of(kind, start, seed + 1), values_of(kind, n, seed)])
    whole, alone = encode(codec, values), encode(codec, values[start:].clone())
    assert whole[start : start + n].equal(alone[:n])
    back, back_alone = torch.empty(start + n), torch.empty(n)
    codec.decode(whole, back)
    codec.decode(alone, back_alone)
    assert back[start:].equal(back_alone)


def test_records_longer_than_what_is_worked_on_at_a_time() -> None:
    n = 300 * BLOCK + 77
    for kind in KINDS:
        codec, values = BlockwiseCodec(kind), values_of(kind, n)
        whole, back = encode(codec, values), torch.empty(n)
        codec.decode(whole, back)
        for start in range(0, n, 100 * BLOCK):
            part = values[start : start + 100 * BLOCK].clone()
            encoded, back_part = encode(codec, part), torch.empty_like(part)
            codec.decode(encoded, back_part)
            assert encoded[: len(part)].equal(whole[start : start + len(part)])
            assert back_part.equal(back[start : start + len(part)])


def test_several_threads_at_once() -> None:
    codec = BlockwiseCodec("exp_avg_sq")
    inputs = [values_of("exp_avg_sq", 50_000, seed) for seed in range(8)]
    expected = [encode(codec, values) for values in inputs]
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda values: encode(codec, values), inputs))
    assert all(a.equal(b) for a, b in zip(found, expected, strict=True))


def test_the_number_of_torch_threads_changes_nothing() -> None:
    codec, values = BlockwiseCodec("exp_avg"), values_of("exp_avg", 200_000)
    one = encode(codec, values)
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        assert encode(codec, values).equal(one)
    finally:
        torch.set_num_threads(threads)


def test_a_record_may_lie_anywhere_in_a_file() -> None:
    codec, values = BlockwiseCodec("grads"), values_of("grads", 700)
    nbytes = codec.nbytes(700)
    held = torch.zeros(nbytes + 128, dtype=torch.uint8)
    codec.encode(values, held[64 : 64 + nbytes])
    assert held[64 : 64 + nbytes].equal(encode(codec, values))
    assert not held[:64].any() and not held[64 + nbytes :].any()


def test_what_does_not_fit_is_refused() -> None:
    codec = BlockwiseCodec("grads")
    record, values = torch.zeros(codec.nbytes(10), dtype=torch.uint8), torch.zeros(10)
    for wrong in (torch.zeros(10, dtype=torch.float64), torch.zeros(2, 5), torch.zeros(20)[::2]):
        with pytest.raises(ValueError, match=r"^values is .*, expected contiguous torch.float32 \[\d+\]$"):
            codec.encode(wrong, record)
    with pytest.raises(ValueError, match=r"^encoded is torch.uint8 \[64\], expected contiguous torch.uint8 \[128\]$"):
        codec.decode(record[:64], values)
    with pytest.raises(ValueError, match="kind is 'weights', expected one of exp_avg, exp_avg_sq, grads"):
        BlockwiseCodec("weights")
