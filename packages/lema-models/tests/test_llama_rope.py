"""Llama beyond the length that it was trained on, with every kind of rotary scaling, against transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from lema_core.runtime.batch import TokenBatch
from lema_core.runtime.generation import generate_greedy
from lema_core.runtime.piece_run import Level
from lema_core.runtime.runner import TrainPass
from lema_core.testing import adapter_oracle as theirs
from lema_core.testing.adapter_suite import AdapterSuite
from lema_core.testing.comparing import assert_all_close, assert_close, assert_equal
from lema_core.testing.forced import ForcedSchedule
from lema_models.llama import LlamaAdapter

LONGEST = 16
DYNAMIC = {"rope_type": "dynamic", "factor": 2.0}
KINDS: dict[str, dict[str, Any]] = {
    "linear": {"rope_type": "linear", "factor": 3.0},
    "dynamic": DYNAMIC,
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8},
    "yarn scaled": {"rope_type": "yarn", "factor": 4.0, "attention_factor": 1.4, "truncate": False, "beta_fast": 4.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8,
    },
}


class Models(AdapterSuite):
    """The exam's tools alone: a model whose numbers depend on the longest row of a batch cannot take all of it."""

    adapter = LlamaAdapter
    hf_config = {
        "model_type": "llama",
        "vocab_size": 96,
        "hidden_size": 32,
        "intermediate_size": 40,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "max_position_embeddings": LONGEST,
    }
    variants = {name: {"rope_parameters": {"rope_theta": 100.0, **block}} for name, block in KINDS.items()}


@pytest.fixture(scope="module")
def all_models():
    Models.setup_class()
    yield Models()
    Models.teardown_class()


@pytest.fixture
def models(all_models):
    all_models.setup_method()
    yield all_models
    all_models.teardown_method()


def batch_of(rows: int, tokens: int, seed: int = 0) -> TokenBatch:
    ids = torch.randint(0, 96, (rows, tokens), generator=torch.Generator().manual_seed(seed))
    return TokenBatch.of(ids, None, ids)


def fresh_logits(folder: Path, batch: TokenBatch) -> torch.Tensor:
    """Of a model that has seen no other sequence: transformers goes on with the frequencies of a longer one."""
    with torch.no_grad():
        return theirs.logits(theirs.load_model(folder), batch)


@pytest.mark.parametrize("kind", KINDS)
def test_logits_within_and_beyond_the_longest(kind, models) -> None:
    folder = models.folder(kind)
    runner = models.open(folder)
    plain = models.open(models.folder(kind, rope_parameters={"rope_type": "default", "rope_theta": 100.0}))
    for tokens in (3, LONGEST, LONGEST + 1, 50):
        batch = batch_of(2, tokens)
        found = runner.logits(batch)
        assert_close(f"{tokens} tokens", found, fresh_logits(folder, batch))
        same_as_plain = torch.equal(found, plain.logits(batch))
        assert same_as_plain == (kind == "dynamic" and tokens <= LONGEST)


@pytest.mark.parametrize("kind", KINDS)
def test_cached_generation_past_the_longest(kind, models) -> None:
    """transformers turns each new token by the largest position so far, and leaves the keys before it as they are."""
    folder = models.folder(kind)
    prompts = [row.tolist() for row in batch_of(2, 12).input_ids]
    prompts[1] = prompts[1][:7]
    expected = theirs.generate(theirs.load_model(folder), prompts, 10)
    assert generate_greedy(models.open(folder), prompts, 10, chunk_size=4) == expected


def test_micro_batches_of_unequal_lengths(models) -> None:
    """Dynamic frequencies follow each micro-batch's own length: packed equals apart, bit for bit, and transformers."""
    folder = models.folder("dynamic")
    adapter, _ = models.bound(folder)
    updates = models.lora(adapter)
    batches = [batch_of(2, 9, 1), batch_of(1, 40, 2), batch_of(3, 17, 3)]

    def trained(groups: tuple[tuple[int, ...], ...], level: Level) -> dict[str, torch.Tensor]:
        runner = models.open(folder, updates)
        runner.scheduler = ForcedSchedule(runner.scheduler.costs, groups, [level] * adapter.n_layers)
        for update in updates.values():
            update.lora_A.grad = update.lora_B.grad = None
        loss = runner.train_step(batches, TrainPass(0, seed=0), step=0)
        gradients = {
            f"{module}.{name}": update.gradient(parameter).clone()
            for module, update in updates.items()
            for name, parameter in zip(("lora_A", "lora_B"), update.parameters(), strict=True)
        }
        return {"loss": torch.tensor(loss, dtype=torch.float64), **gradients}

    apart = trained(((0,), (1,), (2,)), Level.RECOMPUTE)
    assert_equal("packed", trained(((0, 1, 2),), Level.KEEP), apart)

    total = torch.zeros((), dtype=torch.float64)
    gradients: dict[str, torch.Tensor] = {}
    n_targets = sum(batch.n_targets for batch in batches)
    for batch in batches:
        model = models.peft(folder, adapter, updates)
        loss = theirs.mean_loss([theirs.logits(model, batch)], [batch]) * batch.n_targets / n_targets
        loss.backward()
        total += loss.detach()
        found = models.from_peft(adapter, {key: tensor.grad for key, tensor in theirs.trained(model).items()})
        for module, pair in found.items():
            for name, gradient in zip(("lora_A", "lora_B"), pair, strict=True):
                key = f"{module}.{name}"
                gradients[key] = gradients.get(key, torch.zeros(())) + gradient
    assert_all_close("transformers", apart, {"loss": total, **gradients})
