"""A mixture of experts (Shazeer et al. 2017, arXiv:1701.06538; Fedus et al. 2021, arXiv:2101.03961), one by one.

Each expert is ``down(silu(gate(x)) * up(x))``. All tokens are routed before the first expert is fetched, experts that
no token was routed to are never touched, and an expert's part of the result depends on the tokens of one micro-batch
alone. Shapes: N tokens, n tokens of one expert, k experts of a token, C hidden size, F feed-forward size, r rank.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from lema_core.ops.context import Segment
from lema_core.ops.elementwise import sum_of_features
from lema_core.ops.gradients import ANCHOR
from lema_core.ops.products import (
    add_low_rank_gradients,
    input_gradient,
    product,
    products,
    small_product,
    through_A,
    through_B,
)
from lema_core.store.granules import Part

if TYPE_CHECKING:
    from lema_core.ops.streamed import Pass, StreamedOps


@dataclass(frozen=True)
class Routed:
    """The tokens of one expert, in order: columns ``tokens`` [n] of x, for which it is choice ``places`` [n] of k;
    ``one_pass``: where micro-batches are among them. ``modules``: gate, up and down."""

    modules: tuple[str, str, str]
    gate_up: str
    tokens: Tensor
    places: Tensor
    one_pass: Pass


def run_experts(ops: StreamedOps, x_BTC: Tensor, scores_Nk: Tensor, picked_Nk: Tensor, prefix: str) -> Tensor:
    """``sum_k scores[:, k] * expert[picked[:, k]](x)``, [B, T, C]; what trains in experts gets its gradient.

    When a block runs again for its gradient the values are undefined: it must be what the block's output is made of.
    """
    routed = tuple(_routed(ops.now, picked_Nk, prefix))
    updates = [ops.updates[name] for each in routed for name in (each.gate_up, each.modules[2]) if name in ops.updates]
    trained = [parameter for update in updates for parameter in update.parameters()]
    if any(ops.trains(f"{module}.weight") for each in routed for module in each.modules):
        trained.append(ANCHOR)
    keep = torch.is_grad_enabled() and not ops.now.again
    x_NC = x_BTC.reshape(-1, x_BTC.shape[-1])
    y_NC = _Experts.apply(ops, ops.now, routed, keep, x_NC, scores_Nk, *trained)
    return y_NC.view(x_BTC.shape)


def _routed(now: Pass, picked_Nk: Tensor, prefix: str) -> Iterator[Routed]:
    n_choices = picked_Nk.shape[1]
    by_expert = picked_Nk.flatten().argsort(stable=True)
    experts, counts = picked_Nk.flatten().unique(return_counts=True)
    for expert, where in zip(experts.tolist(), by_expert.split(counts.tolist()), strict=True):
        tokens = where.div(n_choices, rounding_mode="floor")
        name = f"{prefix}.{expert}"
        modules = f"{name}.gate_proj", f"{name}.up_proj", f"{name}.down_proj"
        yield Routed(modules, f"{name}.gate_up_proj", tokens, where % n_choices, _among(now, tokens))


def _among(now: Pass, tokens: Tensor) -> Pass:
    """The pass of one expert's tokens: each micro-batch's are beside each other, as before."""
    if not now.segments:
        return now
    bounds = torch.tensor([segment.stop for segment in now.segments], device=tokens.device)
    stops = torch.searchsorted(tokens, bounds).tolist()
    segments = [
        Segment(start, stop, 1, stop - start, segment.micro_batch)
        for segment, start, stop in zip(now.segments, [0, *stops[:-1]], stops, strict=True)
        if stop > start
    ]
    return replace(now, segments=tuple(segments))


class _Experts(torch.autograd.Function):
    """Inputs after the scores are lora_A and lora_B of the experts' updates, and an anchor where weights train; their
    gradients are added to ``.grad`` and to accumulators here, micro-batch by micro-batch. ``keep``: what gates are
    computed from again otherwise."""

    @staticmethod
    def forward(
        ctx: Any,
        ops: StreamedOps,
        now: Pass,
        routed: tuple[Routed, ...],
        keep: bool,
        x_NC: Tensor,
        scores_Nk: Tensor,
        *trained: Tensor,
    ) -> Tensor:
        x_CN = x_NC.t().contiguous()
        kept: list[tuple[Tensor, Tensor]] = []
        if now.again:
            y_CN = x_CN.new_zeros(()).expand(x_CN.shape)
        else:
            y_CN = torch.zeros_like(x_CN)
            with ops.weights.routed([part for each in routed for part in _parts(ops, each.modules)]):
                for each in routed:
                    gate_up = _gate_up(ops, each, x_CN.index_select(1, each.tokens))
                    h_Fn = ops.kernels.elementwise.silu_product(*gate_up)
                    if keep:
                        kept.append(gate_up)
                    del gate_up
                    (out_Cn,) = products(ops, each.one_pass, each.modules[2:], h_Fn, values=True).outputs
                    _add_columns(y_CN, each.tokens, out_Cn.mul_(_scores(scores_Nk, each)))
        ctx.ops, ctx.routed, ctx.keep = ops, routed, keep
        ctx.save_for_backward(x_CN, scores_Nk, *(tensor for pair in kept for tensor in pair))
        return y_CN.t()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_NC: Tensor) -> tuple[Tensor | None, ...]:
        ops: StreamedOps = ctx.ops
        x_CN, scores_Nk, *kept = ctx.saved_tensors
        dy_CN = dy_NC.t().contiguous()
        dx_CN = torch.zeros_like(x_CN)
        d_scores_Nk = torch.zeros_like(scores_Nk)
        backwards = list(reversed(list(enumerate(ctx.routed))))
        with ops.weights.routed([part for _, each in backwards for part in _backward_parts(ops, each, ctx.keep)]):
            for i, each in backwards:
                x_Cn = x_CN.index_select(1, each.tokens)
                gate_Fn, up_Fn = kept[2 * i : 2 * i + 2] if ctx.keep else _gate_up(ops, each, x_Cn)
                dx_Cn, d_scores_n = _gradients(
                    ops, each, x_Cn, gate_Fn, up_Fn, dy_CN.index_select(1, each.tokens), _scores(scores_Nk, each)
                )
                _add_columns(dx_CN, each.tokens, dx_Cn)
                d_scores_Nk[each.tokens, each.places] = d_scores_n
        return None, None, None, None, dx_CN.t(), d_scores_Nk, *(None for _ in ctx.needs_input_grad[6:])


def _gradients(
    ops: StreamedOps, each: Routed, x_Cn: Tensor, gate_Fn: Tensor, up_Fn: Tensor, dy_Cn: Tensor, scores_n: Tensor
) -> tuple[Tensor, Tensor]:
    """Of an expert's input and of its scores; adds those of its updates and of its weights that train."""
    now, elementwise = each.one_pass, ops.kernels.elementwise
    gate, up, down = each.modules
    h_Fn = elementwise.silu_product(gate_Fn, up_Fn)
    update = ops.updates.get(down)
    da_rn = None if update is None else through_B(ops, now, update, dy_Cn)
    # scores of what is multiplied instead of those of the product: the weight's gradient is the same
    scored_Fn = h_Fn * scores_n if ops.trains(f"{down}.weight") else None
    dh_Fn = input_gradient(ops, now, [down], {down: dy_Cn}, {} if da_rn is None else {down: da_rn}, scored_Fn)
    d_scores_n = sum_of_features(h_Fn * dh_Fn)
    if update is not None:
        _add_gradients(ops, now, down, h_Fn, dy_Cn * scores_n, da_rn.mul_(scores_n))
    d_gate_Fn, d_up_Fn = elementwise.silu_product_gradient(dh_Fn.mul_(scores_n), gate_Fn, up_Fn)
    dx_Cn = input_gradient(ops, now, [gate, up], {gate: d_gate_Fn, up: d_up_Fn}, {}, x_Cn)
    update = ops.updates.get(each.gate_up)
    if update is not None:
        d_gate_up = torch.cat((d_gate_Fn, d_up_Fn))
        da_rn = through_B(ops, now, update, d_gate_up)
        a_rC = update.lora_A.detach().to(dx_Cn.dtype)
        ops.kernels.linear.input_gradient(a_rC, da_rn, dx_Cn, False, None, now.columns)
        _add_gradients(ops, now, each.gate_up, x_Cn, d_gate_up, da_rn)
    return dx_Cn, d_scores_n


