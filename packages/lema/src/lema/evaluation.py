"""Loss, perplexity and exact match on a dataset."""

from __future__ import annotations

import math
from dataclasses import dataclass

from lema.model import LemaModel
from lema_core.errors import DataError
from lema_train.data import Dataset, make_batch
from lema_train.loop import token_batch


@dataclass(frozen=True)
class Evaluation:
    """``loss``: nats per supervised token. ``exact_match``: share of answers equal to the row's, None without short
    answers.

    ``example``: prompt, expected and generated answer of the first row that has one.
    """

    loss: float
    perplexity: float
    tokens: int
    exact_match: float | None = None
    answers: int = 0
    example: dict[str, str] | None = None

    def summary(self, suffix: str = "") -> dict[str, float | int | None]:
        """Figures under the names that summary.json has, each with ``suffix``."""
        return {
            f"eval_loss{suffix}": self.loss,
            f"perplexity{suffix}": self.perplexity,
            f"exact_match{suffix}": self.exact_match,
        }


def evaluate_dataset(model: LemaModel, dataset: Dataset) -> Evaluation:
    """Every row once, in batches of ``batch_size``; answers of at most ``eval_max_new_tokens`` tokens are generated and
    compared.

    Raises DataError when no row has a supervised token.
    """
    rows = model.config.batch_size
    by_length = sorted(range(len(dataset)), key=lambda i: len(dataset[i].ids))
    total, tokens = 0.0, 0
    for start in range(0, len(by_length), rows):
        batch = make_batch([dataset[i] for i in by_length[start : start + rows]], model.fill_id)
        loss, count = model.runner.loss(token_batch(batch))
        total, tokens = total + loss, tokens + count
    if tokens == 0:
        raise DataError("the evaluation rows have no supervised token")
    loss = total / tokens
    perplexity = math.exp(loss) if loss < 700 else math.inf
    matched, answers, example = _exact_match(model, dataset)
    return Evaluation(loss, perplexity, tokens, matched / answers if answers else None, answers, example)


def _exact_match(model: LemaModel, dataset: Dataset) -> tuple[int, int, dict[str, str] | None]:
    tokenizer, limit = model.tokenizer_or_none, model.config.eval_max_new_tokens
    if tokenizer is None:
        return 0, 0, None
    asked = []
    for sample in dataset:
        if sample.prompt_ids is None or sample.answer_text is None:
            continue
        length = len(tokenizer.encode(sample.answer_text, add_special_tokens=False))
        if 0 < length <= limit:
            asked.append((sample.prompt_ids, sample.answer_text, length))
    asked.sort(key=lambda item: len(item[0]))
    matched, example = 0, None
    # Weights pass once per token whatever the rows, so answers are generated many at a time.
    together = max(48, model.config.batch_size)
    for start in range(0, len(asked), together):
        group = asked[start : start + together]
        # One token beyond the longest answer tells whether the model stops there.
        new = model.generate_ids([ids for ids, _, _ in group], max(length for *_, length in group) + 1)
        for (prompt, expected, _), ids in zip(group, new, strict=True):
            answer = tokenizer.decode(ids).strip()
            stopped = bool(ids) and ids[-1] in model.stop_ids
            matched += stopped and answer == expected.strip()
            if example is None:
                example = {"prompt": tokenizer.decode(prompt).strip(), "expected": expected, "answer": answer}
    return matched, len(asked), example
