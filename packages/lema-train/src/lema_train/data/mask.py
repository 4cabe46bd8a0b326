"""Which tokens of a conversation are trained: the assistant's answers and the end of each turn, nothing else.

With ``{% generation %}`` marks in the chat template, the answers are what they enclose. Without, they are found by
rendering: what the conversation up to and with a turn adds to the conversation before it plus the generation prompt.
Either way the end-of-turn token belongs to the answer, for a model that never learns it never stops; it is looked for

1. after the answer, within what the template writes for this turn: the first special token;
2. in what the template writes next, if that begins with a token that ends answers: the EOS token, those that the
   model's files list beside it, the one that ended the last turn. This is for templates that close a turn when the next
   begins; for the last turn, a further user turn is rendered to see it, and the closing token appended;
3. for a template without special tokens: the text it writes after the answer.

Where none of these tells, an error says so; nothing is guessed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from lema_core.errors import DataError
from lema_train.data.chat_template import ChatTemplate, Message
from lema_train.data.tokenizer import Tokenizer

if TYPE_CHECKING:
    from lema_train.data.rows import Sample

IGNORED = -100
"""Label of a token that is not trained, as everywhere in this field."""

_MAY_FOLLOW = {"system": ("",), "user": ("", "system", "assistant"), "assistant": ("user",)}

_PROBE: Message = {"role": "user", "content": "x"}


class _Token(NamedTuple):
    token: int
    start: int
    end: int


@dataclass(frozen=True)
class _Encoded:
    """A text, its token ids and the characters [start, end) each stands for."""

    text: str
    ids: list[int]
    extents: list[tuple[int, int]]

    @classmethod
    def of(cls, text: str, tokenizer: Tokenizer) -> _Encoded:
        return cls(text, *tokenizer.encode_with_extents(text))

    def first(self, wanted: frozenset[int], start: int, end: int) -> _Token | None:
        """The first token out of ``wanted`` that lies within characters [start, end)."""
        for token, (token_start, token_end) in zip(self.ids, self.extents, strict=True):
            if token in wanted and start <= token_start and token_end <= end:
                return _Token(token, token_start, token_end)
        return None


def encode_chat(messages: Sequence[Message], tokenizer: Tokenizer) -> tuple[list[int], list[int]]:
    """Token ids and labels (the id, or -100 where it is not trained) of a conversation.

    The ids are ``tokenizer.chat_ids(messages)``, plus the end-of-turn token if the template leaves the last turn open.

    Raises:
        DataError: messages that are not a conversation (see :func:`check_messages`), no chat template, one that refuses
            them, or one from which answers cannot be told apart.
    """
    check_messages(messages)
    template = tokenizer.require_chat_template()
    if template.has_generation:
        encoded, spans = _spans_by_marks(messages, template, tokenizer)
    else:
        encoded, spans = _spans_by_rendering(messages, template, tokenizer)
    labels = [IGNORED] * len(encoded.ids)
    for position, (start, end) in enumerate(encoded.extents):
        if any(start < span_end and span_start < end and span_start < span_end for span_start, span_end in spans):
            labels[position] = encoded.ids[position]
    trained = sum(label != IGNORED for label in labels)
    if trained in (0, len(labels)):
        raise DataError(
            f"{template.origin}: by this template {'no' if trained == 0 else 'every'} token of the conversation is the "
            "assistant's; mark the answers in it with {% generation %}...{% endgeneration %}"
        )
    ids = tokenizer.with_bos(encoded.ids)
    return ids, [IGNORED] * (len(ids) - len(labels)) + labels


def check_messages(messages: object) -> None:
    """Check that this is a conversation to learn from: [system], then user and assistant in turn, the assistant last.

    Raises:
        DataError: says which message is wrong and why, without its text.
    """
    if not isinstance(messages, list):
        raise DataError(f"'messages' must be a list of messages, found {type(messages).__name__}")
    if not messages:
        raise DataError("'messages' is empty; it needs a user's and an assistant's message at least")
    previous = ""
    for index, message in enumerate(messages):
        if not isinstance(message, dict):
            raise DataError(
                f"messages[{index}] must be an object with 'role' and 'content', found {type(message).__name__}"
            )
        for key in ("role", "content"):
            if not isinstance(message.get(key), str):
                found = type(message[key]).__name__ if key in message else "nothing"
                raise DataError(f"messages[{index}]: {key!r} must be a string, found {found}")
        role = message["role"]
        if role not in _MAY_FOLLOW:
            raise DataError(f"messages[{index}]: unknown role {role[:20]!r}; known: {', '.join(_MAY_FOLLOW)}")
        if previous not in _MAY_FOLLOW[role]:
            where = f"after {previous!r}" if previous else "first"
            raise DataError(f"messages[{index}]: roles in wrong order: {role!r} {where}; user and assistant take turns")
        previous = role
    if previous != "assistant":
        raise DataError(f"messages[{len(messages) - 1}]: the last message must be the assistant's, found {previous!r}")


def _spans_by_marks(
    messages: Sequence[Message], template: ChatTemplate, tokenizer: Tokenizer
) -> tuple[_Encoded, list[tuple[int, int]]]:
    """Characters of the marked blocks, each with a stop token that follows it."""
    text, spans = template.render_with_spans(messages)
    if not spans:
        raise DataError(f"{template.origin}: the template marks nothing of this conversation with {{% generation %}}")
    encoded = _Encoded.of(text, tokenizer)
    special = tokenizer.special_ids | tokenizer.stop_ids
    closed: list[tuple[int, int]] = []
    for start, end in spans:
        # Marks that already enclose the end of the turn are taken as they are.
        if not _ends_with(encoded, special, start, end):
            if (start, end) == spans[-1] and _closing_after(encoded, end, tokenizer.stop_ids) is None:
                encoded = _close_last_turn(encoded, end, messages, template, tokenizer)
            found = _closing_after(encoded, end, tokenizer.stop_ids)
            end = end if found is None else found.end
        closed.append((start, end))
    return encoded, closed


def _spans_by_rendering(
    messages: Sequence[Message], template: ChatTemplate, tokenizer: Tokenizer
) -> tuple[_Encoded, list[tuple[int, int]]]:
    """Characters of every assistant turn, end-of-turn included, by comparing renderings of the conversation's parts."""
    encoded = _Encoded.of(template.render(messages), tokenizer)
    turns = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    starts = [_answer_start(encoded.text, messages, turn, template) for turn in turns]
    stops, special = tokenizer.stop_ids, tokenizer.special_ids | tokenizer.stop_ids
    spans = []
    limits = [*starts[1:], len(encoded.text)]
    # The last turn first: nothing follows it, so what ends it is certain, and ends the others too.
    for turn, start, limit in reversed(list(zip(turns, starts, limits, strict=True))):
        content = messages[turn]["content"].strip()
        position = encoded.text.find(content, start, limit)
        content_end = start if position < 0 or not content else position + len(content)
        if turn == turns[-1] and _closing_after(encoded, content_end, stops) is None:
            encoded = _close_last_turn(encoded, content_end, messages, template, tokenizer)
        # What the template is still writing for this turn, not yet for the next.
        own_text = template.render(messages[: turn + 1])
        own_end = _shared_length(own_text, encoded.text)
        # If the answer was not found as it stands (a template may rewrite it), special tokens may be part of it.
        found = encoded.first(stops, content_end, own_end) if position < 0 else None
        found = found or encoded.first(special, content_end, own_end) or _closing_after(encoded, content_end, stops)
        if found:
            stops = stops | {found.token}
            end = found.end
        elif content_end < len(own_text) == own_end:
            end = own_end
        else:
            raise DataError(
                f"{template.origin}: the template writes nothing that ends the assistant's turn (message {turn}), so "
                "the model could not learn to stop; let it write the EOS token there, or mark the whole answer with "
                "{% generation %}...{% endgeneration %}"
            )
        spans.append((start, end))
    return encoded, spans


