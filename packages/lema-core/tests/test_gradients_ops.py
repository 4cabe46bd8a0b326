"""Gradients of weights out of single operations, against plain torch under autograd; and how they are added up."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lema_core.ops.context import ForwardContext, Segment
from lema_core.ops.gradient import backward_from
from lema_core.ops.gradients import Gradients
from lema_core.ops.kernels import Kernels
from lema_core.ops.low_rank import LowRankUpdate
from lema_core.ops.streamed import Pass, StreamedOps
from lema_core.store.granules import Part
from lema_core.testing.comparing import assert_all_close, assert_close, assert_equal


class Held(Gradients):
    """A weight source, and accumulators, that hold whole tensors and hand out blocks of ``rows`` rows."""

    def __init__(self, weights: Mapping[str, Tensor], trained: Sequence[str], rows: int = 4) -> None:
        self.held, self.rows_at_once = weights, rows
        self.totals = {name: torch.zeros(weights[name].shape) for name in trained}
        self.borrowed: list[str] = []

    def parts(self, name: str) -> tuple[Part, ...]:
        tensor = self.held[name]
        step = self.rows_at_once if tensor.ndim == 2 else len(tensor)
        bounds = [(a, min(len(tensor), a + step)) for a in range(0, len(tensor), step)]
        return tuple(Part(name, 0, a, b, (b - a, *tensor.shape[1:]), tensor.dtype, 0) for a, b in bounds)

    @contextmanager
    def of_weight(self, part: Part) -> Iterator[Tensor]:
        self.borrowed.append(part.tensor)
        yield self.held[part.tensor][part.start : part.stop]

    def rows(self, name: str, ids: Tensor, dtype: torch.dtype) -> Tensor:
        return self.held[name][ids].to(dtype)

    def trains(self, tensor: str) -> bool:
        return tensor in self.totals

    @contextmanager
    def borrow(self, part: Part) -> Iterator[Tensor]:
        yield self.totals[part.tensor][part.start : part.stop]

    row_parts = parts

    def complete(self, layer: int | None) -> None:
        raise AssertionError("no operation knows when a gradient is complete")


class Source:
    """The weights of a Held."""

    def __init__(self, held: Held) -> None:
        self.parts, self.borrow, self.rows = held.parts, held.of_weight, held.rows


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def operations(
    held: Held, updates: Mapping[str, LowRankUpdate] | None = None, transposed: frozenset[str] = frozenset()
) -> StreamedOps:
    biased = frozenset(name.removesuffix(".bias") for name in held.held if name.endswith(".bias"))
    source, cpu = Source(held), torch.device("cpu")
    return StreamedOps(source, Kernels(), cpu, torch.float32, updates or {}, biased, transposed, held)


def packed(*sizes: tuple[int, int]) -> tuple[Segment, ...]:
    """Micro-batches of rows and tokens, one after another."""
    segments, start = [], 0
    for number, (rows, tokens) in enumerate(sizes):
        segments.append(Segment(start, start + rows * tokens, rows, tokens, number))
        start += rows * tokens
    return tuple(segments)


SEGMENTS = packed((1, 5), (2, 8), (1, 1), (1, 18))
N = SEGMENTS[-1].stop


def wanted(held: Held, compute: Callable[[Mapping[str, Tensor]], Tensor], dy: Tensor) -> dict[str, Tensor]:
    """What autograd gives the trained tensors."""
    leaves = {name: tensor.detach().clone().requires_grad_(held.trains(name)) for name, tensor in held.held.items()}
    compute(leaves).backward(dy)
    return {name: leaves[name].grad for name in held.totals}


#: one operation over [1, N, C]: its weights, what lema computes, and what torch does
Case = tuple[
    dict[str, Tensor], Callable[[StreamedOps, Tensor], Tensor], Callable[[Mapping[str, Tensor], Tensor], Tensor]
]


def linear(transposed: bool) -> Case:
    weights = {"a.weight": randn(*((6, 11) if transposed else (11, 6)), seed=1), "a.bias": randn(11, seed=2)}

    def plain(w: Mapping[str, Tensor], x: Tensor) -> Tensor:
        return F.linear(x, w["a.weight"].t() if transposed else w["a.weight"], w["a.bias"])

    return weights, lambda ops, x: ops.linear(x, "a"), plain


def rms_norm(heads: int) -> Case:
    def apply(norm: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        if heads == 1:
            return norm(x)
        return norm(x.unflatten(-1, (heads, -1)).transpose(1, 2)).transpose(1, 2).flatten(2)

    def ours(ops: StreamedOps, x: Tensor) -> Tensor:
        return apply(lambda y: (ops.head_norm if heads > 1 else ops.rms_norm)(y, "n.weight", 1e-5), x)

    def plain(w: Mapping[str, Tensor], x: Tensor) -> Tensor:
        return apply(lambda y: F.rms_norm(y, y.shape[-1:], w["n.weight"], 1e-5), x)

    return {"n.weight": randn(6 // heads, seed=1)}, ours, plain


def layer_norm() -> Case:
    weights = {"n.weight": randn(6, seed=1), "n.bias": randn(6, seed=2)}

    def plain(w: Mapping[str, Tensor], x: Tensor) -> Tensor:
        return F.layer_norm(x, (6,), w["n.weight"], w["n.bias"], 1e-5)

    return weights, lambda ops, x: ops.layer_norm(x, "n", 1e-5), plain


def conv(biased: bool) -> Case:
    weights = {"c.weight": randn(6, 1, 3, seed=1)} | ({"c.bias": randn(6, seed=2)} if biased else {})

    def ours(ops: StreamedOps, x: Tensor) -> Tensor:
        return ops.conv(x, "c", ForwardContext(torch.arange(N)[None], segments=ops.now.segments), 0)

    def plain(w: Mapping[str, Tensor], x: Tensor) -> Tensor:
        parts = []
        for one in SEGMENTS:
            rows = x[0, one.start : one.stop].view(one.rows, one.tokens, -1).transpose(1, 2)
            y = F.conv1d(F.pad(rows, (2, 0)), w["c.weight"], w.get("c.bias"), groups=6)
            parts.append(y.transpose(1, 2).reshape(one.rows * one.tokens, -1))
        return torch.cat(parts)[None]

    return weights, ours, plain


def embedding(padding_id: int | None) -> Case:
    ids = torch.randint(0, 9, (1, N), generator=torch.Generator().manual_seed(3))
    assert (ids == 4).any()

    def ours(ops: StreamedOps, x: Tensor) -> Tensor:
        return ops.embedding(ids, "e.weight", padding_id) * x

    def plain(w: Mapping[str, Tensor], x: Tensor) -> Tensor:
        return F.embedding(ids, w["e.weight"], padding_id) * x

    return {"e.weight": randn(10, 6, seed=1)}, ours, plain


def vector() -> Case:
    return {"v": randn(6, seed=1)}, lambda ops, x: (1 + ops.vector("v")) * x, lambda w, x: (1 + w["v"]) * x


CASES = {
    "linear": linear(False),
    "transposed linear": linear(True),
    "rms norm": rms_norm(1),
    "head norm": rms_norm(2),
    "layer norm": layer_norm(),
    "conv": conv(False),
    "biased conv": conv(True),
    "embedding": embedding(None),
    "embedding with padding": embedding(4),
    "vector": vector(),
}


def transposed(case: str) -> frozenset[str]:
    return frozenset({"a"} if case == "transposed linear" else ())


def feature_major(x_1NC: Tensor) -> Tensor:
    return x_1NC.transpose(1, 2).contiguous().transpose(1, 2)


@pytest.mark.parametrize("case", list(CASES))
@pytest.mark.parametrize("x_needs_grad", [True, False])
def test_an_operation_gives_its_weights_what_autograd_does(case: str, x_needs_grad: bool) -> None:
    """Whichever of them train, and whether or not anything waits for the gradient of their input."""
    weights, ours, plain = CASES[case]
    for trained in (list(weights), list(weights)[:1], list(weights)[1:]):
        if not trained and not x_needs_grad:
            continue
        held = Held(weights, trained)
        x_ours, x_plain = (randn(1, N, 6).requires_grad_(x_needs_grad) for _ in range(2))
        ops = operations(held, transposed=transposed(case))
        with ops.during(Pass(SEGMENTS)):
            y = ours(ops, x_ours)
        dy = randn(*y.shape, seed=5)
        backward_from(y, dy)
        assert_all_close("gradients", held.totals, wanted(held, partial(plain, x=x_plain), dy))
        if x_needs_grad:
            assert_close("dx", x_ours.grad, x_plain.grad)


@pytest.mark.parametrize("case", [name for name in CASES if name != "vector"])
def test_what_is_packed_together_changes_no_bit(case: str) -> None:
    weights, ours, _ = CASES[case]
    x, together, apart = randn(1, N, 6), Held(weights, list(weights)), Held(weights, list(weights))
    ops = operations(together, transposed=transposed(case))
    with ops.during(Pass(SEGMENTS)):
        y = ours(ops, feature_major(x))
    dy = randn(*y.shape, seed=5)
    backward_from(y, feature_major(dy))
    ops = operations(apart, transposed=transposed(case))
    for one in SEGMENTS:
        own = slice(one.start, one.stop)
        alone = replace(one, start=0, stop=one.stop - one.start)
        with ops.during(Pass((alone,))):
            if "embedding" in case:
                ids = torch.randint(0, 9, (1, N), generator=torch.Generator().manual_seed(3))[:, own]
                y = ops.embedding(ids, "e.weight", 4 if "padding" in case else None) * x[:, own]
            else:
                y = ours(ops, feature_major(x[:, own]))
        backward_from(y, feature_major(dy[:, own]))
    assert_equal("gradients", together.totals, apart.totals)


def test_a_weight_whose_inputs_gradient_nobody_wants_is_not_read_again() -> None:
    weights, ours, _ = CASES["linear"]
    held = Held(weights, ["a.weight"])
    ops = operations(held)
    y = ours(ops, randn(1, N, 6))
    held.borrowed.clear()
    backward_from(y, randn(*y.shape))
    assert not held.borrowed and held.totals["a.weight"].norm() > 0


def test_frozen_operations_save_nothing_for_weights() -> None:
    """Beside others that train."""
    weights = {"a.weight": randn(64, 6), "b.weight": randn(64, 6), "b.bias": randn(64)}
    saved: list[Tensor] = []
    for trained, expected in (([], []), (["b.bias"], []), (["b.weight"], [6 * N])):
        held, x = Held({**weights, "other": randn(2)}, ["other", *trained]), randn(1, N, 6).requires_grad_()
        saved.clear()
        with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
            operations(held).linears(x, ["a", "b"])
        assert [each.numel() for each in saved] == expected, trained


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_products_of_half_precision_are_added_in_fp32(dtype: torch.dtype) -> None:
    held = Held({"a.weight": randn(11, 6)}, ["a.weight"], rows=11)
    left, right = randn(11, N, seed=1).to(dtype), randn(6, N, seed=2).to(dtype)
    (part,) = held.parts("a.weight")
    for _ in range(2):
        held.add_product(part, left, right, ((0, 7), (7, N)))
    total = held.totals["a.weight"]
    assert total.dtype == torch.float32
    assert_close("sum", total, 2 * (left.double() @ right.double().t()), 1e-2)


def test_a_block_of_rows_that_no_id_falls_into_is_not_borrowed(monkeypatch: pytest.MonkeyPatch) -> None:
    held = Held({"e.weight": randn(10, 6)}, ["e.weight"], rows=4)
    lent: list[int] = []
    borrow = held.borrow
    monkeypatch.setattr(held, "borrow", lambda part: lent.append(part.start) or borrow(part))
    held.add_rows("e.weight", torch.tensor([9, 1, 9, -1]), torch.ones(4, 6), ())
    assert lent == [0, 8]
    assert held.totals["e.weight"].sum(dim=1).tolist() == [0, 6, 0, 0, 0, 0, 0, 0, 0, 12]
