"""The cases that do not depend on Llama, with every architecture; Llama has its own files."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig as PeftConfig
from peft import get_peft_model
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from lema import LemaConfig, LemaModel
from lema.merge_task import merge
from lema_core.errors import CheckpointError, ConfigError, DataError

SIZES = {
    "vocab_size": 128, "hidden_size": 64, "intermediate_size": 112, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 128,
}  # fmt: skip
LAYERS = {"layer_types": ["conv", "full_attention", "conv", "full_attention"]}
MODELS: dict[str, dict[str, Any]] = {
    "mistral": SIZES | {"sliding_window": 16},
    "mixtral": SIZES | {"num_local_experts": 4, "num_experts_per_tok": 2},
    "gpt2": {"vocab_size": 128, "n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 64}
    | {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0},
    "lfm2": SIZES | LAYERS | {"block_auto_adjust_ff_dim": False},
    "lfm2_moe": SIZES
    | LAYERS
    | {"num_experts": 4, "num_experts_per_tok": 2, "num_dense_layers": 1}
    | {"moe_intermediate_size": 48},
}
#: the two that differ most from Llama run with every test, the others are slow
TYPES = [t if t in ("gpt2", "mixtral") else pytest.param(t, marks=pytest.mark.slow) for t in MODELS]
#: what the width of the feed-forward part is called
WIDTH = {"gpt2": "n_inner", "lfm2_moe": "moe_intermediate_size"}
LAYERS_FIELD = {"gpt2": "n_layer"}


class Models:
    """Folders by architecture, and lema models that are closed at the end."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._opened: list[LemaModel] = []

    def folder(self, model_type: str, dtype: torch.dtype = torch.float32, **changes: Any) -> Path:
        path = self._root / f"{model_type} {dtype} {sorted(changes.items())}".replace("/", "-")
        if not path.exists():
            torch.manual_seed(0)
            model = AutoModelForCausalLM.from_config(
                AutoConfig.for_model(model_type, **{**MODELS[model_type], **changes}), dtype=torch.float32
            )
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter += torch.randn(parameter.shape) * 0.05
            model.to(dtype).save_pretrained(path, max_shard_size="40KB")
        return path

    def open(self, folder: Path, **options: Any) -> LemaModel:
        config = LemaConfig(model_name_or_path=str(folder), **{"lora_rank": 4, "max_grad_norm": None, **options})
        self._opened.append(LemaModel(config))
        return self._opened[-1]

    def trained(self, folder: Path, **options: Any) -> LemaModel:
        """With LoRA weights of which none is zero."""
        model = self.open(folder, **options)
        model.initialize_lora()
        generator = torch.Generator().manual_seed(1)
        values = {n: torch.randn(p.shape, generator=generator) * 0.1 for n, p in model.lora.parameters().items()}
        model.lora.copy_(values)
        return model

    def close(self) -> None:
        for model in self._opened:
            model.close()


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("architectures")


@pytest.fixture
def models(root: Path) -> Any:
    torch.set_num_threads(1)
    made = Models(root)
    yield made
    made.close()


def ids_of(rows: int, tokens: int, seed: int = 0) -> Tensor:
    return torch.randint(1, 128, (rows, tokens), generator=torch.Generator().manual_seed(seed))


def gradients(model: LemaModel, ids: Tensor, mask: Tensor | None = None) -> tuple[float, dict[str, Tensor]]:
    """Loss and gradients of a step that changes nothing."""
    kept: dict[str, Tensor] = {}
    handles = [
        parameter.register_post_accumulate_grad_hook(lambda p, name=name: kept.__setitem__(name, p.grad.clone()))
        for name, parameter in model.lora.parameters().items()
    ]
    trainer = model.get_trainer(torch.optim.SGD(model.get_trainable_parameters(), lr=0.0))
    labels = ids if mask is None else ids.masked_fill(mask == 0, -100)
    _, loss = trainer.train_step(ids, labels, mask, return_logits=False)
    for handle in handles:
        handle.remove()
    return loss, kept


@pytest.mark.parametrize("model_type", TYPES)
def test_b19_b20_chunks_of_the_cache_and_cached_generation(model_type: str, models: Models) -> None:
    """Greedy 40 tokens from one token and from six: cached ids equal transformers', whatever the cache's chunks."""
    folder = models.folder(model_type)
    model = models.open(folder)
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    theirs.generation_config.eos_token_id = None
    for prompt in ([5], [9, 3, 77, 3, 120, 11]):
        found = theirs.generate(torch.tensor([prompt]), max_new_tokens=40, do_sample=False, pad_token_id=0)
        expected = found[0, len(prompt) :].tolist()
        for kv_chunk_size in (8, 8192):
            assert model.generate_ids([prompt], 40, stop_ids=[], kv_chunk_size=kv_chunk_size) == [expected]
    assert model.generate_ids([[1, 2]], 0) == [[]]
    with pytest.raises(DataError, match="prompt has no tokens"):
        model.generate_ids([[]], 3)


