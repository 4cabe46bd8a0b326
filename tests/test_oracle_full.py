"""Training the model's own weights, overlapped, capped and from disk, against the same AdamW in plain torch (fp32)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from lema import LemaConfig, LemaModel
from lema._utils._conversion import merge_delta
from lema_train.schedule import learning_rate_at

STEPS, LR, DECAY = 20, 1e-3, 0.1
SIZES = {
    "vocab_size": 128, "hidden_size": 64, "intermediate_size": 112, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 128,
}  # fmt: skip
LAYERS = {"layer_types": ["conv", "full_attention", "conv", "full_attention"]}
EXPERTS = {"num_experts_per_tok": 2}
ALL: dict[str, dict[str, Any]] = {
    "llama": SIZES,
    "llama_tied": SIZES | {"tie_word_embeddings": True},
    "mistral": SIZES | {"sliding_window": 8},
    "mixtral": SIZES | EXPERTS | {"num_local_experts": 4},
    "gpt2": {"vocab_size": 128, "n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 64}
    | {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0},
    "lfm2": SIZES | LAYERS | {"block_auto_adjust_ff_dim": False},
    "lfm2_moe": SIZES | LAYERS | EXPERTS | {"num_experts": 4, "num_dense_layers": 1, "moe_intermediate_size": 48},
    "qwen2": SIZES,
    "qwen3": SIZES | {"head_dim": 16},
}
ATTENTION = {
    "gpt2": ["attn.c_attn", "attn.c_proj"],
    "lfm2": ["self_attn", "conv"],
    "lfm2_moe": ["self_attn", "conv"],
}
#: nothing stays in RAM that can pass through it
CAPPED = {"opt_state_ram": "1B", "grad_acc_ram": "1B"}
QUICK = ("llama_tied", "whole"), ("mixtral", "one layer"), ("gpt2", "emb and head")


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return tmp_path_factory.mktemp("full")


def folder_of(root: Path, model_type: str) -> Path:
    path = root / model_type
    if not path.exists():
        torch.manual_seed(0)
        config = AutoConfig.for_model(model_type.removesuffix("_tied"), **ALL[model_type])
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter += torch.randn(parameter.shape) * 0.05
        model.save_pretrained(path, max_shard_size="40KB")
    return path


def rows(step: int) -> Tensor:
    return torch.randint(1, 128, (2, 12), generator=torch.Generator().manual_seed(step))


def hf(folder: Path, attention: str = "eager") -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation=attention).eval()


def distance(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> float:
    return sum(float((one[name] - other[name]).pow(2).sum()) for name in one) ** 0.5


def reference(
    folder: Path, trains: Any, steps: int = STEPS, attention: str = "eager", max_norm: float | None = 1.0
) -> tuple[Any, list[float], list[float]]:
    """transformers' model after ``steps``, its losses and gradient norms."""
    model = hf(folder, attention)
    trained = {name: p for name, p in model.named_parameters() if trains(name)}
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name in trained)
    groups = [
        {"params": [p for p in trained.values() if p.dim() > 1], "weight_decay": DECAY},
        {"params": [p for p in trained.values() if p.dim() == 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW([g for g in groups if g["params"]], lr=LR, foreach=False)
    losses, norms = [], []
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate_at(step, steps, LR, "cosine", 0)
        optimizer.zero_grad()
        ids = rows(step)
        loss = torch.nn.functional.cross_entropy(model(ids).logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
        loss.backward()
        norms.append(torch.nn.utils.clip_grad_norm_(trained.values(), max_norm or math.inf).item())
        optimizer.step()
        losses.append(loss.item())
    return model, losses, norms


def opened(folder: Path, output: Path, **options: Any) -> LemaModel:
    values: dict[str, Any] = {
        "training_mode": "selective_full", "batch_size": 1, "gradient_accumulation_steps": 2, "learning_rate": LR,
        "lr_schedule": "cosine", "weight_decay": DECAY, "max_grad_norm": 1.0, "max_seq_length": 12,
        "max_steps": STEPS, "output_dir": str(output), "model_name_or_path": str(folder),
    }  # fmt: skip
    return LemaModel(LemaConfig(**{**values, **options}))


def trained(model: LemaModel, steps: int = STEPS, first: int = 0) -> tuple[list[float], list[float], Any]:
    trainer = model.get_trainer(total_steps=STEPS)
    losses, norms = [], []
    for step in range(first, steps):
        losses.append(trainer.train_step(rows(step), return_logits=False)[1])
        norms.append(trainer.metrics["grad_norm"])
    return losses, norms, trainer


def window(model: LemaModel, granules: int) -> str:
    """``weights_ram`` for so many granules of each region."""
    cut = model._model
    experts = 0 if cut.experts is None else cut.experts.slot_bytes
    rows_bytes = cut.default_rows() * cut.row_bytes + cut.bounce_bytes
    return f"{granules * (cut.layout.slot_bytes + experts) + rows_bytes}B"


SELECTIONS: dict[str, Any] = {
    "whole": lambda t: ({}, lambda name: True),
    "attention of the last two": lambda t: (
        {"trainable_modules": ATTENTION.get(t, ["self_attn"]), "trainable_layers": ["last:2"]},
        lambda name: (
            any(part in name for part in (".self_attn.", ".attn.", ".conv.")) and layer_of(name) in last_two(t)
        ),
    ),
    "emb and head": lambda t: (
        {"trainable_layers": ["emb", "head"]},
        lambda name: any(part in name for part in ("embed_tokens", "wte", "wpe", "lm_head")),
    ),
    "one layer": lambda t: ({"trainable_layers": [1]}, lambda name: layer_of(name) == 1),
}


def layer_of(name: str) -> int:
    return next((int(part) for part in name.split(".") if part.isdigit()), -1)


def last_two(model_type: str) -> tuple[int, int]:
    n = ALL[model_type].get("num_hidden_layers") or ALL[model_type]["n_layer"]
    return n - 2, n - 1


@pytest.mark.parametrize(
    ("model_type", "selection"),
    [
        pair if pair in QUICK else pytest.param(*pair, marks=pytest.mark.slow)
        for pair in ((model_type, selection) for model_type in ALL for selection in SELECTIONS)
    ],
)
def test_twenty_steps_are_those_of_plain_torch(model_type: str, selection: str, root: Path, tmp_path: Path) -> None:
    """Losses within 1e-5, and ||w - w_ref|| <= 1e-3 ||w_ref - w_0||; what is not selected stays as it is."""
    folder = folder_of(root, model_type)
    options, trains = SELECTIONS[selection](model_type)
    expected, losses, norms = reference(folder, trains)
    with opened(folder, tmp_path / "size", **options) as model:
        model.initialize_training()
        least = window(model, 2)
    with opened(folder, tmp_path / "out", weights_ram=least, **CAPPED, **options) as model:
        model.initialize_training()
        found, found_norms, trainer = trained(model)
        assert found == pytest.approx(losses, rel=1e-5)
        assert found_norms == pytest.approx(norms, rel=1e-4)
        trainer.save_checkpoint(tmp_path / "out" / "checkpoint-20")
        assert model.stats()["optim"].written_bytes
    merge_delta(folder, tmp_path / "out" / "checkpoint-20", tmp_path / "merged")
    merged, start = hf(tmp_path / "merged").state_dict(), hf(folder).state_dict()
    assert all(torch.equal(merged[name], start[name]) for name in start if not trains(name))
    ends = expected.state_dict()
    off, moved = distance(merged, ends), distance(ends, start)
    if off > 1e-3 * moved:
        # Adam turns the rounding of gradients that are almost zero into steps: as another attention does.
        assert off <= 3 * distance(reference(folder, trains, attention="sdpa")[0].state_dict(), ends)


@pytest.mark.parametrize("capped", [pytest.param(False, marks=pytest.mark.slow), True])
def test_without_clip_and_check_gradients_do_not_last(capped: bool, root: Path, tmp_path: Path) -> None:
    """Each weight changes as soon as its gradient is complete: the same weights, and no gradient goes to disk."""
    folder = folder_of(root, "llama_tied")
    expected, losses, _ = reference(folder, lambda name: True, max_norm=None)
    options: dict[str, Any] = {"max_grad_norm": None, "skip_nonfinite": False}
    with opened(folder, tmp_path / "size", **options) as model:
        model.initialize_training()
        options |= {"weights_ram": window(model, 2), **CAPPED} if capped else {}
    with opened(folder, tmp_path / "out", **options) as model:
        model.initialize_training()
        found, _, trainer = trained(model)
        assert found == pytest.approx(losses, rel=1e-5)
        trainer.save_checkpoint(tmp_path / "checkpoint-20")
        assert not model.runner.store.updates.pending
    merge_delta(folder, tmp_path / "checkpoint-20", tmp_path / "merged")
    merged, start, ends = hf(tmp_path / "merged").state_dict(), hf(folder).state_dict(), expected.state_dict()
    assert distance(merged, ends) <= 1e-3 * distance(ends, start)


@pytest.mark.parametrize("model_type", [pytest.param("llama_tied", marks=pytest.mark.slow), "mixtral"])
def test_where_things_lie_changes_no_bit(model_type: str, root: Path, tmp_path: Path) -> None:
    """All in RAM, a window of three granules, one with states on disk, recomputed or not: the same losses and norms."""
    folder = folder_of(root, model_type)
    with opened(folder, tmp_path / "size") as model:
        model.initialize_training()
        small = window(model, 3)
    ways: list[dict[str, Any]] = [
        {}, {"weights_ram": small}, {"weights_ram": small, **CAPPED, "gradient_checkpointing": True},
        {"grad_accum_backend": "disk"},
    ]  # fmt: skip
    results = []
    for number, way in enumerate(ways):
        with opened(folder, tmp_path / str(number), **way) as model:
            model.initialize_training()
            results.append(trained(model, 5)[:2])
    assert all(each == results[0] for each in results)
