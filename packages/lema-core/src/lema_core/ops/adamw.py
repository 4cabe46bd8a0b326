"""One AdamW update of one parameter (Loshchilov & Hutter 2019, "Decoupled Weight Decay Regularization",
arXiv:1711.05101, algorithm 2)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

#: numbers that torch gives to one thread at once, of which all that an update touches stays in its cache
_PIECE = 1 << 15


@dataclass(frozen=True)
class AdamWRates:
    """What an update depends on beside the tensors. ``step`` counts from 1; gradients count ``grad_scale`` times, as
    clipping or a scaled loss wants it."""

    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    step: int
    grad_scale: float = 1.0

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
    def update(
        self,
        param: Tensor,
        grad: Tensor,
        exp_avg: Tensor,
        exp_avg_sq: Tensor,
        rates: AdamWRates,
        threads: int | None = None,
    ) -> None:
        """In place but for the gradient, with g = ``grad_scale * grad`` rounded to fp32, moments m and v, t steps::

            m = b1 m + (1 - b1) g        v = b2 v + (1 - b2) g^2
            p = p (1 - lr w) - lr / (1 - b1^t) * m / (sqrt(v) / sqrt(1 - b2^t) + eps)

        At most ``threads`` compute, by default as many as torch has; the bits do not depend on it, nor on how a tensor
        is cut into calls. With ``threads=1`` the calling thread is alone and waits for nobody.
        """
        ...


class TorchAdamW:
    """The plain-torch kernel: rounds as ``torch.optim.AdamW(foreach=False)`` does, but for the square root, which is
    the nearest number on every CPU. Temporaries are small where all tensors are contiguous on the CPU."""

    def update(
        self,
        param: Tensor,
        grad: Tensor,
        exp_avg: Tensor,
        exp_avg_sq: Tensor,
        rates: AdamWRates,
        threads: int | None = None,
    ) -> None:
        tensors = (param, grad, exp_avg, exp_avg_sq)
        if not all(each.device.type == "cpu" and each.is_contiguous() for each in tensors):
            _update(*tensors, rates)
            return
        size = _PIECE * (threads or torch.get_num_threads())
        for piece in zip(*(each.view(-1).split(size) for each in tensors), strict=True):
            _update(*piece, rates)


class AdamWEither:
    """What is in RAM is updated by ``in_ram``, what is on the device by ``on_device``: a model's own weights are the
    one, LoRA weights the other."""

    def __init__(self, in_ram: AdamWKernel, on_device: AdamWKernel) -> None:
        self._in_ram = in_ram
        self._on_device = on_device

    def update(
        self,
        param: Tensor,
        grad: Tensor,
        exp_avg: Tensor,
        exp_avg_sq: Tensor,
        rates: AdamWRates,
        threads: int | None = None,
    ) -> None:
        kernel = self._in_ram if param.device.type == "cpu" else self._on_device
        kernel.update(param, grad, exp_avg, exp_avg_sq, rates, threads)


def _update(param: Tensor, grad: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, rates: AdamWRates) -> None:
    if rates.grad_scale != 1:
        grad = grad * rates.grad_scale
    if rates.weight_decay:
        param.mul_(rates.kept)
    exp_avg.lerp_(grad, 1 - rates.beta1)
    exp_avg_sq.mul_(rates.beta2).addcmul_(grad, grad, value=1 - rates.beta2)
    denominator = _root(exp_avg_sq).div_(rates.root_correction).add_(rates.eps)
    param.addcdiv_(exp_avg, denominator, value=-rates.corrected_lr)


def _root(values: Tensor) -> Tensor:
    # On a CPU torch's own root of fp32 is a unit off for some numbers, other ones from CPU to CPU; a double's is not
    # when it is rounded.
    return values.double().sqrt_().to(values.dtype) if values.device.type == "cpu" else values.sqrt()
