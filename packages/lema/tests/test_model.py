"""LemaModel as a library user meets it."""

from __future__ import annotations

import os
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from lema import LemaConfig, LemaModel, MemoryStrategy
from lema_core.errors import BudgetError, CheckpointError, ConfigError, DataError
from lema_train.data import Tokenizer


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture
def opened(tiny_llama: Path) -> Callable[..., LemaModel]:
    """``opened(**options)``: the tiny Llama with LoRA weights of rank 4."""

    def build(**options: Any) -> LemaModel:
        model = LemaModel(LemaConfig(**{"model_name_or_path": str(tiny_llama), "lora_rank": 4, **options}))
        model.initialize_lora()
        return model

    return build


def test_the_library_as_the_readme_shows_it(tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    path = "trained"
    tokenizer = Tokenizer.from_folder(tiny_llama)
    input_ids = torch.tensor([tokenizer.encode("once upon a time")])

    config = LemaConfig(model_name_or_path=str(tiny_llama), strategy=MemoryStrategy.STREAMING, backend="auto",
        lora_rank=16, gradient_checkpointing=True, training_mode="lora", learning_rate=1e-4, save_steps=500,
        output_dir="checkpoints", weights_vram="auto", kv_vram="2.0GB", kv_chunk_size=8192, weights_bits=None,
        opt_state_bits=None, grad_acc_bits=None, kv_bits=None, quant_backend="auto")  # fmt: skip
    model = LemaModel(config)
    model.initialize_lora()
    optimizer = torch.optim.AdamW(model.get_trainable_parameters(), lr=1e-4)
    trainer = model.get_trainer(optimizer)
    logits, loss = trainer.train_step(input_ids, labels=input_ids)
    text = model.generate_kv("once upon", tokenizer, max_new_tokens=200, kv_chunk_size=8192)
    model.save_pretrained(path)
    trainer.save_checkpoint("checkpoints/checkpoint-1")
    model.close()

    assert logits.shape == (1, input_ids.shape[1], 128) and logits.dtype == torch.float32
    # the loss is that of these logits: both are of the weights before the update
    expected = torch.nn.functional.cross_entropy(logits[0, :-1], input_ids[0, 1:])
    assert loss == pytest.approx(expected.item(), rel=1e-5)
    assert text.startswith("once upon") and len(text) > len("once upon")
    for folder in (path, "checkpoints/checkpoint-1"):
        again = LemaModel.from_pretrained(folder)
        assert text.startswith(again.generate_kv("once upon", max_new_tokens=30))
        again.close()
    files = [tmp_path / folder / "adapter_model.safetensors" for folder in (path, "checkpoints/checkpoint-1")]
    assert files[0].read_bytes() == files[1].read_bytes()
    assert any(tensor.abs().max() > 0 for name, tensor in load_file(files[0]).items() if "lora_B" in name)


def test_a_tokenizer_of_transformers_serves_too(opened: Callable[..., LemaModel], tiny_llama: Path) -> None:
    from transformers import PreTrainedTokenizerFast

    foreign = PreTrainedTokenizerFast.from_pretrained(str(tiny_llama))
    with opened() as model:
        assert model.generate_kv("tell me", foreign, max_new_tokens=20) == model.generate_kv(
            "tell me", max_new_tokens=20
        )


def test_lemas_optimizer_trains_as_torchs_does(
    opened: Callable[..., LemaModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    root = torch.Tensor.sqrt  # on a CPU a unit off for some numbers; lema's AdamW has the nearest
    monkeypatch.setattr(torch.Tensor, "sqrt", lambda values: root(values.double()).to(values.dtype))
    ids = torch.tensor([[5, 6, 7, 8, 9, 10]])
    losses = []
    for own in (True, False):
        with opened(learning_rate=1e-2, adam_beta2=0.99, weight_decay=0.1) as model:
            optimizer = None
            if not own:
                optimizer = torch.optim.AdamW(
                    model.get_trainable_parameters(), lr=1e-2, betas=(0.9, 0.99), weight_decay=0.1, foreach=False
                )
            trainer = model.get_trainer(optimizer)
            losses.append([trainer.train_step(ids, return_logits=False)[1] for _ in range(4)])
    assert losses[0] == losses[1] and losses[0][-1] < losses[0][0]


def test_a_callers_optimizer_keeps_its_rate_unless_a_schedule_is_set(opened: Callable[..., LemaModel]) -> None:
    ids = torch.tensor([[5, 6, 7]])
    for options, rates in (
        ({}, [0.5, 0.5]),
        ({"lr_schedule": "linear", "max_steps": 2, "learning_rate": 1.0}, [1, 0.5]),
    ):
        with opened(**options) as model:
            trainer = model.get_trainer(torch.optim.SGD(model.get_trainable_parameters(), lr=0.5))
            seen = []
            for _ in range(2):
                trainer.train_step(ids, return_logits=False)
                seen.append(trainer.metrics["lr"])
        assert seen == rates


def test_a_resumed_torch_optimizer_goes_on_exactly(opened: Callable[..., LemaModel], tmp_path: Path) -> None:
    ids = torch.tensor([[5, 6, 7, 8, 9, 10]])
    losses = []
    with opened() as model:
        trainer = model.get_trainer(torch.optim.AdamW(model.get_trainable_parameters(), lr=1e-2))
        for step in range(4):
            if step == 2:
                trainer.save_checkpoint(tmp_path / "checkpoint-2")
            losses.append(trainer.train_step(ids, return_logits=False)[1])
    with opened() as model:
        trainer = model.get_trainer(torch.optim.AdamW(model.get_trainable_parameters(), lr=1e-2))
        trainer.load_checkpoint(tmp_path / "checkpoint-2")
        assert [trainer.train_step(ids, return_logits=False)[1] for _ in range(2)] == losses[2:]


def test_close_leaves_no_thread_and_no_open_file(opened: Callable[..., LemaModel]) -> None:
    handles, threads = _open_files(), _lema_threads()
    for _ in range(2):
        model = opened(weights_ram="400KB")
        model.logits(torch.tensor([[1, 2, 3]]))
        assert _lema_threads() - threads and _open_files() - handles
        model.close()
        model.close()
        assert not _lema_threads() - threads and not _open_files() - handles


def _lema_threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name.startswith("lema")}


def _open_files() -> Counter[str]:
    found = (os.path.realpath(handle) for handle in Path("/proc/self/fd").iterdir())
    return Counter(path for path in found if path.endswith(".safetensors"))


def test_prompts_of_no_token_start_from_bos_or_are_refused(opened: Callable[..., LemaModel]) -> None:
    with opened() as model:
        assert model.generate_kv("", max_new_tokens=5) == model.continue_text([0], model.tokenizer, 5)
        assert model.generate_kv("abc", max_new_tokens=0) == "abc"
        with pytest.raises(DataError, match="a prompt has no tokens"):
            model.generate_ids([[5], []], 3)

        class NoBos:
            def encode(self, text: str) -> list[int]:
                return []

        with pytest.raises(ConfigError, match="has no BOS to start from"):
            model.generate_kv("", NoBos())


def test_what_is_asked_in_the_wrong_order_is_named(opened: Callable[..., LemaModel], tiny_llama: Path) -> None:
    with LemaModel(LemaConfig(model_name_or_path=str(tiny_llama))) as model:
        for ask in (model.get_trainable_parameters, model.get_trainer, lambda: model.save_pretrained("x")):
            with pytest.raises(ConfigError, match=r"call initialize_lora\(\), or load_lora"):
                ask()
        model.logits(torch.tensor([[1]]))
        with pytest.raises(ConfigError, match="before it first computes"):
            model.initialize_lora()
    with pytest.raises(ConfigError, match="model_name_or_path: give a folder"):
        LemaModel(LemaConfig())


@pytest.mark.parametrize("ids", [[[1, 128]], [[-1, 2]]])
def test_ids_outside_the_vocabulary_are_named(opened: Callable[..., LemaModel], ids: list[list[int]]) -> None:
    with opened() as model:
        place = f"row 0, position {next(i for i, x in enumerate(ids[0]) if not 0 <= x < 128)}"
        for ask in (model.logits, model.get_trainer().train_step):
            with pytest.raises(DataError, match=f"{place}: id .* is outside the vocabulary of 128"):
                ask(torch.tensor(ids))


def test_more_tokens_than_embeddings_is_an_error_at_the_start(
    tmp_path: Path, make_model: Any, make_tokenizer: Any
) -> None:
    folder = make_tokenizer(make_model(tmp_path / "model", vocab_size=120))
    with LemaModel(LemaConfig(model_name_or_path=str(folder))) as model:
        with pytest.raises(ConfigError, match="the tokenizer has 128 ids, the model's embedding 120 rows"):
            _ = model.tokenizer


def test_from_pretrained_names_what_is_missing_and_lets_options_win(
    opened: Callable[..., LemaModel], tmp_path: Path, tiny_llama: Path
) -> None:
    with opened(max_grad_norm=0.5) as model:
        model.get_trainer().save_checkpoint(tmp_path / "checkpoint-0")
    with LemaModel.from_pretrained(tmp_path / "checkpoint-0", weights_ram="400KB") as again:
        assert (again.config.max_grad_norm, again.config.weights_ram) == (0.5, "400KB")
        assert again.lora.config.rank == 4
    config = tmp_path / "checkpoint-0/adapter_config.json"
    config.write_text(config.read_text().replace(f'"{tiny_llama}"', "null"))
    (tmp_path / "checkpoint-0/trainer_state.json").unlink()
    with pytest.raises(CheckpointError, match="names no base model; give model_name_or_path"):
        LemaModel.from_pretrained(tmp_path / "checkpoint-0")
    with LemaModel.from_pretrained(tmp_path / "checkpoint-0", model_name_or_path=str(tiny_llama)) as again:
        assert again.lora.config.rank == 4
    with pytest.raises(CheckpointError, match=r"adapter_config\.json"):
        LemaModel.from_pretrained(tmp_path)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"weights_ram": "10KB"}, r"weights_ram gives 10,000 bytes, the smallest window needs \d"),
        ({"weights_vram": "10KB"}, r"weights_vram gives 10,000 bytes, the smallest window needs \d"),
        ({"ram_budget": "1MB"}, "are left of ram_budget=1MB"),
        ({"strategy": "resident", "ram_budget": "1MB"}, "use strategy=streaming"),
    ],
)
def test_a_run_that_cannot_fit_is_refused_before_it_reads(
    options: dict[str, Any], said: str, opened: Callable[..., LemaModel]
) -> None:
    with opened(**options) as model, pytest.raises(BudgetError, match=said):
        model.get_trainer()


@pytest.mark.parametrize("options", [{"kv_vram": "10KB"}, {"kv_ram": "10KB"}, {"kv_vram": "9MB", "kv_ram": "10KB"}])
def test_the_smaller_kv_budget_bounds_the_cache_on_a_cpu(
    options: dict[str, str], opened: Callable[..., LemaModel]
) -> None:
    with opened(**options) as model:
        # 4 layers, keys and values, 2 heads of 16 fp32 numbers
        with pytest.raises(
            BudgetError, match=f"of 33 tokens needs {4 * 2 * 2 * 16 * 4 * 33:,} bytes, 10,000 are given"
        ):
            model.generate_ids([[1, 2, 3]], 30)
        assert len(model.generate_ids([[1, 2, 3]], 4, stop_ids=())[0]) == 4
