"""Training and evaluation rows out of a JSONL file: one JSON object a line, of one of four forms.

| row | trained |
|---|---|
| ``{"messages": [{"role", "content"}, ...]}`` | the assistant's answers with their end-of-turn tokens (``mask``) |
| ``{"prompt": str, "completion": str}`` | the completion and EOS |
| ``{"text": str}`` | every token and EOS |
| ``{"input_ids": [int], "labels": [int]}`` | every token whose label is not -100; all of them without ``labels`` |

Forms may be mixed in a file; further keys of a row are left alone.

A prompt's tokens are those it has alone, because that is what generation starts from. The completion's are what
follows them when both are encoded together; only where the two would merge into one token is it encoded by itself.

A row that cannot be used stops the reading with ``path:line: reason`` (blank lines count), never with the row's text.
"""

from __future__ import annotations

import json
import logging
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lema_core.errors import DataError
from lema_train.data.mask import IGNORED, encode_chat
from lema_train.data.tokenizer import Tokenizer

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Sample:
    """One row, ready to train on.

    Attributes:
        ids: token ids.
        labels: as many; -100 where a token is not trained. The label at a position is that position's own token: the
            loss shifts them, so the one at position 0 is never used.
        line: line of the file, from 1.
        prompt_ids: what to generate from to compare with ``answer_text``: the last answer's prompt; None for rows
            without one (``text``, ``input_ids``).
        answer_text: the last answer, or the completion.
    """

    ids: list[int]
    labels: list[int]
    line: int
    prompt_ids: list[int] | None = None
    answer_text: str | None = None

    @property
    def supervised_tokens(self) -> int:
        """Labels that take part in the loss."""
        return sum(label != IGNORED for label in self.labels[1:])


@dataclass
class Report:
    """What became of a file's rows."""

    path: Path
    rows: int = 0
    truncated: list[int] = field(default_factory=list)
    dropped: list[int] = field(default_factory=list)
    """Lines of rows without a token to train, most often because ``max_length`` cut their answers off."""

    def warnings(self, max_length: int | None) -> list[str]:
        """One sentence for everything a user should know before training on these rows."""
        found = []
        if self.truncated:
            found.append(
                f"{self.path}: {len(self.truncated)} of {self.rows} rows are longer than max_seq_length={max_length} "
                f"and lose their ends (line {_few(self.truncated)})"
            )
        if self.dropped:
            found.append(
                f"{self.path}: {len(self.dropped)} of {self.rows} rows have no token to train and are left out "
                f"(line {_few(self.dropped)})"
            )
        return found


class Dataset(Sequence[Sample]):
    """Samples kept as packed 32-bit integers, an eighth of what lists of Python integers take."""

    def __init__(self, samples: Iterable[Sample], report: Report) -> None:
        self.report = report
        self._rows: list[tuple[array[int], array[int], int, array[int] | None, str | None]] = []
        for s in samples:
            prompt = None if s.prompt_ids is None else array("i", s.prompt_ids)
            self._rows.append((array("i", s.ids), array("i", s.labels), s.line, prompt, s.answer_text))

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> Sample:  # type: ignore[override]
        ids, labels, line, prompt, answer = self._rows[index]
        return Sample(ids.tolist(), labels.tolist(), line, None if prompt is None else prompt.tolist(), answer)

    @property
    def lengths(self) -> list[int]:
        """Tokens of each row."""
        return [len(row[0]) for row in self._rows]

    def subset(self, indices: Iterable[int]) -> Dataset:
        """The rows of these indices, sharing their memory."""
        part = Dataset((), self.report)
        part._rows = [self._rows[i] for i in indices]
        return part


