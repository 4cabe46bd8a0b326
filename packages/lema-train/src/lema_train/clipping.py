"""Gradient clipping by global norm (Pascanu et al. 2013, arXiv:1211.5063), and the check that all are finite.

The norm is over all gradients: each tensor's norm in fp32, their squares summed exactly, so the order in which
layers became ready does not matter. One infinite or NaN element makes it non-finite; then nothing is scaled, and
the caller leaves the whole step out: no weight and no moment of any layer may change.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from lema_core.errors import ConfigError


class ClipResult(NamedTuple):
    """``norm`` before clipping; ``non_finite`` names the first tensor with an infinite or NaN element, if any."""

    norm: float
    non_finite: str | None

    @property
    def finite(self) -> bool:
        return self.non_finite is None


@torch.no_grad()
def clip_(grads: Mapping[str, Tensor], max_norm: float | None) -> ClipResult:
    """Scale ``grads`` in place so that their global norm is at most ``max_norm`` (None: only measure).

    The factor is ``max_norm / (norm + 1e-6)`` where that is below 1, as in ``torch.nn.utils.clip_grad_norm_``.
    Raises ConfigError for a ``max_norm`` that is not above 0.
    """
    if max_norm is not None and not max_norm > 0:
        raise ConfigError(f"max_grad_norm: a number above 0, or none, expected, {max_norm!r} found")
    if not grads:
        return ClipResult(0.0, None)
    # one copy to the host for all tensors, not one per tensor
    norms = torch.stack([torch.linalg.vector_norm(grad, dtype=torch.float32) for grad in grads.values()]).tolist()
    for index, (name, grad) in enumerate(grads.items()):
        if not math.isfinite(norms[index]):
            # the squares of finite values above 1.8e19 overflow in fp32
            norms[index] = float(torch.linalg.vector_norm(grad.cpu(), dtype=torch.float64))
            if not math.isfinite(norms[index]):
                return ClipResult(norms[index], name)
    norm = math.sqrt(math.fsum(each * each for each in norms))
    if max_norm is not None and (factor := max_norm / (norm + 1e-6)) < 1.0:
        for grad in grads.values():
            grad.mul_(factor)
    return ClipResult(norm, None)
