"""Output projection and cross-entropy over a few tokens at a time, so that no [N, V] matrix of logits ever exists.

Only tokens that have a target are projected. Shapes: N tokens, n tokens of one chunk, C hidden size, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lema_core.adapter import ModelAdapter
from lema_core.ops.streamed import StreamedOps

_CHUNK_BYTES = 64_000_000


def chunk_tokens(vocab_size: int) -> int:
    """Tokens whose fp32 logits are held at once; follows from the model alone."""
    return max(16, _CHUNK_BYTES // (4 * vocab_size))


def n_chunks(n_targets: int, vocab_size: int) -> int:
    return -(-n_targets // chunk_tokens(vocab_size))


def head_loss(
    adapter: ModelAdapter,
    ops: StreamedOps,
    x_NC: Tensor,
    positions: Tensor,
    targets: Tensor,
    gradient_scale: float | None,
    wants_dx: bool = True,
) -> tuple[Tensor, Tensor | None]:
    """Sum of the targets' negative log-likelihoods (fp64 scalar on the CPU; 0-d meta tensor on meta), and d(sum)/dx *
    scale.

    ``gradient_scale`` None computes no gradient. Gradients of parameters inside the head accumulate into their
    ``.grad``; without ``wants_dx`` they are all that is computed.
    """
    x_CN = x_NC.t()
    trained = gradient_scale is not None
    dx_CN = torch.zeros_like(x_CN) if trained and wants_dx else None
    chunk = chunk_tokens(adapter.vocab_size)
    total = torch.zeros((), dtype=torch.float64, device=x_NC.device)
    for where, wanted in zip(positions.split(chunk), targets.split(chunk), strict=True):
        h_nC = x_CN.index_select(1, where).t().requires_grad_(dx_CN is not None)
        with torch.set_grad_enabled(trained):
            logits_nV = adapter.head(ops, h_nC)
        # .data: the gradient overwrites the logits, whose values no backward reads; detach() would have autograd
        # object.
        loss, gradient_nV = _cross_entropy(logits_nV.data, wanted, gradient_scale)
        total += loss
        if logits_nV.requires_grad:
            torch.autograd.backward(logits_nV, gradient_nV)
        if dx_CN is not None:
            dx_CN.index_copy_(1, where, h_nC.grad.t())
    return total, None if dx_CN is None else dx_CN.t()


def _cross_entropy(logits_nV: Tensor, targets: Tensor, gradient_scale: float | None) -> tuple[Tensor, Tensor | None]:
    """Summed loss in fp32 statistics; overwrites fp32 logits with their gradient to hold one copy."""
    work = logits_nV if logits_nV.dtype == torch.float32 else logits_nV.float()
    picked = work.gather(1, targets[:, None]).squeeze(1)
    highest = work.amax(dim=1, keepdim=True)
    work -= highest
    work.exp_()
    sums = work.sum(dim=1, keepdim=True)
    losses = sums.squeeze(1).log() + highest.squeeze(1) - picked
    if gradient_scale is None:
        return losses.double().sum(), None
    work /= sums
    work.scatter_add_(1, targets[:, None], work.new_full((len(targets), 1), -1.0))
    work *= gradient_scale
    return losses.double().sum(), work.to(logits_nV.dtype)
