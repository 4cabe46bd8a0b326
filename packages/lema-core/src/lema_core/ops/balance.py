"""The auxiliary loss that keeps a router from sending everything to few experts (Fedus et al. 2021, "Switch
Transformers", arXiv:2101.03961, equations 4 to 6; over all layers at once, as in transformers).

``experts * sum_e (share of tokens that picked e) * (mean probability of e)``, means over tokens and layers of one
micro-batch. Shapes: N tokens, E experts, k experts of a token, S micro-batches.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from lema_core.ops.context import ForwardContext
from lema_core.ops.elementwise import sum_of_features

if TYPE_CHECKING:
    from lema_core.ops.streamed import Pass


class RouterBalance:
    """What the routers of all layers did with the packed micro-batches of ``ctx``. ``coefficient``: of the loss, in a
    step's; a micro-batch counts by its share of the step's targets. Padding before a row's tokens does not count."""

    def __init__(self, ctx: ForwardContext, n_experts: int, n_layers: int, coefficient: float) -> None:
        self._segments = ctx.segments
        self._n_experts = n_experts
        self._picked_SE = torch.zeros(len(ctx.segments), n_experts, device=ctx.positions_BT.device)
        self._probability_SE = torch.zeros_like(self._picked_SE, dtype=torch.float64)
        n_tokens = ctx.segments[-1].stop
        self._counts_N = torch.ones(n_tokens, device=ctx.positions_BT.device)
        if ctx.real_BT is not None:
            self._counts_N.copy_(ctx.real_BT.flatten())
        self._rows = [n_layers * float(self._counts_N[s.start : s.stop].sum()) for s in ctx.segments]
        self._weights = [coefficient * share for share in ctx.shares]

    def watched(self, logits_NE: Tensor) -> Tensor:
        """``logits_NE``, of one layer's router, which then get the loss's gradient too."""
        return _Balanced.apply(self, logits_NE)

    def loss(self) -> float:
        """Of all micro-batches, once every layer was passed."""
        picked_SE = self._picked_SE.double() * self._probability_SE
        parts = zip(picked_SE.sum(dim=1).tolist(), self._rows, self._weights, strict=True)
        return sum(weight * self._n_experts * total / rows**2 for total, rows, weight in parts)

    @torch.no_grad()
    def count(self, now: Pass, logits_NE: Tensor, picked_Nk: Tensor) -> None:
        """What one layer's router picked; nothing where a block runs again for its gradient."""
        if now.again:
            return
        probabilities_NE = torch.softmax(logits_NE.float().contiguous(), dim=-1)
        for number, segment in enumerate(self._segments):
            where = slice(segment.start, segment.stop)
            counts_n = self._counts_N[where]
            for choice_n in picked_Nk[where].unbind(1):
                self._picked_SE[number].index_add_(0, choice_n, counts_n)
            weighted_nE = probabilities_NE[where] * counts_n.unsqueeze(1)
            self._probability_SE[number] += weighted_nE.double().sum(dim=0)

    def gradient(self, logits_NE: Tensor) -> Tensor:
        """d loss / d logits, fp32 [N, E]."""
        p_EN = torch.softmax(logits_NE.float().contiguous(), dim=-1).t().contiguous()
        dp_EN = torch.empty_like(p_EN)
        for number, segment in enumerate(self._segments):
            scale = self._weights[number] * self._n_experts / self._rows[number] ** 2
            where = slice(segment.start, segment.stop)
            dp_EN[:, where] = (self._picked_SE[number] * scale).unsqueeze(1) * self._counts_N[where]
        along_N = sum_of_features(dp_EN * p_EN)
        return dp_EN.sub_(along_N).mul_(p_EN).t()


class _Balanced(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, balance: RouterBalance, logits_NE: Tensor) -> Tensor:
        ctx.balance = balance
        ctx.save_for_backward(logits_NE)
        return logits_NE.view_as(logits_NE)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_logits_NE: Tensor) -> tuple[Tensor | None, ...]:
        (logits_NE,) = ctx.saved_tensors
        return None, d_logits_NE + ctx.balance.gradient(logits_NE).to(d_logits_NE.dtype)
