"""The KV cache: what it keeps, how it grows, what it refuses."""

from __future__ import annotations

import pytest
import torch

from lema_core.errors import BudgetError
from lema_core.kv import KVCache

B, H, D = 2, 3, 4


@pytest.mark.parametrize("chunk", [1, 4, 100])
@pytest.mark.parametrize("steps", [[5], [1, 1, 1], [3, 1, 4, 1, 2], [11]])
def test_all_tokens_so_far_come_back(chunk: int, steps: list[int]) -> None:
    cache = KVCache(2, (B, H, D), max_tokens=11, chunk_size=chunk)
    keys = torch.randn(2, B, H, 11, D)
    values = torch.randn(2, B, H, 11, D)
    done = 0
    for n in steps:
        for layer in range(2):
            k, v = cache.append(layer, keys[layer, :, :, done : done + n], values[layer, :, :, done : done + n])
            assert torch.equal(k, keys[layer, :, :, : done + n]) and torch.equal(v, values[layer, :, :, : done + n])
        done += n
        assert cache.length == done
        capacity = min(-(-done // chunk) * chunk, 11)
        assert cache.nbytes == 2 * 2 * B * H * D * 4 * capacity, "grows by whole chunks, never past the end"


def test_storage_has_the_dtype_asked_for() -> None:
    cache = KVCache(1, (B, H, D), 8, 8, torch.bfloat16)
    k, _ = cache.append(0, torch.ones(B, H, 1, D), torch.ones(B, H, 1, D))
    assert k.dtype == torch.bfloat16 and cache.nbytes == 2 * B * H * D * 2 * 8


def test_a_budget_is_held_before_anything_is_allocated() -> None:
    needed = 2 * 5 * B * H * D * 1000 * 4
    KVCache(5, (B, H, D), 1000, 10, budget_bytes=needed)
    with pytest.raises(BudgetError, match=rf"1000 tokens needs {needed:,} bytes, {needed - 1:,} are given"):
        KVCache(5, (B, H, D), 1000, 10, budget_bytes=needed - 1)


def test_more_tokens_than_it_was_made_for_are_refused() -> None:
    cache = KVCache(1, (B, H, D), 3, 2, budget_bytes=1 << 20)
    cache.append(0, torch.ones(B, H, 3, D), torch.ones(B, H, 3, D))
    with pytest.raises(BudgetError, match="made for 3 tokens, 4 are put"):
        cache.append(0, torch.ones(B, H, 1, D), torch.ones(B, H, 1, D))
    assert cache.length == 3
