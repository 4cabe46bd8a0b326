"""A feed-forward part made of experts, and how files hold them.

Shapes: B rows, T tokens, N = B * T tokens, k experts of a token, E experts, C hidden size, F feed-forward size.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from lema_core.adapter import TensorSpec
from lema_core.blocks.config import HfConfig
from lema_core.checkpoint.segments import Segment, TensorInfo
from lema_core.errors import ConfigError
from lema_core.ops.streamed import StreamedOps

#: what the files of Mixtral's and LFM2's kind call the linears of an expert
_SPELLINGS = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}


@dataclass(frozen=True)
class Experts:
    """``n`` experts, each ``down(silu(gate(x)) * up(x))``."""

    hidden_size: int
    intermediate_size: int
    n: int

    def tensors(self, prefix: str, layer: int) -> Iterator[TensorSpec]:
        """What lies under ``prefix`` (``model.layers.3.mlp.experts``)."""
        inside = (self.intermediate_size, self.hidden_size)
        for expert in range(self.n):
            for name, shape in (("gate_proj", inside), ("up_proj", inside), ("down_proj", inside[::-1])):
                yield TensorSpec(f"{prefix}.{expert}.{name}.weight", shape, "expert", layer, expert=expert)

    def modules(self, prefix: str, layer: int) -> Iterator[TensorSpec]:
        """What LoRA can be put on; gate and up are one linear, as transformers stacks them."""
        f, c = self.intermediate_size, self.hidden_size
        for expert in range(self.n):
            for name, shape in (("gate_up_proj", (2 * f, c)), ("down_proj", (c, f))):
                yield TensorSpec(f"{prefix}.{expert}.{name}.weight", shape, "linear", layer, expert=expert)

    def __call__(self, ops: StreamedOps, prefix: str, x_BTC: Tensor, scores_Nk: Tensor, picked_Nk: Tensor) -> Tensor:
        """x_BTC -> [B, T, C]: what the picked experts give, by their scores."""
        return ops.experts(x_BTC, scores_Nk, picked_Nk, prefix)


def expert_counts(hf: HfConfig, field: str, n: int, n_picked: int) -> tuple[int, int]:
    """How many experts there are and how many compute a token; ``n`` and ``n_picked`` where config.json says nothing.
    Raises ConfigError for more than there are."""
    n, n_picked = hf.size(field, n), hf.size("num_experts_per_tok", n_picked)
    if n_picked > n:
        raise ConfigError(f"config.json: num_experts_per_tok={n_picked} is more than {field}={n}")
    return n, n_picked


def softmax_scores(logits_NE: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Mixtral's router (Jiang et al. 2024, arXiv:2401.04088): the k largest probabilities, made to sum to one, fp32
    [N, k], and whose they are."""
    probabilities_NE = torch.softmax(logits_NE.float().contiguous(), dim=-1)
    scores_Nk, picked_Nk = probabilities_NE.topk(k, dim=-1)
    return scores_Nk / _sum_of_choices(scores_Nk), picked_Nk


def sigmoid_scores(
    logits_NE: Tensor, k: int, bias_E: Tensor | None, normalized: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """LFM2's router, as in DeepSeek-V3 (arXiv:2412.19437): each expert's probability by itself; ``bias_E`` decides who
    is picked, and is no part of the score. fp32 [N, k], and whose they are."""
    # A softmax of two is the sigmoid of their difference, and computes every number in the same way: torch's sigmoid
    # has another formula for those that fill no vector register.
    logits_NE = logits_NE.float()
    probabilities_NE = torch.softmax(torch.stack((logits_NE, torch.zeros_like(logits_NE)), dim=-1), dim=-1)[..., 0]
    wanted_NE = probabilities_NE if bias_E is None else probabilities_NE + bias_E
    picked_Nk = wanted_NE.topk(k, dim=-1)[1]
    scores_Nk = probabilities_NE.gather(1, picked_Nk)
    if normalized:
        scores_Nk = scores_Nk / (_sum_of_choices(scores_Nk) + 1e-6)
    return scores_Nk * scale, picked_Nk


def _sum_of_choices(scores_Nk: Tensor) -> Tensor:
    """[N, 1]; one after another, so that a token's sum does not depend on how many there are."""
    total_N1 = scores_Nk[:, :1]
    for choice in range(1, scores_Nk.shape[1]):
        total_N1 = total_N1 + scores_Nk[:, choice : choice + 1]
    return total_N1


def unfolded_experts(found: Mapping[str, TensorInfo], module: str) -> dict[str, TensorInfo]:
    """The tensors of files with experts one by one under ``module`` (``mlp``), as :meth:`Experts.tensors` names them.

    Read are w1, w2 and w3 of each expert, with the router under ``block_sparse_moe`` or ``module``, and stacked
    ``gate_up_proj`` [E, 2 F, C] and ``down_proj`` [E, C, F].
    """
    unfolded: dict[str, TensorInfo] = {}
    for name, info in found.items():
        own = re.sub(r"(^|\.)block_sparse_moe\.", rf"\1{module}.", name)
        if match := re.fullmatch(rf"(.*\b{module}\.experts\.\d+)\.(w[123])\.weight", own):
            unfolded[f"{match[1]}.{_SPELLINGS[match[2]]}.weight"] = info
        elif (match := re.fullmatch(rf"(.*\b{module}\.experts)\.(gate_up_proj|down_proj)", own)) and _stacked(info):
            unfolded |= _unstacked(match[1], match[2], info)
        else:
            unfolded[own] = info
    return unfolded


def _stacked(info: TensorInfo) -> bool:
    return len(info.shape) == 3 and (info.shape[1] % 2 == 0 or not info.name.endswith("gate_up_proj"))


def _unstacked(prefix: str, name: str, info: TensorInfo) -> Iterator[tuple[str, TensorInfo]]:
    parts = ("gate_proj", "up_proj") if name == "gate_up_proj" else (name,)
    n_experts, rows, columns = info.shape
    rows //= len(parts)
    nbytes = rows * columns * info.dtype.itemsize
    for index in range(n_experts * len(parts)):
        expert, part = divmod(index, len(parts))
        segment = Segment(info.segment.path, info.segment.offset + index * nbytes, nbytes)
        yield (
            f"{prefix}.{expert}.{parts[part]}.weight",
            replace(info, name=f"{info.name}[{expert}]", shape=(rows, columns), segment=segment),
        )
