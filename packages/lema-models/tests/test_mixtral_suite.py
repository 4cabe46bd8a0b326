"""Mixtral through lema_core alone, against transformers and PEFT."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lema_core.ops.balance import RouterBalance
from lema_core.ops.context import ForwardContext, Segment
from lema_core.ops.streamed import Pass
from lema_core.runtime.batch import TokenBatch
from lema_core.testing.adapter_experts import ExpertAdapterSuite
from lema_models.mixtral import MixtralAdapter


class TestMixtral(ExpertAdapterSuite):
    adapter = MixtralAdapter
    hf_config = {
        "model_type": "mixtral",
        "vocab_size": 97,
        "hidden_size": 48,
        "intermediate_size": 40,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
        "num_local_experts": 5,
        "num_experts_per_tok": 2,
    }
    variants = {
        "untied": {},
        "tied": {"tie_word_embeddings": True, "num_local_experts": 4},
        "window": {"sliding_window": 5, "num_experts_per_tok": 3, "num_hidden_layers": 3},
        "odd heads": {"head_dim": 20, "num_attention_heads": 3, "num_key_value_heads": 1, "num_local_experts": 2},
        "balanced": {"output_router_logits": True, "router_aux_loss_coef": 0.7},
    }
    slow = frozenset({"untied", "tied", "odd heads", "balanced"})
    buffers = {"model.layers.0.self_attn.rotary_emb.inv_freq": (6,)}

    def oracle_loss(self, model: Any, batches: Sequence[TokenBatch], logits_BTV: Sequence[Tensor]) -> Tensor:
        """With the routers' auxiliary loss, where the config asks for it: of each micro-batch by its targets."""
        loss = super().oracle_loss(model, batches, logits_BTV)
        if not model.config.output_router_logits:
            return loss
        n_targets = sum(batch.n_targets for batch in batches)
        for batch in batches:
            if batch.n_targets:
                mask = batch.attention_mask.long()
                positions = (mask.cumsum(dim=1) - 1).clamp(min=0)
                given = {"input_ids": batch.input_ids, "attention_mask": mask, "position_ids": positions}
                auxiliary = model(**given, use_cache=False).aux_loss
                loss = loss + model.config.router_aux_loss_coef * auxiliary.double() * batch.n_targets / n_targets
        return loss


def test_the_auxiliary_loss_of_even_routers_is_one_per_choice() -> None:
    """Equal probabilities, and every expert picked equally often: experts * sum_e (k / E) (1 / E) = k."""
    segments = (Segment(0, 6, 1, 6),)
    ctx = ForwardContext(torch.arange(6)[None], segments=segments, shares=(1.0,))
    balance = RouterBalance(ctx, n_experts=3, n_layers=2, coefficient=0.5)
    picked_Nk = torch.tensor([[0, 1], [1, 2], [2, 0]] * 2)
    for _ in range(2):
        balance.count(Pass(segments), torch.zeros(6, 3), picked_Nk)
    assert abs(balance.loss() - 0.5 * 2) < 1e-6
    assert balance.gradient(torch.zeros(6, 3)).abs().max() < 1e-6
