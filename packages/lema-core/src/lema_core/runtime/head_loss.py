"""Output projection and cross-entropy over a few tokens at a time, so that no [N, V] matrix of logits ever exists.

Only tokens that have a target are projected; those of several micro-batches together where they are few. Shapes: N
tokens of a micro-batch, n tokens of one chunk, C hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lema_core.adapter import ModelAdapter
from lema_core.ops.context import Segment
from lema_core.ops.gradient import backward_from
from lema_core.ops.streamed import Pass, StreamedOps

_CHUNK_BYTES = 64_000_000


@dataclass(frozen=True)
class HeadPiece:
    """Targets ``start:stop`` of one micro-batch."""

    micro_batch: int
    start: int
    stop: int

    @property
    def tokens(self) -> int:
        return self.stop - self.start


def chunk_tokens(vocab_size: int) -> int:
    """Tokens whose fp32 logits are held at once; follows from the model alone."""
    return max(16, _CHUNK_BYTES // (4 * vocab_size))


def cut_tokens(tokens: int, vocab_size: int) -> list[int]:
    """The chunks of so many tokens."""
    most = chunk_tokens(vocab_size)
    return [min(most, tokens - start) for start in range(0, tokens, most)]


def cut_head(n_targets: Sequence[int], vocab_size: int) -> list[list[HeadPiece]]:
    """The chunks of a step, each a list of pieces. A micro-batch is cut as it would be alone, so that its numbers do
    not depend on its neighbours."""
    most = chunk_tokens(vocab_size)
    chunks: list[list[HeadPiece]] = []
    room = 0
    for micro_batch, count in enumerate(n_targets):
        for start in range(0, count, most):
            piece = HeadPiece(micro_batch, start, min(count, start + most))
            if piece.tokens > room:
                chunks.append([])
                room = most
            chunks[-1].append(piece)
            room -= piece.tokens
    return chunks


def head_loss(
    adapter: ModelAdapter,
    ops: StreamedOps,
    hidden_CN: Sequence[Tensor],
    supervised: Sequence[tuple[Tensor, Tensor]],
    gradient_scale: float | None,
    dx_CN: Sequence[Tensor] | None = None,
) -> Tensor:
    """Sum of the targets' negative log-likelihoods, an fp64 scalar on the CPU.

    ``hidden_CN`` and ``supervised`` (positions into N, and targets) by micro-batch. d(sum)/dx * ``gradient_scale`` is
    written to ``dx_CN`` at these positions; gradients of parameters inside the head go to their ``.grad``, with
    ``dx_CN`` None nothing else does. ``gradient_scale`` None computes no gradient.
    """
    total = torch.zeros((), dtype=torch.float64, device=hidden_CN[0].device)
    for pieces in cut_head([len(positions) for positions, _ in supervised], adapter.vocab_size):
        for losses in _pieces_losses(adapter, ops, pieces, hidden_CN, supervised, gradient_scale, dx_CN):
            total += losses.sum()
    return total.cpu()


def _pieces_losses(
    adapter: ModelAdapter,
    ops: StreamedOps,
    pieces: Sequence[HeadPiece],
    hidden_CN: Sequence[Tensor],
    supervised: Sequence[tuple[Tensor, Tensor]],
    gradient_scale: float | None,
    dx_CN: Sequence[Tensor] | None,
) -> list[Tensor]:
    """Of one chunk, by piece; nothing else of it is left when the next one is computed."""
    where = [supervised[p.micro_batch][0][p.start : p.stop] for p in pieces]
    wanted = [supervised[p.micro_batch][1][p.start : p.stop] for p in pieces]
    picked = [hidden_CN[p.micro_batch].index_select(1, index) for p, index in zip(pieces, where, strict=True)]
    h_nC = (picked[0] if len(picked) == 1 else torch.cat(picked, dim=1)).t()
    del picked
    segments = _side_by_side(pieces)
    with ops.during(Pass(segments)):
        losses, dh_Cn = chunk_loss(adapter, ops, h_nC, torch.cat(wanted), gradient_scale, dx_CN is not None)
    if dh_Cn is not None:
        for piece, segment, index in zip(pieces, segments, where, strict=True):
            dx_CN[piece.micro_batch].index_copy_(1, index, dh_Cn[:, segment.start : segment.stop])
    return [losses[segment.start : segment.stop] for segment in segments]


def _side_by_side(pieces: Sequence[HeadPiece]) -> tuple[Segment, ...]:
    segments, start = [], 0
    for piece in pieces:
        segments.append(Segment(start, start + piece.tokens, 1, piece.tokens, piece.micro_batch))
        start += piece.tokens
    return tuple(segments)


def chunk_loss(
    adapter: ModelAdapter,
    ops: StreamedOps,
    h_nC: Tensor,
    targets: Tensor,
    gradient_scale: float | None,
    wants_dh: bool,
) -> tuple[Tensor, Tensor | None]:
    """Losses fp64 [n] of one chunk, and the gradient of its input [C, n] where asked for."""
    trained = gradient_scale is not None
    h_nC.requires_grad_(trained and wants_dh)
    with torch.set_grad_enabled(trained):
        logits_nV = adapter.head(ops, h_nC)
    # .data: the gradient overwrites the logits, whose values no backward reads; detach() would have autograd object.
    work_nV = logits_nV.data if logits_nV.dtype == torch.float32 else logits_nV.data.float()
    losses = []
    for start, stop in ops.now.columns or ((0, len(targets)),):
        piece_nV = work_nV[start:stop]
        # Torch sums numbers that lie together in another order than those of one token among others.
        alone_nV = piece_nV.contiguous() if stop - start == 1 else piece_nV
        losses.append(_cross_entropy(alone_nV, targets[start:stop], gradient_scale))
        if alone_nV is not piece_nV:
            piece_nV.copy_(alone_nV)
    if logits_nV.requires_grad:
        backward_from(logits_nV, work_nV.to(logits_nV.dtype))
    return torch.cat(losses), None if h_nC.grad is None else h_nC.grad.t()


def _cross_entropy(work_nV: Tensor, targets: Tensor, gradient_scale: float | None) -> Tensor:
    """Losses of fp32 logits, fp64 [n]; the logits become their gradient, so that one copy is held."""
    picked = work_nV.gather(1, targets[:, None]).squeeze(1)
    highest = work_nV.amax(dim=1, keepdim=True)
    work_nV -= highest
    work_nV.exp_()
    sums = work_nV.sum(dim=1, keepdim=True)
    losses = sums.squeeze(1).log() + highest.squeeze(1) - picked
    if gradient_scale is not None:
        work_nV /= sums
        work_nV.scatter_add_(1, targets[:, None], work_nV.new_full((len(targets), 1), -1.0))
        work_nV *= gradient_scale
    return losses.double()
