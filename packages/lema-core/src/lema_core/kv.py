"""Keys and values of the tokens generated so far.

Shapes: B rows, H key/value heads, T new tokens, S all tokens, D head size.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lema_core.errors import BudgetError


class KVCache:
    """Grows by ``chunk_size`` tokens per layer, up to ``max_tokens``; the bytes of that, for ``cached_layers`` (None:
    all), are checked against ``budget_bytes`` first. ``states``: what other layers carry from token to token."""

    def __init__(
        self,
        n_layers: int,
        shape_BHD: tuple[int, int, int],
        max_tokens: int,
        chunk_size: int,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        budget_bytes: int | None = None,
        cached_layers: int | None = None,
    ) -> None:
        self.states: dict[int, Tensor] = {}
        self._keys: list[Tensor | None] = [None] * n_layers
        self._values: list[Tensor | None] = [None] * n_layers
        self._lengths = [0] * n_layers
        self._shape = shape_BHD
        self._chunk_size = chunk_size
        self._max_tokens = max_tokens
        self._dtype = dtype
        self._device = device
        b, h, d = shape_BHD
        cached = n_layers if cached_layers is None else cached_layers
        needed = 2 * cached * b * h * d * max_tokens * dtype.itemsize
        if budget_bytes is not None and needed > budget_bytes:
            raise BudgetError(
                f"the KV cache of {max_tokens} tokens needs {needed:,} bytes, {budget_bytes:,} are given; "
                "raise kv_vram (on a CPU kv_ram too) or lower max_new_tokens"
            )

    @property
    def length(self) -> int:
        """Tokens that the layers which keep any have seen."""
        return max(self._lengths)

    @property
    def nbytes(self) -> int:
        """Bytes allocated now."""
        return sum(t.numel() * t.element_size() for t in (*self._keys, *self._values) if t is not None)

    def append(self, layer: int, k_BHTD: Tensor, v_BHTD: Tensor) -> tuple[Tensor, Tensor]:
        """Add new tokens of one layer; returns all keys and values so far, [B, H, S, D]. Raises BudgetError past
        ``max_tokens``."""
        start = self._lengths[layer]
        stop = start + k_BHTD.shape[2]
        if stop > self._max_tokens:
            raise BudgetError(f"the KV cache was made for {self._max_tokens} tokens, {stop} are put into it")
        keys = self._keys[layer] = self._grown(self._keys[layer], start, stop)
        values = self._values[layer] = self._grown(self._values[layer], start, stop)
        keys[:, :, start:stop] = k_BHTD
        values[:, :, start:stop] = v_BHTD
        self._lengths[layer] = stop
        return keys[:, :, :stop], values[:, :, :stop]

    def _grown(self, held: Tensor | None, length: int, wanted: int) -> Tensor:
        if held is not None and held.shape[2] >= wanted:
            return held
        b, h, d = self._shape
        capacity = min(-(-wanted // self._chunk_size) * self._chunk_size, self._max_tokens)
        grown = torch.empty(b, h, capacity, d, dtype=self._dtype, device=self._device)
        if held is not None:
            grown[:, :, :length] = held[:, :, :length]
        return grown
