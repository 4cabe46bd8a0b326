"""AdapterSuite fails adapters that are wrong in one place each: Llamas that were tampered with."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from lema_core.ops.elementwise import rms_norm
from lema_core.testing.adapter_suite import AdapterSuite
from lema_models.llama import LlamaAdapter


class WrongEpsilon(LlamaAdapter):
    def norm(self, ops, x_BTC, name):
        return ops.rms_norm(x_BTC, f"{name}.weight", 1e-5)


class CountsPositionsFromOneAfterACache(LlamaAdapter):
    """The angles between new tokens are right, those to cached ones are not."""

    def prepare(self, ctx):
        if ctx.cache is not None and ctx.cache.length:
            ctx.positions_BT = ctx.positions_BT + 1
        super().prepare(ctx)


class SeesPadding(LlamaAdapter):
    def block(self, ops, layer, x_BTC, ctx):
        if not ctx.segments:
            ctx = replace(ctx, mask_BTS=None)
        return super().block(ops, layer, x_BTC, ctx)


class RoundsByTheNumberOfTokens(LlamaAdapter):
    """torch computes SiLU of what fills no vector register by another formula."""

    def block(self, ops, layer, x_BTC, ctx):
        prefix = f"model.layers.{layer}"
        h_BTC = self.norm(ops, x_BTC, f"{prefix}.input_layernorm")
        x_BTC = x_BTC + self.attention(ops, f"{prefix}.self_attn", layer, h_BTC, ctx)
        h_BTC = self.norm(ops, x_BTC, f"{prefix}.post_attention_layernorm")
        gate_BTF, up_BTF = ops.linears(h_BTC, [f"{prefix}.mlp.gate_proj", f"{prefix}.mlp.up_proj"])
        return ops.block_output(x_BTC, F.silu(gate_BTF) * up_BTF, f"{prefix}.mlp.down_proj")


class HidesALinear(LlamaAdapter):
    def linear_modules(self):
        return (spec for spec in super().linear_modules() if not spec.name.endswith("k_proj.weight"))


class LosesAGradient(LlamaAdapter):
    """The values are right."""

    def block(self, ops, layer, x_BTC, ctx):
        prefix = f"model.layers.{layer}"
        h_BTC = self.norm(ops, x_BTC, f"{prefix}.input_layernorm")
        x_BTC = x_BTC + self.attention(ops, f"{prefix}.self_attn", layer, h_BTC.detach(), ctx)
        h_BTC = self.norm(ops, x_BTC, f"{prefix}.post_attention_layernorm")
        return self.mlp.block_output(ops, f"{prefix}.mlp", x_BTC, h_BTC)


class FreezesNorms(LlamaAdapter):
    """The values are right, and so are all other gradients."""

    def norm(self, ops, x_BTC, name):
        return rms_norm(ops.kernels.elementwise, x_BTC, ops.held(f"{name}.weight"), self.config.norm_eps)


class TrainsPadding(LlamaAdapter):
    def embed(self, ops, ids_BT, ctx):
        return ops.embedding(ids_BT, "model.embed_tokens.weight")


class WrongLayer(LlamaAdapter):
    def tensors(self):
        return [replace(spec, layer=0) if spec.layer is not None else spec for spec in super().tensors()]


class ForgetsATensor(LlamaAdapter):
    def tensors(self):
        return [spec for spec in super().tensors() if spec.name != "model.layers.1.self_attn.v_proj.bias"]


class IgnoresUnnamedBuffers(LlamaAdapter):
    ignored = (*LlamaAdapter.ignored, r"masked_bias$")


class RandomDropout(LlamaAdapter):
    """Drawn anew when the block is computed again."""

    def block(self, ops, layer, x_BTC, ctx):
        kept = torch.rand(x_BTC.shape) > 0.1 if ctx.segments else torch.ones(x_BTC.shape)
        return super().block(ops, layer, x_BTC * kept, ctx)


class Suite(AdapterSuite):
    hf_config = {
        "model_type": "llama",
        "vocab_size": 61,
        "hidden_size": 36,
        "intermediate_size": 50,
        "num_hidden_layers": 2,
        "num_attention_heads": 3,
        "max_position_embeddings": 64,
        "attention_bias": True,
        "pad_token_id": 3,
    }
    buffers = {"model.layers.0.self_attn.rotary_emb.inv_freq": (6,)}


@pytest.fixture
def suite() -> Iterator[Callable[[type[LlamaAdapter]], Suite]]:
    made: list[Suite] = []

    def make(adapter: type[LlamaAdapter]) -> Suite:
        tampered = type("Tampered", (Suite,), {"adapter": adapter})
        tampered.setup_class()
        made.append(tampered())
        made[-1].setup_method()
        return made[-1]

    yield make
    for each in made:
        each.teardown_method()
        each.teardown_class()


@pytest.mark.parametrize(
    ("adapter", "test", "words"),
    [
        (WrongEpsilon, "logits_and_loss", r"logits of .*: relative difference .* at most 1e-05"),
        (CountsPositionsFromOneAfterACache, "cached_generation", "row 0, token 1: logits: relative difference"),
        (CountsPositionsFromOneAfterACache, "a_cache_fed_in_pieces", "row 1, tokens 1 to 6: relative difference"),
        (SeesPadding, "padding_changes_nothing", "padded on the left"),
        (RoundsByTheNumberOfTokens, "no_window_or_schedule_changes_a_bit", "streamed, together, recomputed: "),
        (RandomDropout, "no_window_or_schedule_changes_a_bit", "differ"),
        (HidesALinear, "lora_is_possible_on_every_linear", r"not declared: .*layers\.0\.self_attn\.k_proj"),
        (LosesAGradient, "logits_loss_and_gradients_of_training", r"step 0: .* the worst: model\.layers\.0\."),
        (FreezesNorms, "gradients_of_every_weight", r"5 of \d+ differ .* the worst: model\..*norm\.weight"),
        (TrainsPadding, "gradients_of_every_weight", r"1 of \d+ differ .* the worst: model\.embed_tokens\.weight"),
        (WrongLayer, "every_tensor_of_the_file_is_used", r"model\.layers\.1\."),
        (ForgetsATensor, "every_tensor_of_the_file_is_used", r"layers\.1\.self_attn\.v_proj\.bias"),
        (IgnoresUnnamedBuffers, "files_as_the_hub_has_them", r"buffers: none that 'masked_bias\$' ignores"),
    ],
)
def test_a_wrong_adapter_is_failed(adapter, test, words, suite) -> None:
    examined = suite(adapter)
    with pytest.raises((AssertionError, UserWarning), match=words):
        getattr(examined, f"test_{test}")("plain")
