"""A decoder written with the blocks, with what no architecture of lema's own has: heads of which a part turns, and a
scale of its own. The oracle is the same model in plain torch.

Shapes: B rows, T tokens, C hidden size, H heads, D head size.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lema_core.adapter import TensorSpec
from lema_core.blocks.attention import SelfAttention
from lema_core.blocks.config import Heads, HfConfig
from lema_core.blocks.decoder import Decoder, DecoderConfig
from lema_core.blocks.mlp import GatedMlp
from lema_core.blocks.rope import RopeConfig
from lema_core.checkpoint import bind_tensors, read_manifest, write_safetensors
from lema_core.device import CpuDevice
from lema_core.ops.context import ForwardContext
from lema_core.ops.kernels import Kernels
from lema_core.ops.low_rank import LowRankUpdate
from lema_core.ops.streamed import StreamedOps
from lema_core.runtime.batch import TokenBatch
from lema_core.runtime.runner import ModelRunner, TrainPass
from lema_core.store.model import cut_model
from lema_core.store.store import TensorStore

HF_CONFIG = {
    "vocab_size": 31,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "head_dim": 12,
    "rope_theta": 50.0,
}
SCALE = 0.5
LAYER = "model.layers.1"


class PartlyTurned(Decoder):
    def __init__(self, config: DecoderConfig) -> None:
        super().__init__(config)
        self.attention = SelfAttention(
            config.hidden_size,
            config.heads,
            qkv_bias=True,
            norms=("q_norm", "k_norm"),
            norm_eps=config.norm_eps,
            scale=SCALE,
        )
        self.mlp = GatedMlp(config.hidden_size, config.intermediate_size, bias=True, gate="w1", up="w3", down="w2")

    @classmethod
    def from_hf_config(cls, hf_config: Mapping[str, Any]) -> PartlyTurned:
        config = DecoderConfig(**DecoderConfig.common(HfConfig(hf_config)))
        partly = RopeConfig.from_hf_config({**hf_config, "partial_rotary_factor": 0.5}, partial=True)
        return cls(replace(config, rope=partly))

    def block_tensors(self, prefix: str, layer: int) -> Iterable[TensorSpec]:
        yield self.norm_tensor(f"{prefix}.norm", layer)
        yield from self.attention.tensors(f"{prefix}.attn", layer)
        yield from self.mlp.tensors(f"{prefix}.mlp", layer)

    def block(self, ops: StreamedOps, layer: int, x_BTC: Tensor, ctx: ForwardContext) -> Tensor:
        prefix = f"model.layers.{layer}"
        x_BTC = x_BTC + self.attention(ops, f"{prefix}.attn", layer, self.norm(ops, x_BTC, f"{prefix}.norm"), ctx)
        return self.mlp.block_output(ops, f"{prefix}.mlp", x_BTC, x_BTC)


def plain_logits(w: Mapping[str, Tensor], ids_BT: Tensor, updates: Mapping[str, LowRankUpdate]) -> Tensor:
    heads, turning, eps = Heads(3, 1, 12), 6, 1e-6
    b, t = ids_BT.shape
    positions = torch.arange(t).float()
    angles = positions[:, None] / 50.0 ** (torch.arange(0, turning, 2).float() / turning)
    cos, sin = torch.cat([angles.cos()] * 2, dim=1), torch.cat([angles.sin()] * 2, dim=1)

    def linear(x: Tensor, module: str) -> Tensor:
        y = F.linear(x, w[f"{module}.weight"], w.get(f"{module}.bias"))
        update = updates.get(module)
        return y if update is None else y + update.scale * (x @ update.lora_A.t()) @ update.lora_B.t()

    def turned(x_BHTD: Tensor) -> Tensor:
        first, rest = x_BHTD[..., :turning], x_BHTD[..., turning:]
        halves = torch.cat((-first[..., turning // 2 :], first[..., : turning // 2]), dim=-1)
        return torch.cat((first * cos + halves * sin, rest), dim=-1)

    x = w["model.embed_tokens.weight"][ids_BT]
    for layer in range(2):
        root = f"model.layers.{layer}"
        h = F.rms_norm(x, (24,), w[f"{root}.norm.weight"], eps)
        q, k, v = (
            linear(h, f"{root}.attn.{name}").view(b, t, -1, heads.dim).transpose(1, 2)
            for name in ("q_proj", "k_proj", "v_proj")
        )
        q = turned(F.rms_norm(q, (12,), w[f"{root}.attn.q_norm.weight"], eps))
        k = turned(F.rms_norm(k, (12,), w[f"{root}.attn.k_norm.weight"], eps))
        scores = (q @ k.transpose(2, 3)) * SCALE
        scores = scores.masked_fill(~torch.ones(t, t, dtype=torch.bool).tril(), float("-inf"))
        x = x + linear((scores.softmax(-1) @ v).transpose(1, 2).reshape(b, t, -1), f"{root}.attn.o_proj")
        inside = F.silu(linear(x, f"{root}.mlp.w1")) * linear(x, f"{root}.mlp.w3")
        x = x + linear(inside, f"{root}.mlp.w2")
    return F.linear(F.rms_norm(x, (24,), w["model.norm.weight"], eps), w["lm_head.weight"])


@pytest.fixture
def model(tmp_path: Path) -> Iterator[tuple[ModelRunner, dict[str, Tensor], dict[str, LowRankUpdate]]]:
    """A runner over the smallest windows, its weights, and LoRA weights on a linear that turns and one other."""
    adapter = PartlyTurned.from_hf_config(HF_CONFIG)
    generator = torch.Generator().manual_seed(0)
    weights = {}
    for spec in adapter.tensors():
        noise = torch.randn(spec.shape, generator=generator) * 0.3
        weights[spec.name] = 1 + noise if spec.role == "norm" else noise
    tensors = [(name, w.dtype, tuple(w.shape), lambda w=w: w) for name, w in weights.items()]
    write_safetensors(tmp_path / "model.safetensors", tensors, fsync=False)
    updates = {}
    for module, out_size in ((f"{LAYER}.attn.q_proj", 36), (f"{LAYER}.mlp.w3", 40)):
        lora_A, lora_B = (torch.randn(shape, generator=generator) * 0.3 for shape in ((2, 24), (out_size, 2)))
        updates[module] = LowRankUpdate(lora_A.requires_grad_(), lora_B.requires_grad_(), 2.0, 0.0)
    device = CpuDevice()
    streamed = cut_model(adapter, bind_tensors(read_manifest(tmp_path), adapter), 2_000)
    sizes = streamed.sizes(streamed.smallest_bytes, streamed.smallest_bytes, device.shares_ram)
    runner = ModelRunner(adapter, streamed, TensorStore(streamed, device, sizes), updates, Kernels())
    yield runner, weights, updates
    runner.close()


def test_logits_and_gradients(model) -> None:
    runner, weights, updates = model
    ids = torch.randint(0, 31, (2, 7), generator=torch.Generator().manual_seed(1))
    expected = plain_logits(weights, ids, updates)
    assert (runner.logits(TokenBatch.of(ids)) - expected).norm() <= 1e-5 * expected.norm()
    loss = F.cross_entropy(expected[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    wanted = torch.autograd.grad(loss, [each for update in updates.values() for each in update.parameters()])
    found = runner.train_step([TokenBatch.of(ids, None, ids)], TrainPass(1, seed=0), step=0)
    assert found == pytest.approx(loss.item(), rel=1e-5)
    gradients = [update.gradient(each) for update in updates.values() for each in update.parameters()]
    for gradient, of_plain in zip(gradients, wanted, strict=True):
        assert (gradient - of_plain).norm() <= 1e-5 * of_plain.norm()


def test_tensors_are_declared_in_the_order_of_use() -> None:
    specs = PartlyTurned.from_hf_config(HF_CONFIG).tensors()
    names = [spec.name.removeprefix(f"{LAYER}.") for spec in specs if spec.layer == 1]
    assert names == [
        "norm.weight",
        *(f"attn.{name}.{part}" for name in ("q_proj", "k_proj", "v_proj") for part in ("weight", "bias")),
        "attn.q_norm.weight",
        "attn.k_norm.weight",
        "attn.o_proj.weight",
        *(f"mlp.{name}.{part}" for name in ("w1", "w3", "w2") for part in ("weight", "bias")),
    ]
    assert {spec.role for spec in specs if spec.name.endswith(".bias")} == {"bias"}
    shapes = {spec.name.removeprefix(f"{LAYER}."): spec.shape for spec in specs}
    assert shapes["attn.k_proj.weight"] == (12, 24) and shapes["attn.o_proj.weight"] == (24, 36)
    assert shapes["mlp.w2.weight"] == (24, 40) and shapes["mlp.w2.bias"] == (24,)
