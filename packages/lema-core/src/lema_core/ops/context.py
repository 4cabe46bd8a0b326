"""What a forward pass carries besides activations. Shapes: B rows, T query tokens, S key tokens."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from lema_core.kv import KVCache


@dataclass(frozen=True)
class DropoutKey:
    """Names a random mask: equal keys and names give equal masks, so recomputation redraws what the forward pass
    drew."""

    seed: int
    step: int
    micro_batch: int

    def generator(self, name: str, device: torch.device) -> torch.Generator:
        text = f"{self.seed}/{self.step}/{self.micro_batch}/{name}".encode()
        seed = int.from_bytes(hashlib.blake2b(text, digest_size=7).digest(), "little")
        return torch.Generator(device).manual_seed(seed)

    def mask(self, name: str, like: Tensor, p: float) -> Tensor:
        """0 with probability p, else 1 / (1 - p); shape, dtype and device of ``like``."""
        if like.is_meta:
            return torch.empty_like(like)
        keep = torch.empty_like(like).bernoulli_(1 - p, generator=self.generator(name, like.device))
        return keep.div_(1 - p)


@dataclass
class ForwardContext:
    """``positions_BT``: each token's position. ``mask_BTS``: True where a query may see a key; None means plain causal.

    ``cache``: keys and values of earlier tokens, None outside generation. ``dropout``: None outside training.
    ``shared``: what an adapter's ``prepare`` computes once for all blocks.
    """

    positions_BT: Tensor
    mask_BTS: Tensor | None = None
    cache: KVCache | None = None
    dropout: DropoutKey | None = None
    shared: dict[str, Any] = field(default_factory=dict)


def attention_mask_BTS(valid_BS: Tensor, n_queries: int) -> Tensor | None:
    """Which keys the last ``n_queries`` tokens may see: earlier ones and themselves, without padding.

    ``valid_BS``: False at padding. None when plain causal attention does: real tokens never see padding on their right.
    A padding query sees itself, so that its softmax is defined; nothing reads its result.
    """
    n_keys = valid_BS.shape[1]
    if n_queries == n_keys:
        plain = bool(valid_BS[:, 0].all()) and bool((valid_BS[:, 1:] <= valid_BS[:, :-1]).all())
    else:
        plain = n_queries == 1 and bool(valid_BS.all())
    if plain:
        return None
    query = torch.arange(n_keys - n_queries, n_keys, device=valid_BS.device)
    key = torch.arange(n_keys, device=valid_BS.device)
    causal_TS = key[None, :] <= query[:, None]
    return (causal_TS & valid_BS[:, None, :]) | (key[None, :] == query[:, None])


def token_positions(valid_BS: Tensor) -> Tensor:
    """Positions that count real tokens only, 0 at left padding; int64 [B, S]."""
    return (valid_BS.long().cumsum(dim=1) - 1).clamp_(min=0)
