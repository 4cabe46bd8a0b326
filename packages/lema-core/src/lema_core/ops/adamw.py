"""One AdamW update of one parameter (Loshchilov & Hutter 2019, "Decoupled Weight Decay Regularization",
arXiv:1711.05101, algorithm 2)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor


@dataclass(frozen=True)
class AdamWRates:
    """What an update depends on beside the tensors. ``step`` counts from 1."""

    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    step: int

    @property
    def kept(self) -> float:
        """What weight decay leaves of a parameter."""
        return 1 - self.lr * self.weight_decay

    @property
    def corrected_lr(self) -> float:
        """``lr`` over the bias of ``exp_avg``."""
        return self.lr / (1 - self.beta1**self.step)

    @property
    def root_correction(self) -> float:
        """Root of the bias of ``exp_avg_sq``."""
        return (1 - self.beta2**self.step) ** 0.5


class AdamWKernel(Protocol):
    def update(self, param: Tensor, grad: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, rates: AdamWRates) -> None:
        """In place, with gradient g, moments m and v, t steps::

        m = b1 m + (1 - b1) g        v = b2 v + (1 - b2) g^2
        p = p (1 - lr w) - lr / (1 - b1^t) * m / (sqrt(v) / sqrt(1 - b2^t) + eps)
        """
        ...


class TorchAdamW:
    """The plain-torch kernel: rounds as ``torch.optim.AdamW(foreach=False)`` does, with one temporary."""

    def update(self, param: Tensor, grad: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, rates: AdamWRates) -> None:
        if rates.weight_decay:
            param.mul_(rates.kept)
        exp_avg.lerp_(grad, 1 - rates.beta1)
        exp_avg_sq.mul_(rates.beta2).addcmul_(grad, grad, value=1 - rates.beta2)
        denominator = exp_avg_sq.sqrt().div_(rates.root_correction).add_(rates.eps)
        param.addcdiv_(exp_avg, denominator, value=-rates.corrected_lr)