def load_samples(path: Path, tokenizer: Tokenizer | None, max_length: int | None, vocab_size: int) -> Dataset:
    """Read and encode every row of a JSONL file.

    Args:
        path: the file.
        tokenizer: the model's; without one only ``input_ids`` rows can be read.
        max_length: rows keep their first ``max_length`` tokens; None keeps all.
        vocab_size: rows of the model's embedding; every id must be below.

    Returns:
        The rows that have something to train, and a report of the others, which is logged as warnings too.

    Raises:
        DataError: a row that cannot be used, by file and line; no rows; no row with a token to train.
    """
    path = Path(path)
    report = Report(path)
    dataset = Dataset(_usable(path, tokenizer, max_length, vocab_size, report), report)
    if not report.rows:
        raise DataError(f"{path}: the file has no rows; it needs one JSON object a line, {_FORMS}")
    if not dataset:
        raise DataError(f"{path}: {_why_nothing_is_left(report, max_length)}")
    for warning in report.warnings(max_length):
        logger.warning(warning)
    return dataset


def _why_nothing_is_left(report: Report, max_length: int | None) -> str:
    if report.truncated:
        return (
            f"none of {report.rows} rows has a token to train, {len(report.truncated)} of them because "
            f"max_seq_length={max_length} cuts their answers off; raise max_seq_length or shorten the prompts"
        )
    return f"none of {report.rows} rows has a token to train: every label is -100, or rows are one token long"


def _usable(
    path: Path, tokenizer: Tokenizer | None, max_length: int | None, vocab_size: int, report: Report
) -> Iterator[Sample]:
    for line, row in _read_objects(path):
        report.rows += 1
        try:
            sample = _encode_row(row, tokenizer, line)
            _check_ids(sample, vocab_size)
        except DataError as error:
            raise DataError(f"{path}:{line}: {error}") from error
        if max_length is not None and len(sample.ids) > max_length:
            report.truncated.append(line)
            sample = Sample(
                sample.ids[:max_length], sample.labels[:max_length], line, sample.prompt_ids, sample.answer_text
            )
        if sample.supervised_tokens:
            yield sample
        else:
            report.dropped.append(line)