def _add_gradients(ops: StreamedOps, now: Pass, module: str, x_Kn: Tensor, dy_On: Tensor, da_rn: Tensor) -> None:
    """Of a module's update, whose ``A x`` is computed again."""
    projected_rn = through_A(ops, now, {module: ops.updates[module]}, x_Kn, x_Kn)
    add_low_rank_gradients(ops, now, {module: dy_On}, {module: da_rn}, x_Kn, projected_rn)


def _gate_up(ops: StreamedOps, each: Routed, x_Cn: Tensor) -> tuple[Tensor, Tensor]:
    now, update = each.one_pass, ops.updates.get(each.gate_up)
    x = ops.kernels.linear.packed(x_Cn, now.columns)
    terms: list[tuple[Tensor, Tensor, float] | None] = [None, None]
    if update is not None:
        a_rn = small_product(ops, now, update.lora_A.detach().to(x_Cn.dtype), x, x_Cn)
        terms = [(b_Fr, a_rn, update.scale) for b_Fr in update.lora_B.detach().to(x_Cn.dtype).chunk(2)]
    gate_Fn, up_Fn = (
        product(ops, now, module, x, x_Cn, term) for module, term in zip(each.modules[:2], terms, strict=True)
    )
    return gate_Fn, up_Fn


def _parts(ops: StreamedOps, modules: Sequence[str]) -> list[Part]:
    return [part for module in modules for part in ops.weights.parts(f"{module}.weight")]


def _backward_parts(ops: StreamedOps, each: Routed, keep: bool) -> list[Part]:
    """What one expert's gradient borrows."""
    gate, up, down = each.modules
    again = [] if keep else _parts(ops, (gate, up))
    return again + _parts(ops, (down,))[::-1] + _parts(ops, (gate, up))[::-1]


def _scores(scores_Nk: Tensor, each: Routed) -> Tensor:
    """[n]"""
    return scores_Nk[each.tokens, each.places]


def _add_columns(total_CN: Tensor, tokens: Tensor, added_Cn: Tensor) -> None:
    """Each token once, so that the order of sums is the order of experts."""
    total_CN.index_copy_(1, tokens, total_CN.index_select(1, tokens).add_(added_Cn))
