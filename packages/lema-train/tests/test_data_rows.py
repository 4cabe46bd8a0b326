"""Rows of a JSONL file to samples (cases B24, B46, B52, B62)."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lema_core.errors import DataError
from lema_train.data import IGNORED, Dataset, Tokenizer, load_samples

CHAT = [{"role": "user", "content": "hello world"}, {"role": "assistant", "content": "it is"}]


@pytest.fixture
def load(tmp_path: Path, make_tokenizer: Callable[..., Tokenizer]) -> Callable[..., Dataset]:
    """``load(rows or bytes, max_length=None)`` writes the file and reads it."""

    def run(
        rows: bytes | list[dict[str, Any]],
        max_length: int | None = None,
        vocab_size: int = 128,
        tokenizer: Tokenizer | None = None,
    ) -> Dataset:
        path = tmp_path / "rows.jsonl"
        path.write_bytes(rows if isinstance(rows, bytes) else "".join(json.dumps(r) + "\n" for r in rows).encode())
        return load_samples(path, tokenizer or make_tokenizer(auto_bos=True), max_length, vocab_size)

    return run


def test_every_form_in_one_file(load: Callable[..., Dataset], make_tokenizer: Callable[..., Tokenizer]) -> None:
    tokenizer = make_tokenizer(auto_bos=True)
    rows = [
        {"messages": CHAT, "id": 7},
        {"prompt": "use", "completion": " it"},
        {"text": "hello"},
        {"input_ids": [5, 6, 7], "labels": [IGNORED, 6, 7]},
        {"input_ids": [5, 6]},
    ]
    chat, pair, text, labelled, plain = load(rows, tokenizer=tokenizer)

    assert chat.prompt_ids == tokenizer.chat_ids(CHAT[:1], add_generation_prompt=True)
    assert chat.ids[: len(chat.prompt_ids)] == chat.prompt_ids and chat.answer_text == "it is"
    assert tokenizer.decode([i for i in chat.labels if i != IGNORED], skip_special=False) == "it is<|im_end|>"

    assert pair.prompt_ids == tokenizer.encode("use") and pair.answer_text == " it"
    answer = [*tokenizer.encode(" it", add_special_tokens=False), 1]
    assert pair.ids == pair.prompt_ids + answer
    assert pair.labels == [IGNORED] * len(pair.prompt_ids) + answer

    assert text.ids == text.labels == [*tokenizer.encode("hello"), 1] and text.prompt_ids is None
    assert (labelled.ids, labelled.labels) == ([5, 6, 7], [IGNORED, 6, 7])
    assert plain.labels == [5, 6] and plain.supervised_tokens == 1
    assert [s.line for s in (chat, pair, text, labelled, plain)] == [1, 2, 3, 4, 5]


def test_a_prompt_keeps_the_tokens_it_has_alone(
    load: Callable[..., Dataset], make_tokenizer: Callable[..., Tokenizer]
) -> None:
    tokenizer = make_tokenizer()
    # "us" + "er" would be one token.
    assert len(tokenizer.encode("user")) == 1
    sample = load([{"prompt": "us", "completion": "er"}], tokenizer=tokenizer)[0]
    assert sample.prompt_ids == tokenizer.encode("us") == sample.ids[:1]
    assert tokenizer.decode(sample.ids) == "user"


def test_b46_bos_once_and_eos_once_whatever_the_row_brings(load: Callable[..., Dataset]) -> None:
    for row in ({"text": "<s>hello</s>"}, {"text": "hello"}, {"prompt": "<s>a", "completion": "b</s>"}):
        ids = load([row])[0].ids
        assert ids.count(0) == 1 and ids[0] == 0
        assert ids.count(1) == 1 and ids[-1] == 1


@pytest.mark.parametrize(
    ("lines", "line", "reason"),
    [
        (b'{"text": "a"}\n\n{"text": "secret', 3, "not valid JSON: Unterminated string"),
        (b'\n{"text": "a"}\n[1, 2]\n', 3, "must be a JSON object, found a list"),
        (b'\n\n"secret"', 3, "must be a JSON object, found a string"),
        (b"null", 1, "must be a JSON object, found null"),
        (b'{"text": "caf\xe9 secret"}', 1, "not UTF-8 at byte 14"),
        (b"[" * 100_000, 1, "too deeply nested"),
        (b'{"input_ids": [' + b"1" * 5000 + b"]}", 1, "a number too long"),
        (b'{"txt": "secret", "id": 1}', 1, "its keys: 'txt', 'id'"),
        (b"{}", 1, "its keys: none"),
        (b'{"prompt": "secret"}', 1, "no 'completion'"),
        (b'{"completion": "secret"}', 1, "'prompt' must be a string, found nothing"),
        (b'{"prompt": 1, "completion": "secret"}', 1, "'prompt' must be a string, found a number"),
        (b'{"text": null}', 1, "'text' must be a string, found null"),
        (b'{"text": ""}', 1, "'text' is empty"),
        (b'{"text": "secret", "messages": []}', 1, "'messages' and 'text'; keep the one"),
        (b'{"text": "\\ud800 secret"}', 1, "half of a surrogate pair"),
        (b'{"messages": []}', 1, "'messages' is empty"),
        (b'{"messages": {}}', 1, "must be a list of messages"),
        (b'{"messages": ["secret"]}', 1, r"messages\[0\] must be an object"),
        (b'{"messages": [{"role": "user"}]}', 1, r"messages\[0\]: 'content' must be a string, found nothing"),
        (b'{"messages": [{"role": "user", "content": ["secret"]}]}', 1, "must be a string, found list"),
        (b'{"messages": [{"role": "human", "content": "secret"}]}', 1, "unknown role 'human'; known: system, user"),
        (b'{"messages": [{"role": "assistant", "content": "secret"}]}', 1, "wrong order: 'assistant' first"),
        (b'{"messages": [{"role": "user", "content": "secret"}]}', 1, "last message must be the assistant's"),
        (b'{"input_ids": []}', 1, "'input_ids' is empty"),
        (b'{"input_ids": "secret"}', 1, "must be a list of integers, found a string"),
        (b'{"input_ids": [1, true]}', 1, r"input_ids\[1\] must be an integer, found a boolean"),
        (b'{"input_ids": [1, 2], "labels": [1]}', 1, "'labels' has 1 entries, 'input_ids' has 2"),
        # B52
        (b'{"text": "a"}\n{"input_ids": [1, 5, 128]}', 2, r"input_ids\[2\] is 128, .*vocab_size 128"),
        (b'{"input_ids": [-1, 5]}', 1, r"input_ids\[0\] is -1"),
        (b'{"input_ids": [1, 5], "labels": [-100, -1]}', 1, r"labels\[1\] is -1"),
    ],
)
def test_b62_a_bad_row_is_named_by_file_and_line(
    load: Callable[..., Dataset], tmp_path: Path, lines: bytes, line: int, reason: str
) -> None:
    with pytest.raises(DataError, match=reason) as caught:
        load(lines)
    message = str(caught.value)
    assert message.startswith(f"{tmp_path / 'rows.jsonl'}:{line}: ")
    assert "secret" not in message and "\n" not in message and len(message) < 500


@pytest.mark.parametrize(
    "order", [("user", "user"), ("user", "assistant", "assistant"), ("user", "system", "assistant")]
)
def test_b62_roles_in_wrong_order(load: Callable[..., Dataset], order: tuple[str, ...]) -> None:
    with pytest.raises(DataError, match=r":1: messages\[\d\]: roles in wrong order"):
        load([{"messages": [{"role": role, "content": "x"} for role in order]}])


def test_b62_last_line_without_newline_crlf_blank_lines_and_a_byte_order_mark(load: Callable[..., Dataset]) -> None:
    dataset = load(b'\xef\xbb\xbf{"text": "a"}\r\n \t\n{"text": "b\\u2028c"}\n\n{"text": "c"}')
    assert [sample.line for sample in dataset] == [1, 3, 5] and dataset.report.rows == 3


@pytest.mark.parametrize("content", [b"", b"\n \n"])
def test_b62_an_empty_file_is_an_error(load: Callable[..., Dataset], content: bytes) -> None:
    with pytest.raises(DataError, match="has no rows"):
        load(content)


def test_b62_a_missing_file_is_an_error(tmp_path: Path, make_tokenizer: Callable[..., Tokenizer]) -> None:
    with pytest.raises(DataError, match=r"/gone\.jsonl: no such file"):
        load_samples(tmp_path / "gone.jsonl", make_tokenizer(), None, 128)
    with pytest.raises(DataError, match="is a folder"):
        load_samples(tmp_path, make_tokenizer(), None, 128)


def test_a_tokenizer_without_eos_is_an_error(
    load: Callable[..., Dataset], make_tokenizer: Callable[..., Tokenizer]
) -> None:
    with pytest.raises(DataError, match=r":1: .*names no EOS token"):
        load([{"text": "a"}], tokenizer=make_tokenizer(eos_token=None))


def test_b24_rows_cut_by_max_length_are_counted(load: Callable[..., Dataset], caplog: pytest.LogCaptureFixture) -> None:
    rows = [{"prompt": "x" * 20, "completion": "y"}, {"prompt": "x", "completion": "y" * 20}, {"text": "ab"}]
    with caplog.at_level(logging.WARNING):
        dataset = load(rows, max_length=10)
    assert [sample.line for sample in dataset] == [2, 3]
    assert [len(sample.ids) for sample in dataset] == dataset.lengths == [10, 4]
    assert (dataset.report.rows, dataset.report.truncated, dataset.report.dropped) == (3, [1, 2], [1])
    truncated, dropped = [record.getMessage() for record in caplog.records]
    assert "2 of 3 rows are longer than max_seq_length=10" in truncated and "(line 1, 2)" in truncated
    assert "1 of 3 rows have no token to train" in dropped and "(line 1)" in dropped


def test_b24_max_length_that_cuts_every_answer_stops(load: Callable[..., Dataset]) -> None:
    rows = [{"prompt": "x" * 20, "completion": "y"}, {"messages": CHAT}]
    with pytest.raises(DataError, match=r"none of 2 rows .* max_seq_length=8 cuts their answers off; raise max"):
        load(rows, max_length=8)


def test_b24_a_label_on_position_0_alone_trains_nothing(load: Callable[..., Dataset]) -> None:
    with pytest.raises(DataError, match="none of 1 rows has a token to train: every label is -100"):
        load([{"input_ids": [5, 6, 7], "labels": [5, IGNORED, IGNORED]}])


def test_a_subset_shares_rows(load: Callable[..., Dataset]) -> None:
    part = load([{"text": t} for t in "abc"]).subset([2, 0])
    assert [sample.line for sample in part] == [3, 1] and len(part) == 2


def test_ids_need_no_tokenizer_and_everything_else_says_that_it_does(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"input_ids": [1, 2, 3]}\n')
    assert load_samples(path, None, 8, 4)[0].labels == [1, 2, 3]
    path.write_text('{"input_ids": [1, 2, 3]}\n{"text": "abc"}\n')
    with pytest.raises(DataError, match=r"rows\.jsonl:2: 'text' needs a tokenizer.*no tokenizer\.json.*'input_ids'"):
        load_samples(path, None, 8, 4)
