"""Greedy generation with a KV cache over streamed weights."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

import torch

from lema_core.errors import DataError
from lema_core.kv import KVCache
from lema_core.runtime.batch import TokenBatch
from lema_core.runtime.runner import ModelRunner


def generate_greedy(
    runner: ModelRunner,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    stop_ids: Collection[int] = (),
    chunk_size: int = 8192,
    budget_bytes: int | None = None,
    on_token: Callable[[int, int], None] | None = None,
) -> list[list[int]]:
    """New ids of each prompt, the stop id included; ``on_token(row, id)`` is told of each as it comes.

    Prompts of unequal length are padded on the left. A row that stopped is carried along until all have. Raises
    DataError for an empty prompt, an id outside the vocabulary or more tokens than positions, BudgetError when the
    cache cannot fit.
    """
    if not prompts:
        return []
    if any(len(prompt) == 0 for prompt in prompts):
        raise DataError("a prompt has no tokens; give at least one (the tokenizer's BOS, say)")
    longest = max(len(prompt) for prompt in prompts)
    # The last new token is not looked at any more.
    runner.check_length(longest + max(0, max_new_tokens - 1), "shorten the prompt or lower max_new_tokens")
    ids_BT = torch.zeros(len(prompts), longest, dtype=torch.int64)
    valid_BS = torch.zeros(len(prompts), longest, dtype=torch.bool)
    for row, prompt in enumerate(prompts):
        ids_BT[row, longest - len(prompt) :] = torch.tensor(prompt)
        valid_BS[row, longest - len(prompt) :] = True
    batch = TokenBatch(ids_BT, valid_BS)
    batch.check_ids(runner.adapter.vocab_size)
    heads, head_dim = runner.adapter.cache_shape()
    cache = KVCache(
        runner.adapter.n_layers,
        (len(prompts), heads, head_dim),
        longest + max_new_tokens,
        chunk_size,
        runner.dtype,
        runner.store.device.torch_device,
        budget_bytes,
        runner.adapter.cached_layers,
    )
    new_ids: list[list[int]] = [[] for _ in prompts]
    running = set(range(len(prompts)))
    for _ in range(max_new_tokens):
        chosen = runner.next_logits(batch, cache).argmax(dim=-1)
        for row in sorted(running):
            token = int(chosen[row])
            new_ids[row].append(token)
            if on_token is not None:
                on_token(row, token)
            if token in stop_ids:
                running.discard(row)
        if not running:
            break
        valid_BS = torch.cat((valid_BS, torch.ones(len(prompts), 1, dtype=torch.bool)), dim=1)
        batch = TokenBatch(chosen[:, None], valid_BS)
    return new_ids
