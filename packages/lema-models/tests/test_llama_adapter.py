"""The Llama adapter with nothing of lema but lema_core around it, against transformers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from lema_core.checkpoint import bind_tensors, read_hf_config, read_manifest
from lema_core.device import CpuDevice, Device
from lema_core.errors import ConfigError
from lema_core.kv import KVCache
from lema_core.ops.kernels import Kernels
from lema_core.ops.low_rank import LowRankUpdate
from lema_core.records import load_object
from lema_core.runtime.batch import TokenBatch
from lema_core.runtime.runner import ModelRunner, TrainPass
from lema_core.runtime.schedule import Scheduler
from lema_core.store.model import cut_model
from lema_core.store.store import TensorStore
from lema_core.testing.simulated import SimulatedAccelerator
from lema_models.llama import LlamaAdapter
from lema_models.plugin import lema_architectures

VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "tied": {"tie_word_embeddings": True},
    "biases": {"attention_bias": True, "mlp_bias": True},
    "wide_heads": {"head_dim": 32},
    "no_groups": {"num_key_value_heads": 4},
    "one_kv_head": {"num_key_value_heads": 1},
    "eps": {"rms_norm_eps": 1e-2},
    "theta": {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}},
}


def make(folder: Path, **changes: Any) -> LlamaForCausalLM:
    """A random Llama of two layers, saved to ``folder``; returns transformers' own."""
    sizes = {"vocab_size": 96, "hidden_size": 64, "intermediate_size": 80, "num_hidden_layers": 2}
    config = LlamaConfig(**{**sizes, "num_attention_heads": 4, "num_key_value_heads": 2, **changes})
    config._attn_implementation = "eager"
    model = LlamaForCausalLM(config).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator) * 0.1
            parameter.copy_(1 + noise if name.endswith("norm.weight") else noise)
    model.save_pretrained(folder)
    return model


Opened = tuple[LlamaAdapter, ModelRunner]


@pytest.fixture
def open_runner() -> Iterator[Callable[..., Opened]]:
    stores: list[TensorStore] = []
    threads = torch.get_num_threads()
    torch.set_num_threads(1)

    def build(
        folder: Path, device: Device | None = None, max_granule_bytes: int = 9_000, updates: dict | None = None
    ) -> Opened:
        """The smallest windows there can be, matrices in several row blocks."""
        device = device or CpuDevice()
        adapter = LlamaAdapter.from_hf_config(read_hf_config(folder))
        model = cut_model(adapter, bind_tensors(read_manifest(folder), adapter), max_granule_bytes)
        sizes = model.sizes(model.smallest_bytes, model.smallest_bytes, device.shares_ram)
        stores.append(TensorStore(model, device, sizes))
        return adapter, ModelRunner(adapter, model, stores[-1], updates or {}, Kernels())

    yield build
    torch.set_num_threads(threads)
    for store in stores:
        store.close()


def token_ids(rows: int = 2, length: int = 9) -> torch.Tensor:
    return torch.randint(0, 96, (rows, length), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("variant", VARIANTS)
def test_tensors_are_transformers_parameters(variant, tmp_path) -> None:
    model = make(tmp_path, **VARIANTS[variant])
    adapter = LlamaAdapter.from_hf_config(read_hf_config(tmp_path))
    specs = {spec.name: spec for spec in adapter.tensors()}
    expected = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    assert {name: spec.shape for name, spec in specs.items()} == expected
    tied = {spec.name: spec.tied_to for spec in specs.values() if spec.tied_to}
    assert tied == ({"lm_head.weight": "model.embed_tokens.weight"} if variant == "tied" else {})
    linears = [name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)]
    assert sorted(spec.module for spec in adapter.linear_modules()) == sorted(linears)
    assert all(spec.layer == (int(n.split(".")[2]) if ".layers." in n else None) for n, spec in specs.items())
    assert {spec.role for name, spec in specs.items() if name.endswith("norm.weight")} == {"norm"}


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits(variant, tmp_path, open_runner) -> None:
    model = make(tmp_path, **VARIANTS[variant])
    ids = token_ids()
    _, runner = open_runner(tmp_path)
    with torch.no_grad():
        expected = model(ids).logits
    assert (runner.logits(TokenBatch.of(ids)) - expected).abs().max() <= 1e-5


def test_logits_of_left_padded_rows(tmp_path, open_runner) -> None:
    model = make(tmp_path)
    ids, mask = token_ids(), torch.ones(2, 9, dtype=torch.int64)
    mask[0, :4] = 0
    _, runner = open_runner(tmp_path)
    with torch.no_grad():
        expected = model(ids, attention_mask=mask, position_ids=(mask.cumsum(1) - 1).clamp(min=0)).logits
    real = mask.bool()
    assert (runner.logits(TokenBatch.of(ids, mask)) - expected)[real].abs().max() <= 1e-5


