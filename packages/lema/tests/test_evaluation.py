"""Evaluation figures against transformers on the same rows."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from lema import LemaConfig, LemaModel
from lema.evaluation import evaluate_dataset
from lema_core.errors import DataError
from lema_train.data import Dataset, load_samples

Rows = list[dict[str, Any]]


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture
def evaluated(tiny_llama: Path, tmp_path: Path, make_rows: Any) -> Callable[..., tuple[LemaModel, Dataset]]:
    """``evaluated(rows, **options)``: a model and its evaluation rows."""

    def build(rows: Rows, **options: Any) -> tuple[LemaModel, Dataset]:
        model = LemaModel(LemaConfig(model_name_or_path=str(tiny_llama), **options))
        return model, load_samples(make_rows(tmp_path / "rows.jsonl", rows), model.tokenizer, 1024, 128)

    return build


@pytest.mark.parametrize("batch_size", [1, 3])
def test_loss_is_transformers_per_answer_token(
    batch_size: int, evaluated: Any, tiny_llama: Path, chats: Callable[[int], Rows]
) -> None:
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

    rows = chats(7)
    model, dataset = evaluated(rows, batch_size=batch_size)
    with model:
        found = evaluate_dataset(model, dataset)
    oracle = AutoModelForCausalLM.from_pretrained(tiny_llama, dtype=torch.float32).eval()
    tokenizer = PreTrainedTokenizerFast.from_pretrained(str(tiny_llama))
    total, tokens = 0.0, 0
    for row in rows:
        encode = tokenizer.apply_chat_template
        ids = encode(row["messages"], return_dict=False)
        prompt = encode(row["messages"][:1], add_generation_prompt=True, return_dict=False)
        answer = range(len(prompt), ids.index(3, len(prompt)) + 1)
        with torch.no_grad():
            logits = oracle(torch.tensor([ids])).logits[0].double()
        total -= sum(logits[i - 1].log_softmax(-1)[ids[i]].item() for i in answer)
        tokens += len(answer)
    assert found.tokens == tokens
    assert found.loss == pytest.approx(total / tokens, rel=1e-6)
    assert found.perplexity == pytest.approx(math.exp(total / tokens), rel=1e-5)


def test_a_match_is_the_whole_answer_and_the_models_own_stop(
    evaluated: Any, monkeypatch: pytest.MonkeyPatch, chats: Callable[[int], Rows]
) -> None:
    """Answers said to be generated: right, right without a stop, right and going on, wrong."""
    model, dataset = evaluated(chats(4))
    with model:
        encode = model.tokenizer.encode
        said = [[*encode("0"), 3], [*encode("1"), 7], [*encode("22"), 3], [*encode(" 3 "), 3]]
        by_prompt = {tuple(dataset[i].prompt_ids): ids for i, ids in enumerate(said)}
        asked = []

        def generate(prompts: list[list[int]], new: int) -> list[list[int]]:
            asked.append(new)
            return [by_prompt[tuple(prompt)] for prompt in prompts]

        monkeypatch.setattr(model, "generate_ids", generate)
        found = evaluate_dataset(model, dataset)
    assert (found.answers, found.exact_match, asked) == (4, 0.5, [2])
    assert set(found.example) == {"prompt", "expected", "answer"}


def test_answers_longer_than_the_limit_are_left_out(evaluated: Any) -> None:
    rows = [{"prompt": "a", "completion": c} for c in ("xyz", "x" * 40)] + [{"text": "no answer here"}]
    model, dataset = evaluated(rows, eval_max_new_tokens=5)
    with model:
        assert evaluate_dataset(model, dataset).answers == 1
    model, dataset = evaluated(rows, eval_max_new_tokens=0)
    with model:
        found = evaluate_dataset(model, dataset)
    assert (found.answers, found.exact_match, found.example) == (0, None, None)


def test_a_perplexity_too_large_for_a_float_is_infinite(
    evaluated: Any, monkeypatch: pytest.MonkeyPatch, chats: Callable[[int], Rows]
) -> None:
    model, dataset = evaluated(chats(2), eval_max_new_tokens=0)
    with model:
        monkeypatch.setattr(type(model.runner), "loss", lambda self, batch: (1e6, 1))
        assert evaluate_dataset(model, dataset).perplexity == math.inf
        monkeypatch.setattr(type(model.runner), "loss", lambda self, batch: (0.0, 0))
        with pytest.raises(DataError, match="no supervised token"):
            evaluate_dataset(model, dataset)