def _shared_length(a: str, b: str) -> int:
    """How many characters both texts begin with."""
    shorter = min(len(a), len(b))
    return next((i for i in range(shorter) if a[i] != b[i]), shorter)


def _answer_start(text: str, messages: Sequence[Message], turn: int, template: ChatTemplate) -> int:
    """Where the answer of ``messages[turn]`` begins: after the prompt that asks for it."""
    before = messages[:turn]
    prompt = template.render(before, add_generation_prompt=True)
    begins = text.startswith(prompt)
    if begins and prompt == template.render(before):
        # No generation prompt: either an answer needs no header, or the template does not know the option and the
        # header would be taken for a part of the answer.
        probe = template.render([*before, {**messages[turn], "content": _PROBE["content"]}])
        begins = probe.startswith(prompt) and probe[len(prompt) :].lstrip().startswith(_PROBE["content"])
    if not begins:
        raise DataError(
            f"{template.origin}: cannot tell which tokens are the assistant's (message {turn}): the conversation does "
            "not begin with the prompt that asks for that answer; mark the answers in the template with "
            "{% generation %}...{% endgeneration %}"
        )
    return len(prompt)


def _ends_with(encoded: _Encoded, wanted: frozenset[int], start: int, end: int) -> bool:
    """Whether the last token within characters [start, end), white space aside, is one of ``wanted``."""
    return any(
        token in wanted and start <= token_start and token_end <= end and not encoded.text[token_end:end].strip()
        for token, (token_start, token_end) in zip(encoded.ids, encoded.extents, strict=True)
    )


def _closing_after(encoded: _Encoded, position: int, stops: frozenset[int]) -> _Token | None:
    """The token out of ``stops`` that follows character ``position``, with at most white space between."""
    found = encoded.first(stops, position, len(encoded.text))
    if found is None or encoded.text[position : found.start].strip():
        return None
    return found


def _close_last_turn(
    encoded: _Encoded, position: int, messages: Sequence[Message], template: ChatTemplate, tokenizer: Tokenizer
) -> _Encoded:
    """The text with the stop token that the template would write when another turn followed, unchanged if none."""
    if encoded.text[position:].strip():
        return encoded
    try:
        longer = _Encoded.of(template.render([*messages, _PROBE]), tokenizer)
    except DataError:
        # A template may refuse a further turn; then it does not close this one there either.
        return encoded
    found = _closing_after(longer, position, tokenizer.stop_ids)
    if found is None or not longer.text.startswith(encoded.text):
        return encoded
    return _Encoded.of(longer.text[: found.end], tokenizer)


def describe_sample(sample: Sample, tokenizer: Tokenizer | None) -> str:
    """The row as text, special tokens shown, with the trained parts between ``⟦`` and ``⟧``; ids without a tokenizer.

    A label at position 0 is never trained (nothing predicts the first token), so it is not marked.
    """
    pieces: list[str] = []
    start = 0
    trained = [position > 0 and label != IGNORED for position, label in enumerate(sample.labels)]
    for position in range(1, len(trained) + 1):
        if position == len(trained) or trained[position] != trained[start]:
            ids = sample.ids[start:position]
            text = f" {ids} " if tokenizer is None else tokenizer.decode(ids, skip_special=False)
            pieces.append(f"⟦{text}⟧" if trained[start] else text)
            start = position
    shown = f"line {sample.line}: {len(trained)} tokens, {sum(trained)} trained, shown between ⟦ and ⟧:"
    return f"{shown}\n{''.join(pieces)}"
