"""Streamed operations against plain torch under autograd."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lema_core.ops.context import Dropout, ForwardContext, Segment, attention_mask_BTS, token_positions
from lema_core.ops.kernels import Kernels
from lema_core.ops.linear import LinearKernel
from lema_core.ops.low_rank import LowRankUpdate
from lema_core.ops.streamed import Pass, StreamedOps
from lema_core.store.granules import Part


def dropout(n_tokens: int, seed: int = 1, step: int = 2, micro_batch: int = 3) -> Dropout:
    return Dropout(seed, step, [Segment(0, n_tokens, 1, n_tokens, micro_batch)])


class InMemory:
    """A weight source that holds whole tensors, hands out blocks of ``rows_per_part`` rows, and counts."""

    def __init__(self, weights: Mapping[str, Tensor], rows_per_part: int = 4) -> None:
        self.held, self.rows_per_part, self.borrowed, self.open = dict(weights), rows_per_part, [], 0

    def parts(self, name: str) -> tuple[Part, ...]:
        tensor = self.held[name]
        rows, step = tensor.shape[0], self.rows_per_part if tensor.ndim > 1 else tensor.shape[0]
        bounds = [(a, min(rows, a + step)) for a in range(0, rows, step)]
        return tuple(Part(name, 0, a, b, (b - a, *tensor.shape[1:]), tensor.dtype, 0) for a, b in bounds)

    @contextmanager
    def borrow(self, part: Part) -> Iterator[Tensor]:
        assert self.open == 0, "weights are borrowed one at a time"
        self.open += 1
        self.borrowed.append(part.tensor)
        # What is handed out is gone afterwards, as in a slot that is filled anew.
        lent = self.held[part.tensor][part.start : part.stop].clone()
        yield lent
        lent.fill_(float("nan"))
        self.open -= 1

    def rows(self, name: str, ids: Tensor, dtype: torch.dtype) -> Tensor:
        return self.held[name][ids].to(dtype)


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def operations(source: InMemory, updates: Mapping[str, LowRankUpdate] | None = None) -> StreamedOps:
    biased = frozenset(name[: -len(".bias")] for name in source.held if name.endswith(".bias"))
    return StreamedOps(source, Kernels(), torch.device("cpu"), torch.float32, updates or {}, biased)


def low_rank(out_size: int, in_size: int, dropout: float, seed: int) -> LowRankUpdate:
    lora_A, lora_B = randn(3, in_size, seed=seed), randn(out_size, 3, seed=seed + 1)
    return LowRankUpdate(lora_A.requires_grad_(), lora_B.requires_grad_(), 0.7, dropout)


def twin(x: Tensor, source: InMemory, module: str, update: LowRankUpdate | None, drops: Dropout) -> Tensor:
    y = F.linear(x, source.held[f"{module}.weight"].float(), source.held.get(f"{module}.bias"))
    if update is None:
        return y
    seen = x
    if update.dropout:
        # Masks are drawn over features by tokens, the order in which activations lie in memory.
        like = x.detach().reshape(-1, x.shape[-1]).t().contiguous()
        seen = x * drops.mask(f"{module}.lora", like, update.dropout).t().view(x.shape)
    return y + update.scale * (seen @ update.lora_A.t() @ update.lora_B.t())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("x_needs_grad", [True, False])
@pytest.mark.parametrize("p", [0.0, 0.4])
@pytest.mark.parametrize("rows_per_part", [1, 4, 100])
def test_linears_equal_plain_ones(dtype: torch.dtype, x_needs_grad: bool, p: float, rows_per_part: int) -> None:
    source = InMemory(
        {
            "a.weight": randn(10, 6, seed=1, dtype=dtype),
            "b.weight": randn(3, 6, seed=2, dtype=dtype),
            "b.bias": randn(3, seed=3),
            "c.weight": randn(7, 6, seed=4, dtype=dtype),
        },
        rows_per_part,
    )
    found, expected = [], []
    for streamed in (True, False):
        updates = {"a": low_rank(10, 6, p, 5), "c": low_rank(7, 6, 0.0, 7)}
        x = randn(2, 5, 6, seed=9).requires_grad_(x_needs_grad)
        if streamed:
            ops = operations(source, updates)
            with ops.during(Pass(dropout=dropout(10))):
                y_a, y_b, y_c = ops.linears(x, ["a", "b", "c"])
        else:
            y_a, y_b, y_c = (twin(x, source, m, updates.get(m), dropout(10)) for m in ("a", "b", "c"))
        (y_a.sin().sum() + (y_b * y_c[..., :3]).sum()).backward()
        grads = [t.grad for u in updates.values() for t in (u.lora_A, u.lora_B)]
        target = found if streamed else expected
        target.extend([y_a, y_b, y_c, *grads, *([x.grad] if x_needs_grad else [])])
    for got, want in zip(found, expected, strict=True):
        assert got.shape == want.shape and got.dtype == torch.float32
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    per_pass = sum(len(source.parts(f"{name}.weight")) for name in "abc")
    assert len(source.borrowed) == per_pass * (2 if x_needs_grad else 1) + 1, "a bias is read forward only"


def test_a_frozen_linear_of_a_constant_is_not_part_of_the_graph_and_saves_nothing() -> None:
    source = InMemory({"a.weight": randn(4, 6)})
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t), lambda t: t):
        y = operations(source).linear(randn(5, 6), "a")
        assert not y.requires_grad
        operations(source).linear(randn(5, 6).requires_grad_(), "a").sum().backward()
    assert not saved, "a frozen linear needs neither its input nor its weight for backward"


def test_only_the_inputs_of_updates_are_saved() -> None:
    source = InMemory({"a.weight": randn(64, 6)})
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        operations(source, {"a": low_rank(64, 6, 0.0, 0)}).linear(randn(5, 6).requires_grad_(), "a")
    assert sorted(t.numel() for t in saved) == [3 * 5, 6 * 5]


def test_gradients_of_linears_agree_with_finite_differences() -> None:
    source = InMemory({"a.weight": randn(4, 3).double(), "a.bias": randn(4)}, 2)
    ops = StreamedOps(source, Kernels(), torch.device("cpu"), torch.float64, {}, frozenset({"a"}))
    x = randn(2, 3).double().requires_grad_()
    assert torch.autograd.gradcheck(lambda x: ops.linear(x, "a"), x)


def test_rms_norm_equals_torchs_in_value_and_gradient() -> None:
    weight = randn(8, dtype=torch.bfloat16)
    source = InMemory({"n.weight": weight})
    x = randn(3, 8, seed=1).requires_grad_()
    y = operations(source).rms_norm(x, "n.weight", 1e-5)
    other = x.detach().clone().requires_grad_()
    want = F.rms_norm(other, (8,), weight.float(), 1e-5)
    torch.testing.assert_close(y, want, rtol=1e-6, atol=1e-6)
    y.cos().sum().backward()
    want.cos().sum().backward()
    torch.testing.assert_close(x.grad, other.grad, rtol=1e-5, atol=1e-6)
    assert operations(source).rms_norm(x.bfloat16(), "n.weight", 1e-5).dtype == torch.bfloat16


def plain_attention(q: Tensor, k: Tensor, v: Tensor, seen_BTS: Tensor, scale: float) -> Tensor:
    groups = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    scores = (q @ k.transpose(2, 3) * scale).masked_fill(~seen_BTS[:, None], float("-inf"))
    return (scores.softmax(-1) @ v).transpose(1, 2).flatten(2)


@pytest.mark.parametrize(
    ("valid", "n_queries"),
    [
        ([[1, 1, 1, 1], [1, 1, 1, 1]], 4),
        ([[1, 1, 1, 1], [1, 1, 0, 0]], 4),
        ([[1, 1, 1, 1], [0, 0, 1, 1]], 4),
        ([[1, 0, 1, 1], [1, 1, 1, 1]], 4),
        ([[1, 1, 1, 1], [1, 1, 1, 1]], 1),
        ([[0, 1, 1, 1], [1, 1, 1, 1]], 1),
        ([[1, 1, 1, 1], [1, 1, 1, 1]], 2),
        ([[0, 0, 1, 1], [1, 1, 1, 1]], 3),
        ([[1], [1]], 1),
    ],
)
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_attention_sees_what_it_may(valid: list[list[int]], n_queries: int, kv_heads: int) -> None:
    valid_BS = torch.tensor(valid, dtype=torch.bool)
    n_keys = valid_BS.shape[1]
    q, k, v = randn(2, 4, n_queries, 6), randn(2, kv_heads, n_keys, 6, seed=1), randn(2, kv_heads, n_keys, 6, seed=2)
    ctx = ForwardContext(torch.zeros(2, n_queries), attention_mask_BTS(valid_BS, n_queries))
    got = operations(InMemory({})).attention(q, k, v, ctx, 0.3)
    seen = torch.zeros(2, n_queries, n_keys, dtype=torch.bool)
    for row in range(2):
        for query in range(n_queries):
            at = n_keys - n_queries + query
            for key in range(n_keys):
                seen[row, query, key] = (key <= at and valid_BS[row, key]) or key == at
    want = plain_attention(q, k, v, seen, 0.3)
    real = valid_BS[:, n_keys - n_queries :]
    torch.testing.assert_close(got[real], want[real], rtol=1e-5, atol=1e-6)
    assert torch.isfinite(got).all(), "padding queries are defined"


def test_positions_count_real_tokens() -> None:
    valid = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 0, 0]], dtype=torch.bool)
    assert token_positions(valid).tolist() == [[0, 0, 0, 1, 2], [0, 1, 2, 2, 2]]


def test_dropout_masks_depend_on_their_key_and_name_alone() -> None:
    like = torch.empty(400, 7)
    mask = dropout(7).mask("m", like, 0.25)
    torch.manual_seed(123)
    assert torch.equal(mask, dropout(7).mask("m", like, 0.25)), "recomputation redraws what the forward pass drew"
    assert mask.unique().tolist() == pytest.approx([0.0, 1 / 0.75])
    assert abs((mask == 0).float().mean().item() - 0.25) < 0.03
    others = [
        dropout(7).mask("n", like, 0.25),
        dropout(7, seed=9).mask("m", like, 0.25),
        dropout(7, step=9).mask("m", like, 0.25),
        dropout(7, micro_batch=9).mask("m", like, 0.25),
    ]
    assert not any(torch.equal(mask, other) for other in others)
    ops = operations(InMemory({}))
    x = randn(4, 5)
    assert ops.dropout(x, 0.5, "d") is x, "there is none outside training"
    drops = dropout(4)
    before = torch.random.get_rng_state()
    with ops.during(Pass(dropout=drops)):
        assert ops.dropout(x, 0.0, "d") is x
        assert torch.equal(ops.dropout(x, 0.5, "d"), x * drops.mask("d", x.t(), 0.5).t())
    assert ops.dropout(x, 0.5, "d") is x, "nor after the pass"
    assert torch.equal(before, torch.random.get_rng_state()), "torch's own generator is left alone"


def test_a_micro_batch_has_the_same_dropout_alone_and_packed() -> None:
    sizes = {4: 3, 0: 1, 7: 6}
    segments, start = [], 0
    for micro_batch, n in sizes.items():
        segments.append(Segment(start, start + n, 1, n, micro_batch))
        start += n
    packed = Dropout(1, 2, segments).mask("m", torch.empty(9, start), 0.5)
    alone = [dropout(n, micro_batch=micro_batch).mask("m", torch.empty(9, n), 0.5) for micro_batch, n in sizes.items()]
    assert torch.equal(packed, torch.cat(alone, dim=1))


def test_embedding_gives_rows_feature_major() -> None:
    table = randn(9, 4, dtype=torch.float16)
    ids = torch.tensor([[3, 8, 3], [0, 1, 2]])
    x = operations(InMemory({"e": table})).embedding(ids, "e")
    assert torch.equal(x, table[ids].float())
    assert x.reshape(-1, 4).t().is_contiguous()


def test_the_kernel_widens_block_by_block_and_reuses_its_scratch() -> None:
    kernel = LinearKernel()
    weight, x = randn(200, 1 << 14, dtype=torch.bfloat16), randn(1 << 14, 3, seed=1)
    out = torch.empty(200, 3)
    kernel.forward(weight, x, out)
    torch.testing.assert_close(out, weight.float() @ x, rtol=1e-5, atol=1e-3)
    scratch = kernel._scratch[torch.float32]
    dx = torch.full((1 << 14, 3), float("nan"))
    kernel.input_gradient(weight, out, dx, first=True)
    torch.testing.assert_close(dx, weight.float().t() @ out, rtol=1e-5, atol=1e-2)
    kernel.input_gradient(weight, out, dx, first=False)
    torch.testing.assert_close(dx, 2 * (weight.float().t() @ out), rtol=1e-5, atol=1e-2)
    assert kernel._scratch[torch.float32] is scratch and scratch.numel() < weight.numel()
