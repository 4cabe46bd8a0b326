"""Tokenizer, chat template and BOS (case B46), compared with transformers."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lema_core.errors import CheckpointError, DataError, LemaError
from lema_train.data import TextStream, Tokenizer

CHAT = [
    {"role": "user", "content": "hello world"},
    {"role": "assistant", "content": "it is"},
    {"role": "user", "content": "ab"},
    {"role": "assistant", "content": "use  it"},
]
NO_BOS = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def hf_tokenizer(folder: Path) -> Any:
    return pytest.importorskip("transformers").PreTrainedTokenizerFast.from_pretrained(folder)


def hf_ids(folder: Path, messages: list[dict], **options: object) -> list[int]:
    encoded = hf_tokenizer(folder).apply_chat_template(messages, tokenize=True, return_dict=True, **options)
    return list(encoded["input_ids"])


def test_ids_of_the_files(make_tokenizer: Callable[..., Tokenizer]) -> None:
    tokenizer = make_tokenizer()
    assert (tokenizer.vocab_size, tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id) == (128, 0, 1, None)
    assert tokenizer.fill_id == 1
    assert make_tokenizer(pad_token={"content": "<|im_end|>", "lstrip": False}).pad_id == 3


def test_special_tokens_map_and_config_ids_fill_in_what_the_config_lacks(tokenizer_folder: Callable[..., Path]) -> None:
    folder = tokenizer_folder()
    (folder / "tokenizer_config.json").write_text("{}")
    (folder / "special_tokens_map.json").write_text(json.dumps({"bos_token": {"content": "<s>"}}))
    (folder / "config.json").write_text(json.dumps({"eos_token_id": 1, "pad_token_id": 2}))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [3, 1]}))
    tokenizer = Tokenizer.from_folder(folder)
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id) == (0, 3, 2)
    assert tokenizer.stop_ids == {1, 3}


def test_a_null_bos_is_no_bos_though_the_model_reserves_an_id(tokenizer_folder: Callable[..., Path]) -> None:
    folder = tokenizer_folder(bos_token=None)
    (folder / "config.json").write_text(json.dumps({"bos_token_id": 0}))
    assert Tokenizer.from_folder(folder).bos_id is None


def test_truncation_stored_in_the_file_is_off(make_tokenizer: Callable[..., Tokenizer]) -> None:
    assert len(make_tokenizer().encode("x" * 40)) == 40


@pytest.mark.parametrize("text", ["hello world", "a  b\n\n", "", "caf\u00e9 \U0001f600", "<|im_end|> it"])
@pytest.mark.parametrize("auto_bos", [False, True])
def test_encode_and_decode_equal_transformers(tokenizer_folder: Callable[..., Path], text: str, auto_bos: bool) -> None:
    folder = tokenizer_folder(auto_bos=auto_bos)
    ours, theirs = Tokenizer.from_folder(folder), hf_tokenizer(folder)
    assert ours.encode(text) == theirs.encode(text)
    assert ours.encode(text, add_special_tokens=False) == theirs.encode(text, add_special_tokens=False)
    ids = ours.encode(text)
    assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)
    assert ours.decode(ids, skip_special=False) == theirs.decode(ids)


@pytest.mark.parametrize("auto_bos", [False, True])
@pytest.mark.parametrize("add_bos", [False, True])
def test_bos_is_what_tokenizer_json_says_as_in_transformers(
    tokenizer_folder: Callable[..., Path], auto_bos: bool, add_bos: bool
) -> None:
    folder = tokenizer_folder(auto_bos=auto_bos, add_bos_token=add_bos)
    ours = Tokenizer.from_folder(folder)
    assert ours.adds_bos == auto_bos
    assert ours.encode("hello") == hf_tokenizer(folder).encode("hello")


def test_bos_is_not_doubled_for_a_text_that_brings_its_own(make_tokenizer: Callable[..., Tokenizer]) -> None:
    ids = make_tokenizer(auto_bos=True).encode("<s>hello")
    assert ids.count(0) == 1 and ids[0] == 0


@pytest.mark.parametrize("auto_bos", [False, True])
@pytest.mark.parametrize("prompt", [False, True])
def test_b46_template_with_bos_equals_transformers(
    tokenizer_folder: Callable[..., Path], auto_bos: bool, prompt: bool
) -> None:
    folder = tokenizer_folder(auto_bos=auto_bos)
    messages = CHAT[:3] if prompt else CHAT
    ids = Tokenizer.from_folder(folder).chat_ids(messages, add_generation_prompt=prompt)
    assert ids[0] == 0 and ids.count(0) == 1
    assert ids == hf_ids(folder, messages, add_generation_prompt=prompt)


def test_b46_template_without_bos(tokenizer_folder: Callable[..., Path]) -> None:
    assert Tokenizer.from_folder(folder := tokenizer_folder(NO_BOS)).chat_ids(CHAT) == hf_ids(folder, CHAT)
    # On purpose not as transformers: a tokenizer that begins every text with BOS begins chats with it too.
    folder = tokenizer_folder(NO_BOS, auto_bos=True)
    assert Tokenizer.from_folder(folder).chat_ids(CHAT) == [0, *hf_ids(folder, CHAT)]


def test_b46_no_template_says_how_to_give_one(make_tokenizer: Callable[..., Tokenizer]) -> None:
    with pytest.raises(DataError, match=r"no chat template.*chat_template\.jinja") as caught:
        make_tokenizer(template=None).chat_ids(CHAT)
    assert "\n" not in str(caught.value)


def test_b46_template_that_refuses_a_role(make_tokenizer: Callable[..., Tokenizer]) -> None:
    template = (
        "{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role\n not supported') }}{% endif %}x"
    )
    with pytest.raises(DataError, match="refuses these messages: System role not supported"):
        make_tokenizer(template).chat_ids([{"role": "system", "content": "s"}])


def test_templates_by_file_list_and_name(tokenizer_folder: Callable[..., Path]) -> None:
    named = [{"name": "default", "template": "D"}, {"name": "tool_use", "template": "T"}]
    folder = tokenizer_folder(named)
    assert Tokenizer.from_folder(folder).apply_chat_template(CHAT) == "D"
    assert Tokenizer.from_folder(folder, "tool_use").apply_chat_template(CHAT) == "T"
    with pytest.raises(CheckpointError, match=r"no chat template 'rag'.*default, tool_use"):
        Tokenizer.from_folder(folder, "rag")
    (folder / "chat_template.jinja").write_text("J")
    assert Tokenizer.from_folder(folder).apply_chat_template(CHAT) == "J"
    (other := folder / "mine.jinja").write_text("M")
    assert Tokenizer.from_folder(folder, other).apply_chat_template(CHAT) == "M"


@pytest.mark.parametrize(
    "template",
    [
        "{% for m in messages %}\n  {% if m.role == 'user' %}\n U{{ m | tojson }}\n  {% endif %}\n{% endfor %}",
        "{% for m in messages %}{% if loop.index > 2 %}{% break %}{% endif %}{{ m.content | trim }}{% endfor %}",
        "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}{{ pad }}",
        "{% set x = 1 %}{% generation %}{% set x = 2 %} {{ x }}\n{% endgeneration %}{{ x }}{{ tools is none }}",
        "{{ strftime_now('%Y') }}{{ messages[0]['name'] is defined }}",
    ],
)
def test_rendering_equals_transformers(tokenizer_folder: Callable[..., Path], template: str) -> None:
    folder = tokenizer_folder(template)
    chat = [{"role": "user", "content": " <b>'é' & \"x\" ", "name": None}, *CHAT[1:]]
    expected = hf_tokenizer(folder).apply_chat_template(chat, tokenize=False)
    assert Tokenizer.from_folder(folder).apply_chat_template(chat) == expected


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{% for x in messages",
        "{{ messages[0]['content'] + 1 }}",
        "{{ nothing.here.at_all }}",
    ],
)
def test_templates_are_sandboxed_and_fail_in_one_line(make_tokenizer: Callable[..., Tokenizer], template: str) -> None:
    with pytest.raises(DataError) as caught:
        make_tokenizer(template).apply_chat_template(CHAT)
    assert "\n" not in str(caught.value) and "tokenizer_config.json" in str(caught.value)


def test_broken_folders(tokenizer_folder: Callable[..., Path], tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"tokenizer\.json: no such file"):
        Tokenizer.from_folder(tmp_path / "none")
    folder = tokenizer_folder()
    (folder / "tokenizer_config.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"tokenizer_config\.json: not readable as JSON"):
        Tokenizer.from_folder(folder)
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": [{"name": "default"}]}))
    with pytest.raises(CheckpointError, match="'chat_template' is not built as expected"):
        Tokenizer.from_folder(folder)
    (folder / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": {"9": {"content": "</s>"}}}))
    with pytest.raises(CheckpointError, match="'</s>' has id 9 there and 1 in"):
        Tokenizer.from_folder(folder)
    (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(LemaError, match="not a readable tokenizer"):
        Tokenizer.from_folder(folder)


def test_tokens_the_config_adds_count(make_tokenizer: Callable[..., Tokenizer]) -> None:
    tokenizer = make_tokenizer(pad_token="<pad>", added_tokens_decoder={"128": {"content": "<x>", "special": True}})
    assert (tokenizer.vocab_size, tokenizer.pad_id) == (130, 129)
    assert tokenizer.encode("<x><pad>") == [128, 129]


def test_stream_never_splits_a_character(make_tokenizer: Callable[..., Tokenizer]) -> None:
    tokenizer = make_tokenizer()
    ids = tokenizer.encode("caf\u00e9 \U0001f600!")
    stream = TextStream(tokenizer)
    pieces = [stream.feed(i) for i in ids]
    assert "".join(pieces) + stream.flush() == "caf\u00e9 \U0001f600!"
    assert {p for p in pieces if not p.isascii()} == {"\u00e9", "\U0001f600"}
    assert [stream.feed(i) for i in ids[3:4]] == [""] and stream.flush() == "\ufffd"


def test_stream_joins_to_the_decoded_whole(make_tokenizer: Callable[..., Tokenizer]) -> None:
    tokenizer = make_tokenizer()

    @settings(max_examples=60, deadline=None)
    @given(ids=st.lists(st.integers(0, 127), max_size=30))
    def check(ids: list[int]) -> None:
        stream = TextStream(tokenizer)
        assert "".join(map(stream.feed, ids)) + stream.flush() == tokenizer.decode(ids)

    check()


def test_stream_keeps_the_spaces_of_sentencepiece_tokens(tmp_path: Path) -> None:
    import tokenizers as t

    vocabulary = {"<unk>": 0, "</s>": 1, "\u2581a": 2, "\u2581b": 3, "c": 4}
    backend = t.Tokenizer(t.models.WordLevel(vocabulary, unk_token="<unk>"))
    backend.decoder = t.decoders.Metaspace()
    backend.add_special_tokens(["</s>"])
    backend.save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer.from_folder(tmp_path)
    stream = TextStream(tokenizer)
    ids = [2, 3, 1, 3, 4, 2]
    assert "".join(map(stream.feed, ids)) + stream.flush() == tokenizer.decode(ids) == "a b bc a"
