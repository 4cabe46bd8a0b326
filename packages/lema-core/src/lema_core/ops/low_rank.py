"""The low-rank update that rides on a streamed linear."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor


@dataclass
class LowRankUpdate:
    """``y += scale * (dropout(x) @ lora_A.T) @ lora_B.T`` beside a frozen ``y = x @ W.T``.

    Hu et al. 2021, "LoRA: Low-Rank Adaptation of Large Language Models" (arXiv:2106.09685), section 4.1.
    ``lora_A`` [r, in] and ``lora_B`` [out, r] are fp32 leaves with ``requires_grad``; ``scale`` is alpha / r (alpha /
    sqrt(r) for rank-stabilised LoRA); ``dropout`` is the probability that an element of the branch's input is zeroed in
    training.
    """

    lora_A: Tensor
    lora_B: Tensor
    scale: float
    dropout: float

    def on_meta(self) -> LowRankUpdate:
        """The same shapes without numbers, for a step that is only traced."""
        a, b = (torch.empty_like(t, device="meta", requires_grad=t.requires_grad) for t in (self.lora_A, self.lora_B))
        return replace(self, lora_A=a, lora_B=b)
