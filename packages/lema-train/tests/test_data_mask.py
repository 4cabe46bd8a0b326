"""Which tokens of a chat are trained (case B47)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from lema_core.errors import DataError
from lema_train.data import IGNORED, Sample, Tokenizer, describe_sample, encode_chat

CHAT = [
    {"role": "user", "content": "hello world"},
    {"role": "assistant", "content": "it is"},
    {"role": "user", "content": "ab"},
    {"role": "assistant", "content": "use  it "},
]
PROMPT = "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
TURN = "{{ '<|im_start|>' + m['role'] + '\n' }}"
PLAIN = "{% for m in messages %}" + TURN + "{{ m['content'] + '<|im_end|>\n' }}{% endfor %}" + PROMPT


def marked(body: str, after: str = "") -> str:
    return (
        "{{ bos_token }}{% for m in messages %}" + TURN + "{% if m['role'] == 'assistant' %}{% generation %}" + body
        + "{% endgeneration %}" + after + "{% else %}{{ m['content'] + '<|im_end|>' }}{% endif %}{{ '\n' }}{% endfor %}"
        + PROMPT
    )  # fmt: skip


# A turn's end is written when the next turn begins; the last one stays open, or is closed at the very end.
CLOSED_BY_NEXT = (
    "{% for m in messages %}{% if not loop.first %}{{ eos_token }}{% endif %}" + TURN + "{{ m['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}{{ eos_token + '<|im_start|>assistant\n' }}{% endif %}"
)
CLOSED_AT_END = CLOSED_BY_NEXT + "{% if not add_generation_prompt %}{{ eos_token }}{% endif %}"
# As Mistral and Llama 2: no header in front of an answer, so asking for one adds nothing.
NO_HEADER = (
    "{{ bos_token }}{% for m in messages %}{% if m['role'] == 'user' %}{{ 'A: ' + m['content'] + ' B:' }}"
    "{% else %}{{ ' ' + m['content'] | trim + eos_token }}{% endif %}{% endfor %}"
)
# As Phi-3: an EOS after the whole conversation, beside each turn's own marker.
EOS_AT_END = PLAIN.replace(PROMPT, "") + (
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% else %}{{ eos_token }}{% endif %}"
)
# As Qwen 3: the last answer gets a prefix that the generation prompt does not have and earlier answers lose.
THINK = (
    "{% for m in messages %}" + TURN + "{% if loop.last and m['role'] == 'assistant' %}{{ 'T: \n' }}{% endif %}"
    "{{ m['content'] + '<|im_end|>\n' }}{% endfor %}" + PROMPT
)
NO_SPECIALS = (
    "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + '\n#\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)


def runs(tokenizer: Tokenizer, ids: list[int], labels: list[int]) -> list[str]:
    """Texts of the trained stretches."""
    assert all(label in (IGNORED, i) for i, label in zip(ids, labels, strict=True))
    shown = describe_sample(Sample(ids, labels, 1), tokenizer).split("\n", 1)[1]
    return [part.split("⟧")[0] for part in shown.split("⟦")[1:]]


@pytest.mark.parametrize("eos", ["</s>", "<|im_end|>"])
@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (PLAIN, ["it is<|im_end|>", "use  it <|im_end|>"]),
        (marked("{{ m['content'] + '<|im_end|>' }}"), ["it is<|im_end|>", "use  it <|im_end|>"]),
        (CLOSED_BY_NEXT, ["it is{eos}", "use  it {eos}"]),
        (CLOSED_AT_END, ["it is{eos}", "use  it {eos}"]),
        (NO_HEADER, [" it is{eos}", " use  it{eos}"]),
        (EOS_AT_END, ["it is<|im_end|>", "use  it <|im_end|>"]),
        (THINK, ["it is<|im_end|>", "T: \nuse  it <|im_end|>"]),
        (NO_SPECIALS, ["it is\n#\n", "use  it \n#\n"]),
    ],
)
def test_b47_answers_and_the_end_of_both_turns(
    make_tokenizer: Callable[..., Tokenizer], template: str, expected: list[str], eos: str
) -> None:
    tokenizer = make_tokenizer(template, eos_token=eos)
    ids, labels = encode_chat(CHAT, tokenizer)
    assert runs(tokenizer, ids, labels) == [text.format(eos=eos) for text in expected]
    left_open = template == CLOSED_BY_NEXT
    assert ids == tokenizer.chat_ids(CHAT) + [tokenizer.eos_id] * left_open


def test_b47_marks_that_leave_the_stop_token_out(make_tokenizer: Callable[..., Tokenizer]) -> None:
    tokenizer = make_tokenizer(marked("{{ m['content'] }}", "{{ eos_token }}"))
    assert runs(tokenizer, *encode_chat(CHAT, tokenizer)) == ["it is</s>", "use  it </s>"]
    open_turns = CLOSED_BY_NEXT.replace("{{ m['content'] }}", "{% generation %}{{ m['content'] }}{% endgeneration %}")
    tokenizer = make_tokenizer(open_turns.replace(TURN, "{{ m['role'] }}"))
    with_user = runs(tokenizer, *encode_chat(CHAT, tokenizer))
    assert with_user == ["hello world</s>", "it is</s>", "ab</s>", "use  it </s>"]  # as marked, the user's turns too


@pytest.mark.parametrize("template", [PLAIN, CLOSED_BY_NEXT, NO_HEADER, marked("{{ m['content'] + '<|im_end|>' }}")])
def test_b47_an_empty_answer_trains_its_end(make_tokenizer: Callable[..., Tokenizer], template: str) -> None:
    tokenizer = make_tokenizer(template, eos_token="<|im_end|>")
    chat = [CHAT[0], {"role": "assistant", "content": ""}, *CHAT[2:]]
    first, second = runs(tokenizer, *encode_chat(chat, tokenizer))
    assert first.strip() == "<|im_end|>" and second.strip().endswith(
        "it <|im_end|>" if "trim" not in template else "it<|im_end|>"
    )


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        # The header "assistant" would be taken for the answer's beginning: the template ignores the option.
        (PLAIN.replace(PROMPT, ""), "cannot tell which tokens"),
        # What is written for the last turn changes what comes before it.
        ("{{ messages | length }}" + PLAIN, "cannot tell which tokens"),
        ("{% for m in messages %}{{ '<s>' + m['content'] }}{% endfor %}", "cannot tell which tokens"),
        # Nothing ends a turn.
        (PLAIN.replace("+ '<|im_end|>\n' ", ""), "nothing that ends"),
        ("{% generation %}{% for m in messages %}{{ m['content'] }}{% endfor %}{% endgeneration %}", "every token"),
        ("{% for m in messages %}{{ m['content'] }}{% generation %}{% endgeneration %}{% endfor %}", "no token"),
        ("{% if false %}{% generation %}x{% endgeneration %}{% endif %}{{ messages[0]['content'] }}", "marks nothing"),
        (marked("{% generation %}x{% endgeneration %}"), "nested"),
    ],
)
def test_b47_what_cannot_be_known_is_an_error(
    make_tokenizer: Callable[..., Tokenizer], template: str, reason: str
) -> None:
    with pytest.raises(DataError, match=reason) as caught:
        encode_chat(CHAT, make_tokenizer(template))
    assert "\n" not in str(caught.value) and "generation %}" in str(caught.value)


def test_special_tokens_within_an_answer_do_not_end_it(make_tokenizer: Callable[..., Tokenizer]) -> None:
    tokenizer = make_tokenizer(PLAIN)
    chat = [CHAT[0], {"role": "assistant", "content": "a<|im_end|>b"}]
    assert runs(tokenizer, *encode_chat(chat, tokenizer)) == ["a<|im_end|>b<|im_end|>"]


def test_auto_bos_is_not_trained(make_tokenizer: Callable[..., Tokenizer]) -> None:
    ids, labels = encode_chat(CHAT, make_tokenizer(PLAIN, auto_bos=True))
    assert ids[0] == 0 and ids.count(0) == 1 and labels[0] == IGNORED
    assert len(ids) == len(labels)


@pytest.mark.parametrize("content", ["it is", " it  is \n", "", "é 😀"])
def test_marked_masks_equal_transformers(tokenizer_folder: Callable[..., Path], content: str) -> None:
    transformers = pytest.importorskip("transformers")
    folder = tokenizer_folder(marked("{{ m['content'] + '<|im_end|>' }}"))
    chat = [CHAT[0], {"role": "assistant", "content": content}, *CHAT[2:]]
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(folder).apply_chat_template(
        chat, return_dict=True, return_assistant_tokens_mask=True
    )
    ids, labels = encode_chat(chat, Tokenizer.from_folder(folder))
    assert ids == theirs["input_ids"]
    assert [int(label != IGNORED) for label in labels] == list(theirs["assistant_masks"])


def test_marks_hold_inside_a_macro(make_tokenizer: Callable[..., Tokenizer]) -> None:
    template = (
        "{% macro answer(m) %}{% generation %}{{ m['content'] + eos_token }}{% endgeneration %}{% endmacro %}"
        "{% for m in messages %}{% if m['role'] == 'user' %}{{ m['content'] + '\n' }}"
        "{% else %}{{ answer(m) }}{% endif %}{% endfor %}"
    )
    tokenizer = make_tokenizer(template)
    assert runs(tokenizer, *encode_chat(CHAT, tokenizer)) == ["it is</s>", "use  it </s>"]


def test_a_sample_is_shown_with_its_trained_parts(make_tokenizer: Callable[..., Tokenizer]) -> None:
    tokenizer = make_tokenizer(PLAIN)
    shown = describe_sample(Sample([0, *tokenizer.encode("abc")], [0, IGNORED, 7, IGNORED], 3), tokenizer)
    assert shown == "line 3: 4 tokens, 1 trained, shown between ⟦ and ⟧:\n<s>a⟦b⟧c"
