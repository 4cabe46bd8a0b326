"""What a forward pass carries besides activations.

Shapes: B rows, T query tokens, S key tokens, N tokens of several micro-batches packed one after another, K features.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from lema_core.kv import KVCache


@dataclass(frozen=True)
class Segment:
    """One micro-batch among packed ones: columns ``start:stop`` are ``rows`` times ``tokens``, row after row.

    ``mask_BTS``: True where a query may see a key of its row; None means plain causal.
    """

    start: int
    stop: int
    rows: int
    tokens: int
    micro_batch: int = 0
    mask_BTS: Tensor | None = None


@dataclass(frozen=True)
class Dropout:
    """Random masks by name: equal seeds, steps, micro-batches and names give equal masks, so recomputation redraws what
    the forward pass drew, and a micro-batch has the same ones alone and packed."""

    seed: int
    step: int
    segments: Sequence[Segment]

    def mask(self, name: str, x_KN: Tensor, p: float) -> Tensor:
        """0 with probability p, else 1 / (1 - p); shape, dtype and device of ``x_KN``."""
        masks = [
            self.mask_of(name, segment, x_KN.new_empty(len(x_KN), segment.stop - segment.start), p)
            for segment in self.segments
        ]
        return masks[0] if len(masks) == 1 else torch.cat(masks, dim=1)

    def mask_of(self, name: str, segment: Segment, out: Tensor, p: float) -> Tensor:
        """``out``, filled with the mask of one micro-batch."""
        generator = self._generator(name, segment.micro_batch, out.device)
        return out.bernoulli_(1 - p, generator=generator).div_(1 - p)

    def _generator(self, name: str, micro_batch: int, device: torch.device) -> torch.Generator:
        text = f"{self.seed}/{self.step}/{micro_batch}/{name}".encode()
        seed = int.from_bytes(hashlib.blake2b(text, digest_size=7).digest(), "little")
        return torch.Generator(device).manual_seed(seed)


@dataclass
class ForwardContext:
    """``positions_BT``: each token's position, [1, N] for packed micro-batches. ``mask_BTS``: True where a query may
    see a key; None means plain causal; packed micro-batches have theirs in ``segments``. ``valid_BT``: False at
    padding, None where no token follows any; ``real_BT``: False at any padding, None where there is none.

    ``segments``: the packed micro-batches, empty outside training; ``shares``: each one's of the step's targets.
    ``cache``: keys and values of earlier tokens, None outside generation. ``shared``: what an adapter's ``prepare``
    computes once for all blocks. ``within``: the same with the masks of each sliding window that is shorter than the
    rows.
    """

    positions_BT: Tensor
    mask_BTS: Tensor | None = None
    cache: KVCache | None = None
    valid_BT: Tensor | None = None
    real_BT: Tensor | None = None
    segments: tuple[Segment, ...] = ()
    shares: tuple[float, ...] = ()
    shared: dict[str, Any] = field(default_factory=dict)
    within: Mapping[int, ForwardContext] = field(default_factory=dict)

    def seen(self, window: int | None) -> ForwardContext:
        """This context with what a query sees under a sliding window, None for all keys before it."""
        return self if window is None else self.within.get(window, self)


def sliding(ctx: ForwardContext, windows: Iterable[int], rows: int, n_queries: int) -> dict[int, ForwardContext]:
    """``ctx`` under each of ``windows`` that hides something: a query sees so many keys at most, itself included.

    Keys count by their place in the row, padding included, as in transformers. ``rows``, ``n_queries``: of ``ctx``
    without segments, where the last queries may follow cached keys.
    """
    found: dict[int, ForwardContext] = {}
    for window in windows:
        if ctx.segments:
            segments = tuple(_narrowed_segment(segment, window, ctx.positions_BT.device) for segment in ctx.segments)
            # not !=, which would compare masks element by element
            if any(new is not old for new, old in zip(segments, ctx.segments, strict=True)):
                found[window] = replace(ctx, segments=segments)
            continue
        n_keys = n_queries + (0 if ctx.cache is None else ctx.cache.length)
        if n_keys > window:
            mask_BTS = _narrowed(ctx.mask_BTS, window, rows, n_queries, n_keys, ctx.positions_BT.device)
            found[window] = replace(ctx, mask_BTS=mask_BTS)
    return found


def _narrowed_segment(segment: Segment, window: int, device: torch.device) -> Segment:
    if segment.tokens <= window:
        return segment
    shape = segment.rows, segment.tokens, segment.tokens
    return replace(segment, mask_BTS=_narrowed(segment.mask_BTS, window, *shape, device))


def _narrowed(
    mask_BTS: Tensor | None, window: int, rows: int, n_queries: int, n_keys: int, device: torch.device
) -> Tensor:
    query = torch.arange(n_keys - n_queries, n_keys, device=device)[:, None]
    key = torch.arange(n_keys, device=device)[None]
    near_TS = key > query - window
    if mask_BTS is None:
        return (near_TS & (key <= query)).expand(rows, -1, -1).contiguous()
    return mask_BTS & near_TS


def attention_mask_BTS(valid_BS: Tensor, n_queries: int) -> Tensor | None:
    """Which keys the last ``n_queries`` tokens may see: earlier ones and themselves, without padding.

    ``valid_BS``: False at padding. None when plain causal attention does. A padding query sees itself, so that its
    softmax is defined; nothing reads its result.
    """
    if not needs_mask(valid_BS, n_queries):
        return None
    n_keys = valid_BS.shape[1]
    query = torch.arange(n_keys - n_queries, n_keys, device=valid_BS.device)
    key = torch.arange(n_keys, device=valid_BS.device)
    causal_TS = key[None, :] <= query[:, None]
    return (causal_TS & valid_BS[:, None, :]) | (key[None, :] == query[:, None])


def needs_mask(valid_BS: Tensor, n_queries: int) -> bool:
    """False where plain causal attention does: real tokens never see padding on their right."""
    if n_queries == valid_BS.shape[1]:
        return not (bool(valid_BS[:, 0].all()) and bool((valid_BS[:, 1:] <= valid_BS[:, :-1]).all()))
    return not (n_queries == 1 and bool(valid_BS.all()))


def token_positions(valid_BS: Tensor) -> Tensor:
    """Positions that count real tokens only, 0 at left padding; int64 [B, S]."""
    return (valid_BS.long().cumsum(dim=1) - 1).clamp_(min=0)
