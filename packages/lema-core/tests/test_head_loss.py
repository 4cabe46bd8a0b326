"""The chunked loss against torch's cross_entropy."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lema_core.errors import DataError
from lema_core.runtime import head_loss as module
from lema_core.runtime.batch import TokenBatch
from lema_core.runtime.head_loss import chunk_tokens, head_loss, n_chunks

VOCAB, HIDDEN, CHUNK = 11, 6, 16


class OneMatrixHead:
    """As much of an adapter as the loss needs."""

    vocab_size = VOCAB

    def __init__(self, dtype: torch.dtype = torch.float32, scale: float = 1.0) -> None:
        self.weight = torch.randn(VOCAB, HIDDEN, generator=torch.Generator().manual_seed(1), dtype=torch.float32)
        self.weight = (self.weight * scale).to(dtype)
        self.calls: list[int] = []

    def head(self, ops: object, x_NC: Tensor) -> Tensor:
        self.calls.append(len(x_NC))
        return x_NC @ self.weight.t()


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_CHUNK_BYTES", CHUNK * 4 * VOCAB)


def hidden(n: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(n, HIDDEN, generator=torch.Generator().manual_seed(n)).to(dtype)


@pytest.mark.parametrize("n", [1, 15, 16, 17, 32, 33, 50])
def test_loss_and_gradient_at_every_border_of_a_chunk(n: int) -> None:
    adapter, x = OneMatrixHead(), hidden(n + 7)
    positions = torch.randperm(n + 7, generator=torch.Generator().manual_seed(0))[:n].sort().values
    targets = torch.randint(0, VOCAB, (n,), generator=torch.Generator().manual_seed(2))
    total, dx = head_loss(adapter, None, x, positions, targets, 0.25)
    assert adapter.calls == [CHUNK] * (n // CHUNK) + [n % CHUNK] * (n % CHUNK > 0)
    assert len(adapter.calls) == n_chunks(n, VOCAB)
    other = x.clone().requires_grad_()
    want = F.cross_entropy(other[positions] @ adapter.weight.t(), targets, reduction="sum")
    (want * 0.25).backward()
    assert total.dtype == torch.float64
    torch.testing.assert_close(total.float(), want.detach(), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(dx, other.grad, rtol=1e-5, atol=1e-6)
    left_out = torch.ones(n + 7, dtype=torch.bool)
    left_out[positions] = False
    assert not dx[left_out].any(), "tokens without a target have no gradient"
    again, nothing = head_loss(adapter, None, x, positions, targets, None)
    assert nothing is None and torch.equal(again, total)


def test_huge_logits_stay_finite() -> None:
    """B56: statistics in fp32, the largest logit subtracted first."""
    adapter, x = OneMatrixHead(scale=1e5), hidden(20)
    targets = torch.arange(20) % VOCAB
    total, dx = head_loss(adapter, None, x, torch.arange(20), targets, 1.0)
    want = F.cross_entropy((x @ adapter.weight.t()).double(), targets, reduction="sum")
    torch.testing.assert_close(total, want, rtol=1e-5, atol=1.0)
    assert torch.isfinite(dx).all()


def test_bf16_logits_have_an_fp32_loss_and_a_bf16_gradient() -> None:
    adapter, x = OneMatrixHead(torch.bfloat16), hidden(40, torch.bfloat16)
    targets = torch.arange(40) % VOCAB
    total, dx = head_loss(adapter, None, x, torch.arange(40), targets, 1.0)
    want = F.cross_entropy((x @ adapter.weight.t()).float(), targets, reduction="sum")
    torch.testing.assert_close(total.float(), want, rtol=1e-5, atol=1e-4)
    assert dx.dtype == torch.bfloat16


def test_without_anybody_to_give_it_to_no_gradient_is_computed() -> None:
    adapter, x = OneMatrixHead(), hidden(5)
    adapter.weight.requires_grad_()
    targets = torch.arange(5)
    _, dx = head_loss(adapter, None, x, torch.arange(5), targets, 2.0, wants_dx=False)
    assert dx is None
    want = adapter.weight.detach().clone().requires_grad_()
    (2.0 * F.cross_entropy(x @ want.t(), targets, reduction="sum")).backward()
    torch.testing.assert_close(adapter.weight.grad, want.grad, rtol=1e-5, atol=1e-6)


def test_chunks_follow_from_the_vocabulary_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    assert chunk_tokens(32_000) == 500 and chunk_tokens(128_256) == 124
    assert chunk_tokens(10**9) == 16
    assert n_chunks(0, 32_000) == 0 and n_chunks(500, 32_000) == 1 and n_chunks(501, 32_000) == 2


def test_a_token_predicts_the_next_and_padding_is_never_a_target() -> None:
    ids = torch.tensor([[1, 2, 3, 4], [5, 6, 7, 8], [9, 9, 9, 9]])
    mask = torch.tensor([[1, 1, 1, 0], [0, 0, 1, 1], [1, 1, 1, 1]])
    labels = torch.tensor([[1, 2, 3, 4], [5, 6, 7, 8], [9, -100, 9, -100]])
    positions, targets = TokenBatch.of(ids, mask, labels).supervised
    # Row 1 is padded on the left: what precedes its first token predicts nothing.
    assert positions.tolist() == [0, 1, 6, 9] and targets.tolist() == [2, 3, 8, 9]
    with pytest.raises(DataError, match="labels are missing"):
        _ = TokenBatch.of(ids, mask).supervised