def test_a_cache_fed_in_pieces(tmp_path, open_runner) -> None:
    """One token, several, and several on a warm cache: the last logits are those of the whole prompt."""
    model = make(tmp_path)
    ids = token_ids(2, 12)
    with torch.no_grad():
        expected = model(ids).logits
    adapter, runner = open_runner(tmp_path)
    cache = KVCache(2, (2, *adapter.cache_shape()), max_tokens=12, chunk_size=5)
    for start, stop in ((0, 1), (1, 6), (6, 7), (7, 12)):
        batch = TokenBatch(ids[:, start:stop], torch.ones(2, stop, dtype=torch.bool))
        assert (runner.next_logits(batch, cache) - expected[:, stop - 1]).abs().max() <= 1e-5
    assert cache.length == 12


@pytest.mark.parametrize("recompute", [True, False])
@pytest.mark.parametrize("device", ["cpu", "accelerator"])
def test_gradients_of_low_rank_updates(device, recompute, tmp_path, open_runner) -> None:
    """LoRA on every linear layer, against autograd through transformers with W + s B A written out."""
    model = make(tmp_path, attention_bias=True)
    generator = torch.Generator().manual_seed(2)
    updates, scale = {}, 0.5
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear):
            a, b = (
                torch.randn(shape, generator=generator) * 0.1
                for shape in ((3, module.in_features), (module.out_features, 3))
            )
            updates[name] = LowRankUpdate(a.requires_grad_(), b.requires_grad_(), scale, 0.0)
    ids = token_ids()
    simulated = SimulatedAccelerator(latency_s=1e-4, compute_lag_s=1e-4) if device == "accelerator" else None
    _, runner = open_runner(tmp_path, simulated, updates=updates)
    runner.scheduler = Scheduler(runner.scheduler.costs, recompute=recompute)
    loss = runner.train_step([TokenBatch.of(ids, None, ids)], TrainPass(0, seed=0), step=0)

    pairs = {n: [t.detach().clone().requires_grad_() for t in (u.lora_A, u.lora_B)] for n, u in updates.items()}
    weights = {f"{n}.weight": model.get_parameter(f"{n}.weight") + scale * b @ a for n, (a, b) in pairs.items()}
    logits = torch.func.functional_call(model, weights, (ids,)).logits
    expected = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    expected.backward()
    assert loss == pytest.approx(expected.item(), rel=1e-5)
    for name, update in updates.items():
        for found, pair in zip((update.lora_A, update.lora_B), pairs[name], strict=True):
            assert (found.grad - pair.grad).norm() <= 1e-5 * pair.grad.norm(), name
    assert simulated is None or simulated.overwrites_while_read == 0


def test_nothing_below_the_lowest_trained_layer_is_computed_backwards(tmp_path, open_runner) -> None:
    """LoRA in layer 1 only: no weight of layer 0 is borrowed a second time."""
    make(tmp_path)
    name = "model.layers.1.mlp.up_proj"
    updates = {name: LowRankUpdate(torch.ones(2, 64, requires_grad=True), torch.ones(80, 2, requires_grad=True), 1, 0)}
    adapter, runner = open_runner(tmp_path, updates=updates)
    borrowed: list[str] = []
    borrow = runner.store.borrow
    runner.store.borrow = lambda part: borrowed.append(part.tensor) or borrow(part)
    ids = token_ids()
    runner.train_step([TokenBatch.of(ids, None, ids)], TrainPass(1, seed=0), step=0)
    uses = {spec.name: borrowed.count(spec.name) / len(runner.store.parts(spec.name)) for spec in adapter.tensors()[1:]}
    assert all(count == 1 for name, count in uses.items() if ".layers.0." in name), uses
    # what stands before the trained matrix in its layer gets no gradient either
    assert uses["model.layers.1.self_attn.q_proj.weight"] == 1
    assert uses["model.layers.1.mlp.down_proj.weight"] == 2


def test_the_record_names_the_adapter_without_importing_it() -> None:
    (record,) = (each for each in lema_architectures() if each.name == "llama")
    assert record.model_types == ("llama",) and load_object(record.adapter) is LlamaAdapter


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"hidden_size": None}, "hidden_size"),
        ({"num_key_value_heads": 3}, "num_attention_heads=4 .* num_key_value_heads=3"),
        ({"hidden_size": 66}, "hidden_size=66 .* num_attention_heads=4"),
        ({"head_dim": 15}, "head_dim=15 is odd"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu'"),
        ({"rope_parameters": {"rope_type": "longrope", "factor": 2.0}}, "'longrope' is not supported"),
        ({"rope_parameters": {"rope_type": "llama3", "factor": 8.0}}, "lacks low_freq_factor"),
    ],
)
def test_fields_that_contradict_each_other(changes, words) -> None:
    config = {
        "vocab_size": 96,
        "hidden_size": 64,
        "intermediate_size": 80,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }
    LlamaAdapter.from_hf_config(config)
    with pytest.raises(ConfigError, match=words):
        LlamaAdapter.from_hf_config({**config, **changes})