def _read_objects(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Line number and object of every line that is not blank."""
    if not path.is_file():
        what = "is a folder, not a file" if path.is_dir() else "no such file"
        raise DataError(f"{path.absolute()}: {what}; give a JSONL file, one JSON object a line")
    with path.open("rb") as lines:
        for number, raw in enumerate(lines, start=1):
            try:
                # Some editors put a byte order mark in front of a file.
                text = raw.decode("utf-8-sig" if number == 1 else "utf-8").strip()
                if not text:
                    continue
                row = json.loads(text)
            except UnicodeDecodeError as error:
                raise DataError(
                    f"{path}:{number}: not UTF-8 at byte {error.start + 1}; save the file as UTF-8"
                ) from error
            except json.JSONDecodeError as error:
                reason = f"{error.msg} at column {error.colno} of {len(text)} characters"
                raise DataError(
                    f"{path}:{number}: not valid JSON: {reason}; a row is one JSON object on one line"
                ) from error
            except (ValueError, RecursionError) as error:
                raise DataError(f"{path}:{number}: not usable JSON: a number too long or too deeply nested") from error
            if not isinstance(row, dict):
                raise DataError(f"{path}:{number}: a row must be a JSON object, found {_kind(row)}; expected {_FORMS}")
            yield number, row


_FORMS = "with 'messages', 'prompt' and 'completion', 'text', or 'input_ids'"


def _encode_row(row: dict[str, Any], tokenizer: Tokenizer | None, line: int) -> Sample:
    forms = [form for form in ("messages", "completion", "text", "input_ids") if form in row]
    if len(forms) > 1:
        raise DataError(f"the row has {' and '.join(map(repr, forms))}; keep the one to train on")
    if not forms:
        if "prompt" in row:
            raise DataError("the row has 'prompt' but no 'completion'")
        keys = ", ".join(repr(key[:20]) for key in list(row)[:5]) or "none"
        raise DataError(f"nothing to train on, a row needs an object {_FORMS}; its keys: {keys}")
    if forms == ["input_ids"]:
        return _encode_ids(row, line)
    if tokenizer is None:
        raise DataError(
            f"{forms[0]!r} needs a tokenizer, the model's folder has no tokenizer.json; give 'input_ids' rows"
        )
    if forms == ["messages"]:
        return _encode_messages(row["messages"], tokenizer, line)
    if forms == ["completion"]:
        return _encode_completion(_text(row, "prompt"), _text(row, "completion"), tokenizer, line)
    text = _text(row, "text")
    if not text:
        raise DataError("'text' is empty")
    ids = _with_eos(tokenizer.encode(text), tokenizer)
    return Sample(ids, list(ids), line)


def _encode_messages(messages: Any, tokenizer: Tokenizer, line: int) -> Sample:
    _check_unicode(messages, "messages")
    ids, labels = encode_chat(messages, tokenizer)
    prompt_ids = tokenizer.chat_ids(messages[:-1], add_generation_prompt=True)
    return Sample(ids, labels, line, prompt_ids, messages[-1]["content"])


def _encode_completion(prompt: str, completion: str, tokenizer: Tokenizer, line: int) -> Sample:
    prompt_ids = tokenizer.encode(prompt)
    together = tokenizer.encode(prompt + completion)
    if together[: len(prompt_ids)] == prompt_ids:
        answer = together[len(prompt_ids) :]
    else:
        answer = tokenizer.encode(completion, add_special_tokens=False)
    answer = _with_eos(answer, tokenizer)
    return Sample(prompt_ids + answer, [IGNORED] * len(prompt_ids) + answer, line, prompt_ids, completion)


def _encode_ids(row: dict[str, Any], line: int) -> Sample:
    ids = _integers(row, "input_ids")
    if not ids:
        raise DataError("'input_ids' is empty")
    labels = _integers(row, "labels") if "labels" in row else list(ids)
    if len(labels) != len(ids):
        raise DataError(f"'labels' has {len(labels)} entries, 'input_ids' has {len(ids)}; they must be as long")
    return Sample(ids, labels, line)


def _with_eos(ids: list[int], tokenizer: Tokenizer) -> list[int]:
    if tokenizer.eos_id is None:
        raise DataError(
            f"the tokenizer in {tokenizer.folder} names no EOS token, so the model could not learn to stop; set "
            "'eos_token' in its tokenizer_config.json, or give 'input_ids' rows"
        )
    return ids if ids[-1:] == [tokenizer.eos_id] else [*ids, tokenizer.eos_id]


def _text(row: dict[str, Any], key: str) -> str:
    if not isinstance(row.get(key), str):
        raise DataError(f"{key!r} must be a string, found {_kind(row[key]) if key in row else 'nothing'}")
    _check_unicode(row[key], key)
    return row[key]


def _check_unicode(value: Any, key: str) -> None:
    """JSON may escape half of a surrogate pair, which is no character."""
    try:
        json.dumps(value, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError as error:
        raise DataError(f"{key!r} holds half of a surrogate pair (a lone \\ud800 to \\udfff)") from error


def _integers(row: dict[str, Any], key: str) -> list[int]:
    values = row[key]
    if not isinstance(values, list):
        raise DataError(f"{key!r} must be a list of integers, found {_kind(values)}")
    for position, value in enumerate(values):
        if type(value) is not int:  # True is an int to isinstance
            raise DataError(f"{key}[{position}] must be an integer, found {_kind(value)}")
    return values


def _check_ids(sample: Sample, vocab_size: int) -> None:
    for name, values in (("input_ids", sample.ids), ("labels", sample.labels)):
        for position, value in enumerate(values):
            if not 0 <= value < vocab_size and not (name == "labels" and value == IGNORED):
                raise DataError(
                    f"{name}[{position}] is {value}, but the model's vocabulary (vocab_size {vocab_size}) has ids 0 to "
                    f"{vocab_size - 1}; was the row made with another model's tokenizer?"
                )


def _kind(value: Any) -> str:
    names = {dict: "an object", list: "a list", str: "a string", bool: "a boolean", int: "a number", float: "a number"}
    return names.get(type(value), "null")


def _few(lines: list[int]) -> str:
    return ", ".join(map(str, lines[:10])) + (" ..." if len(lines) > 10 else "")
