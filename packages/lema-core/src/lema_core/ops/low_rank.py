"""The low-rank update that rides on a streamed linear."""

from __future__ import annotations

from dataclasses import dataclass, field

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
    _kept: dict[Tensor, Tensor] = field(default_factory=dict, init=False, repr=False)

    @property
    def rank(self) -> int:
        return len(self.lora_A)

    def parameters(self) -> tuple[Tensor, Tensor]:
        return self.lora_A, self.lora_B

    def keep_gradients(self) -> None:
        """Make memory for gradients that stays from step to step: no gradient lies between activations then."""
        self._kept = {parameter: torch.zeros_like(parameter) for parameter in self.parameters()}

    def gradient(self, parameter: Tensor) -> Tensor:
        """``parameter.grad``; zeros, in the memory that is kept for it, where it has none."""
        if parameter.grad is None:
            kept = self._kept.get(parameter)
            parameter.grad = torch.zeros_like(parameter) if kept is None else kept.zero_()
        return parameter.grad
