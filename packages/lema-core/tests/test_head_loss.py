"""The chunked loss against torch's cross_entropy."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lema_core.errors import DataError
from lema_core.ops.linear import LinearKernel
from lema_core.ops.streamed import StreamedOps
from lema_core.runtime import head_loss as module
from lema_core.runtime.batch import TokenBatch
from lema_core.runtime.head_loss import HeadPiece, chunk_tokens, cut_head, cut_tokens, head_loss

VOCAB, HIDDEN, CHUNK = 11, 6, 16


class OneMatrixHead:
    """As much of an adapter as the loss needs. What is computed together is multiplied apart."""

    vocab_size = VOCAB

    def __init__(self, dtype: torch.dtype = torch.float32, scale: float = 1.0) -> None:
        self.weight = torch.randn(VOCAB, HIDDEN, generator=torch.Generator().manual_seed(1), dtype=torch.float32)
        self.weight = (self.weight * scale).to(dtype)
        self.calls: list[int] = []

    def head(self, ops: StreamedOps, x_NC: Tensor) -> Tensor:
        self.calls.append(len(x_NC))
        columns = [x_NC[start:stop].contiguous() @ self.weight.t() for start, stop in ops.now.columns]
        for column in columns:
            if column.requires_grad:
                # A product may have another order for numbers that do not lie together.
                column.register_hook(Tensor.contiguous)
        return torch.cat(columns).t().contiguous().t()


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_CHUNK_BYTES", CHUNK * 4 * VOCAB)


def operations() -> StreamedOps:
    return StreamedOps(None, LinearKernel(), torch.device("cpu"), torch.float32, {})


def hidden(n: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(n, HIDDEN, generator=torch.Generator().manual_seed(n)).to(dtype)


def loss_of(
    adapter: OneMatrixHead,
    hidden_NC: Sequence[Tensor],
    supervised: Sequence[tuple[Tensor, Tensor]],
    scale: float | None,
    wants_dx: bool = True,
) -> tuple[Tensor, list[Tensor] | None]:
    """The loss of some micro-batches, and the gradients [N, C] of their hidden states."""
    dx_NC = [torch.zeros_like(x) for x in hidden_NC] if wants_dx and scale is not None else None
    dx_CN = None if dx_NC is None else [dx.t() for dx in dx_NC]
    return head_loss(adapter, operations(), [x.t() for x in hidden_NC], supervised, scale, dx_CN), dx_NC


@pytest.mark.parametrize("n", [1, 15, 16, 17, 32, 33, 50])
def test_loss_and_gradient_at_every_border_of_a_chunk(n: int) -> None:
    adapter, x = OneMatrixHead(), hidden(n + 7)
    positions = torch.randperm(n + 7, generator=torch.Generator().manual_seed(0))[:n].sort().values
    targets = torch.randint(0, VOCAB, (n,), generator=torch.Generator().manual_seed(2))
    total, (dx,) = loss_of(adapter, [x], [(positions, targets)], 0.25)
    assert adapter.calls == [CHUNK] * (n // CHUNK) + [n % CHUNK] * (n % CHUNK > 0)
    assert adapter.calls == cut_tokens(n, VOCAB)
    other = x.clone().requires_grad_()
    want = F.cross_entropy(other[positions] @ adapter.weight.t(), targets, reduction="sum")
    (want * 0.25).backward()
    assert total.dtype == torch.float64
    torch.testing.assert_close(total.float(), want.detach(), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(dx, other.grad, rtol=1e-5, atol=1e-6)
    left_out = torch.ones(n + 7, dtype=torch.bool)
    left_out[positions] = False
    assert not dx[left_out].any(), "tokens without a target have no gradient"
    again, nothing = loss_of(adapter, [x], [(positions, targets)], None)
    assert nothing is None and torch.equal(again, total)


def test_huge_logits_stay_finite() -> None:
    """B56: statistics in fp32, the largest logit subtracted first."""
    adapter, x = OneMatrixHead(scale=1e5), hidden(20)
    targets = torch.arange(20) % VOCAB
    total, (dx,) = loss_of(adapter, [x], [(torch.arange(20), targets)], 1.0)
    want = F.cross_entropy((x @ adapter.weight.t()).double(), targets, reduction="sum")
    torch.testing.assert_close(total, want, rtol=1e-5, atol=1.0)
    assert torch.isfinite(dx).all()


def test_bf16_logits_have_an_fp32_loss_and_a_bf16_gradient() -> None:
    adapter, x = OneMatrixHead(torch.bfloat16), hidden(40, torch.bfloat16)
    targets = torch.arange(40) % VOCAB
    total, (dx,) = loss_of(adapter, [x], [(torch.arange(40), targets)], 1.0)
    other = x.clone().requires_grad_()
    want = F.cross_entropy((other @ adapter.weight.t()).float(), targets, reduction="sum")
    torch.testing.assert_close(total.float(), want.detach(), rtol=1e-5, atol=1e-4)
    want.backward()
    torch.testing.assert_close(dx, other.grad, rtol=2e-2, atol=2e-2)
    assert dx.dtype == torch.bfloat16


def test_without_anybody_to_give_it_to_no_gradient_is_computed() -> None:
    adapter, x = OneMatrixHead(), hidden(5)
    adapter.weight.requires_grad_()
    targets = torch.arange(5)
    _, dx = loss_of(adapter, [x], [(torch.arange(5), targets)], 2.0, wants_dx=False)
    assert dx is None
    want = adapter.weight.detach().clone().requires_grad_()
    (2.0 * F.cross_entropy(x @ want.t(), targets, reduction="sum")).backward()
    torch.testing.assert_close(adapter.weight.grad, want.grad, rtol=1e-5, atol=1e-6)


# -- several micro-batches


@pytest.mark.parametrize("sizes", [(5, 6), (1, 1, 1), (16, 1), (17, 3, 1), (40, 9, 2), (3, 0, 4)])
def test_micro_batches_together_are_those_apart_bit_for_bit(sizes: tuple[int, ...]) -> None:
    adapter = OneMatrixHead()
    adapter.weight.requires_grad_()
    xs = [hidden(n + i + 1) for i, n in enumerate(sizes)]
    supervised = [(torch.arange(n) + 1, (torch.arange(n) + i) % VOCAB) for i, n in enumerate(sizes)]
    together, dx = loss_of(adapter, xs, supervised, 0.5)
    assert adapter.calls == [sum(piece.tokens for piece in pieces) for pieces in cut_head(list(sizes), VOCAB)], (
        "each chunk is one call of the head"
    )
    apart = torch.zeros((), dtype=torch.float64)
    for i, (x, one) in enumerate(zip(xs, supervised, strict=True)):
        if len(one[0]) == 0:
            assert not dx[i].any()
            continue
        loss, (dx_alone,) = loss_of(adapter, [x], [one], 0.5)
        apart += loss
        assert torch.equal(dx[i], dx_alone)
    assert torch.equal(together, apart)


def test_a_micro_batch_is_cut_as_it_would_be_alone() -> None:
    """Chunks are filled by whole pieces of a micro-batch, in order, and hold no more than they may."""
    chunks = cut_head([5, 40, 3, 0, 16, 1], VOCAB)
    assert chunks == [
        [HeadPiece(0, 0, 5)],
        [HeadPiece(1, 0, 16)],
        [HeadPiece(1, 16, 32)],
        [HeadPiece(1, 32, 40), HeadPiece(2, 0, 3)],
        [HeadPiece(4, 0, 16)],
        [HeadPiece(5, 0, 1)],
    ]
    assert cut_head([], VOCAB) == [] and cut_head([0, 0], VOCAB) == []


def test_chunks_follow_from_the_vocabulary_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    assert chunk_tokens(32_000) == 500 and chunk_tokens(128_256) == 124
    assert chunk_tokens(10**9) == 16
    assert cut_tokens(0, 32_000) == [] and cut_tokens(500, 32_000) == [500] and cut_tokens(501, 32_000) == [500, 1]


def test_a_token_predicts_the_next_and_padding_is_never_a_target() -> None:
    ids = torch.tensor([[1, 2, 3, 4], [5, 6, 7, 8], [9, 9, 9, 9]])
    mask = torch.tensor([[1, 1, 1, 0], [0, 0, 1, 1], [1, 1, 1, 1]])
    labels = torch.tensor([[1, 2, 3, 4], [5, 6, 7, 8], [9, -100, 9, -100]])
    positions, targets = TokenBatch.of(ids, mask, labels).supervised
    # Row 1 is padded on the left: what precedes its first token predicts nothing.
    assert positions.tolist() == [0, 1, 6, 9] and targets.tolist() == [2, 3, 8, 9]
    with pytest.raises(DataError, match="labels are missing"):
        _ = TokenBatch.of(ids, mask).supervised
