"""What one forward pass is given. Shapes: B rows, T tokens, N = B * T."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from lema_core.errors import DataError

#: labels that are not supervised, as in torch's cross_entropy
IGNORE_INDEX = -100


@dataclass(frozen=True)
class TokenBatch:
    """``input_ids`` int64 [B, T]; ``attention_mask`` bool [B, T], False at padding; ``labels`` int64 [B, T] or None.

    A token's label is at its own place; the shift by one happens here: position t predicts ``labels[:, t + 1]``.
    """

    input_ids: Tensor
    attention_mask: Tensor
    labels: Tensor | None = None

    @classmethod
    def of(cls, input_ids: Tensor, attention_mask: Tensor | None = None, labels: Tensor | None = None) -> TokenBatch:
        """Accepts [T] or [B, T], any integer mask; all tensors are brought to the CPU, where rows are looked up.

        Raises DataError for no tokens, and for a mask or labels of another shape.
        """
        input_ids = input_ids.detach().to("cpu", torch.int64)
        if input_ids.ndim == 1:
            input_ids = input_ids[None]
        if input_ids.ndim != 2 or input_ids.numel() == 0:
            raise DataError(
                f"input_ids: expected [rows, tokens] with at least one token, found {list(input_ids.shape)}"
            )
        mask = torch.ones_like(input_ids, dtype=torch.bool)
        if attention_mask is not None:
            mask = _beside("attention_mask", attention_mask, input_ids).to(torch.bool)
        if labels is not None:
            labels = _beside("labels", labels, input_ids).to(torch.int64)
        return cls(input_ids, mask, labels)

    def check_ids(self, vocab_size: int) -> None:
        """Raises DataError naming row, position and id of the first id outside the vocabulary, or label likewise."""
        for what, ids in (("id", self.input_ids), ("label", self.labels)):
            if ids is None:
                continue
            bad = (ids < 0) | (ids >= vocab_size)
            if what == "label":
                bad &= ids != IGNORE_INDEX
            if bad.any():
                row, position = bad.nonzero()[0].tolist()
                raise DataError(
                    f"row {row}, position {position}: {what} {ids[row, position].item()} "
                    f"is outside the vocabulary of {vocab_size}"
                )

    def rows(self, start: int, stop: int) -> TokenBatch:
        labels = None if self.labels is None else self.labels[start:stop]
        return TokenBatch(self.input_ids[start:stop], self.attention_mask[start:stop], labels)

    @cached_property
    def supervised(self) -> tuple[Tensor, Tensor]:
        """Flat positions (int64, into N) that have a target, and the targets.

        Padding neither is a target nor has one: what precedes a left-padded row's first token predicts nothing.
        """
        if self.labels is None:
            raise DataError("labels are missing: give labels, or input_ids as labels")
        targets = torch.full_like(self.labels, IGNORE_INDEX)
        real = self.attention_mask[:, 1:] & self.attention_mask[:, :-1]
        targets[:, :-1] = self.labels[:, 1:].masked_fill(~real, IGNORE_INDEX)
        flat = targets.reshape(-1)
        positions = (flat != IGNORE_INDEX).nonzero().squeeze(1)
        return positions, flat[positions]

    @property
    def n_targets(self) -> int:
        return self.supervised[0].numel()


def _beside(what: str, tensor: Tensor, input_ids: Tensor) -> Tensor:
    tensor = tensor.detach().to("cpu")
    if tensor.ndim == 1:
        tensor = tensor[None]
    if tensor.shape != input_ids.shape:
        raise DataError(
            f"{what}: the shape of input_ids, {list(input_ids.shape)}, expected, {list(tensor.shape)} found"
        )
    return tensor


def total_targets(batches: Sequence[TokenBatch]) -> int:
    return sum(batch.n_targets for batch in batches)