@pytest.mark.parametrize("model_type", TYPES)
def test_b21_padding(model_type: str, models: Models) -> None:
    """Prompts of 3 and 9 tokens generate what each does alone; six padded places leave the loss and gradients alone."""
    model = models.trained(models.folder(model_type))
    short, long = ids_of(1, 3)[0].tolist(), ids_of(1, 9, seed=8)[0].tolist()
    together = model.generate_ids([short, long], 10, stop_ids=[])
    assert together == [model.generate_ids([prompt], 10, stop_ids=[])[0] for prompt in (short, long)]
    row, pad = ids_of(1, 7), ids_of(1, 6, seed=9)
    loss, expected = gradients(model, row)
    for parts in ((row, pad), (pad, row)):
        mask = torch.cat([torch.full_like(part, part is row) for part in parts], dim=1)
        padded_loss, found = gradients(model, torch.cat(parts, dim=1), mask)
        assert padded_loss == pytest.approx(loss, abs=1e-6)
        for name, gradient in expected.items():
            assert (found[name] - gradient).norm() <= 5e-5 * gradient.norm() + 1e-8, name


@pytest.mark.parametrize("model_type", TYPES)
def test_b29_b55_merging_into_fp16(model_type: str, models: Models, tmp_path: Path) -> None:
    """One rounding, dtypes and metadata as they were, an index that adds up; fp32 and bf16 are held against PEFT."""
    folder = models.folder(model_type, torch.float16)
    model = models.trained(folder)
    model.save_pretrained(tmp_path / "lora")
    ids = ids_of(2, 9)
    merge(LemaConfig(task="merge", lora_path=tmp_path / "lora", output_dir=tmp_path / "out"))
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    files = sorted(set(index["weight_map"].values()))
    tensors = {name: t for file in files for name, t in load_file(tmp_path / "out" / file).items()}
    assert all(tensor.dtype == torch.float16 for name, tensor in tensors.items() if "expert_bias" not in name)
    assert index["metadata"]["total_size"] == sum(t.numel() * t.element_size() for t in tensors.values())
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32).eval()
    with torch.no_grad():
        found = theirs(ids).logits
    assert (found - model.logits(ids)).norm() <= 5e-3 * found.norm()


@pytest.mark.parametrize("model_type", TYPES)
def test_b32_foreign_lora_weights(model_type: str, models: Models, tmp_path: Path) -> None:
    """A layer removed, and keys renamed: an error that lists keys, never a partial load."""
    folder = models.folder(model_type)
    base = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    config = PeftConfig(r=4, target_modules="all-linear", init_lora_weights=False, task_type="CAUSAL_LM")
    get_peft_model(base, config).save_pretrained(tmp_path, save_embedding_layers=False)
    file = tmp_path / "adapter_model.safetensors"
    tensors = load_file(file)
    models.open(folder).load_lora(tmp_path)
    changes: list[Callable[[str], str | None]] = [
        lambda name: None if ".1." in name else name,
        lambda name: name.replace("base_model.model.", ""),
    ]
    for change, words in zip(changes, ("are missing", "not named base_model.model."), strict=True):
        save_file({change(n): t for n, t in tensors.items() if change(n)}, file, metadata={"format": "pt"})
        with pytest.raises(CheckpointError, match=words):
            models.open(folder).load_lora(tmp_path)


def test_b33_an_expert_without_tokens(models: Models) -> None:
    """Its gradient is zero and its weights stay, with weight decay 0; the others' change."""
    folder = models.folder("mixtral")
    model = models.trained(folder, weight_decay=0.0, lora_target_modules=["gate_up_proj", "down_proj"])
    ids = ids_of(1, 3, seed=2)
    loss, found = gradients(model, ids)
    unused = {name for name, gradient in found.items() if not gradient.any()}
    assert unused and len(unused) < len(found) and torch.isfinite(torch.tensor(loss))
    before = {name: parameter.detach().clone() for name, parameter in model.lora.parameters().items()}
    model.get_trainer().train_step(ids, ids, return_logits=False)
    changed = {name for name, parameter in model.lora.parameters().items() if not torch.equal(parameter, before[name])}
    assert changed == set(found) - unused


@pytest.mark.parametrize("model_type", TYPES)
def test_b42_recomputation_redraws_dropout(model_type: str, models: Models) -> None:
    """LoRA dropout 0.5, GPT-2's own too: recomputation on and off give the same losses twice, and so do two runs."""
    changes = {"resid_pdrop": 0.5} if model_type == "gpt2" else {}
    targets = {"mistral": ["q_proj", "down_proj"], "gpt2": "all-linear", "lfm2": "all-linear"}.get(model_type)
    options = {"lora_dropout": 0.5, "lora_target_modules": targets or ["q_proj", "k_proj", "v_proj"], "batch_size": 2}

    def run(recompute: bool) -> list[float]:
        model = models.trained(
            models.folder(model_type, **changes), gradient_checkpointing=recompute, learning_rate=1e-2, **options
        )
        trainer = model.get_trainer()
        return [trainer.train_step(ids_of(3, 9), ids_of(3, 9), return_logits=False)[1] for _ in range(2)]

    on, off, again = run(True), run(False), run(True)
    assert on == pytest.approx(off, abs=1e-6) and on == again and on[0] != on[1]


@pytest.mark.parametrize("model_type", TYPES)
def test_b50_config_against_shapes(model_type: str, models: Models, tmp_path: Path) -> None:
    """A width off by 8, a layer too few and one too many: one line with both numbers, before a weight is read."""
    folder, width = models.folder(model_type), WIDTH.get(model_type, "intermediate_size")
    layers = LAYERS_FIELD.get(model_type, "num_hidden_layers")
    config = json.loads((folder / "config.json").read_text())
    n_layers = config[layers]
    size = config.get(width) or 4 * config["n_embd"]
    changes = [({width: size - 8}, [str(size), str(size - 8)])]
    for number in (n_layers - 1, n_layers + 1):
        more = {layers: number}
        if "layer_types" in config:
            more["layer_types"] = (config["layer_types"] + ["conv"])[:number]
        changes.append((more, [f"{number} layers", str(n_layers)]))
    for number, (values, words) in enumerate(changes):
        copy = tmp_path / str(number)
        copy.mkdir()
        for file in folder.iterdir():
            (copy / file.name).symlink_to(file)
        (copy / "config.json").unlink()
        (copy / "config.json").write_text(json.dumps(config | values))
        with pytest.raises((CheckpointError, ConfigError)) as caught:
            models.open(copy)
        assert "\n" not in str(caught.value) and all(word in str(caught.value) for word in words), caught.value


@pytest.mark.parametrize("model_type", TYPES)
def test_b52_ids_outside_the_vocabulary(model_type: str, models: Models) -> None:
    model = models.open(models.folder(model_type))
    for bad in (128, -1):
        ids = ids_of(2, 5)
        ids[1, 3] = bad
        with pytest.raises(DataError, match=f"row 1, position 3: id {bad} .* 128"):
            model.logits(ids)


def test_b52_learned_positions_end(models: Models) -> None:
    model = models.trained(models.folder("gpt2"), max_seq_length=128)
    with pytest.raises(DataError, match="65 tokens, the model's positions were trained for 64"):
        gradients(model, ids_of(1, 65))
    with pytest.raises(DataError, match="lower max_new_tokens"):
        model.generate_ids([ids_of(1, 62)[0].tolist()], 4)
    assert len(model.generate_ids([ids_of(1, 62)[0].tolist()], 3, stop_ids=[])[0]) == 3


@pytest.mark.parametrize("model_type", TYPES)
def test_b53_a_padded_vocabulary(model_type: str, models: Models) -> None:
    """Embeddings padded to 192 rows: as transformers computes it."""
    folder = models.folder(model_type)
    base = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    base.resize_token_embeddings(192)
    padded = folder.with_name(f"{folder.name} padded")
    base.save_pretrained(padded)
    ids = ids_of(2, 7)
    with torch.no_grad():
        expected = base.eval()(ids).logits
    found = models.open(padded).logits(ids)
    assert found.shape[-1] == 192 and (found - expected).norm() <= 1e-5 * expected.norm()


@pytest.mark.parametrize("model_type", TYPES)
def test_b56_fp16_base_with_large_logits(model_type: str, models: Models) -> None:
    """Logits beyond fp16's range: LoRA weights are fp32, the loss is finite, and they learn."""
    folder = models.folder(model_type, torch.float16, tie_word_embeddings=False)
    large = folder.with_name(f"{folder.name} large")
    if not large.exists():
        theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float16)
        with torch.no_grad():
            head = theirs.lm_head.weight.float()
            theirs.lm_head.weight.copy_(head * (30_000 / head.abs().max()))
        theirs.save_pretrained(large)
    model = models.trained(large, learning_rate=1e-2)
    ids = ids_of(1, 9)
    assert model.logits(ids).abs().max() > 65504
    trainer = model.get_trainer()
    losses = [trainer.train_step(ids, ids, return_logits=False)[1] for _ in range(3)]
    assert all(parameter.dtype == torch.float32 for parameter in model.get_trainable_parameters())
    assert all(0 < loss < 1e7 for loss in losses) and losses[-1] != losses[0]
