"""Chat templates: Jinja, sandboxed, rendered as transformers renders them.

A template comes with a downloaded model, so it is foreign code: it runs in Jinja's immutable sandbox and sees plain
JSON values only. ``{% generation %}...{% endgeneration %}`` (what the assistant wrote, in training templates) is
rendered like its body; :meth:`ChatTemplate.render_with_spans` also tells where those bodies ended up, by compiling the
template a second time so that each body is framed by two Unicode noncharacters, which are then taken out again.
Framing, unlike counting what has been written so far, also holds inside macros and ``{% set %}`` blocks. Jinja itself
is imported when the first template is used.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

from lema_core.errors import DataError

if TYPE_CHECKING:
    import jinja2

Message = Mapping[str, Any]

# Noncharacters: Unicode reserves them for a program's internal use, text that is exchanged never holds them.
_OPEN, _CLOSE = "\ufdd0", "\ufdd1"
_MARKS = re.compile(f"[{_OPEN}{_CLOSE}]")


class ChatTemplate:
    """One template and the special tokens it may print.

    Args:
        source: the Jinja text.
        special_tokens: what the template sees as ``bos_token``, ``eos_token`` ...
        origin: where the template came from, for messages.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str], origin: str) -> None:
        self.source = source
        self.origin = origin
        self._special_tokens = dict(special_tokens)

    @cached_property
    def _plain(self) -> jinja2.Template:
        return self._compile(mark_generation=False)

    @cached_property
    def _marked(self) -> jinja2.Template:
        return self._compile(mark_generation=True)

    @property
    def has_generation(self) -> bool:
        """Whether the template marks the assistant's text with ``{% generation %}``."""
        return self._plain.environment.has_generation  # type: ignore[attr-defined]

    def render(self, messages: Sequence[Message], add_generation_prompt: bool = False) -> str:
        """The conversation as text.

        Raises:
            DataError: the template does not compile, or refuses these messages (an unsupported role, a wrong order).
        """
        return self._run(self._plain, messages, add_generation_prompt)

    def render_with_spans(self, messages: Sequence[Message]) -> tuple[str, list[tuple[int, int]]]:
        """The conversation as text and the character ranges [start, end) of its ``{% generation %}`` blocks.

        Raises:
            DataError: as :meth:`render`; also when blocks are nested, or the messages or a filter disturb the marks.
        """
        text = self.render(messages)
        pieces: list[str] = []
        spans: list[tuple[int, int]] = []
        opened: int | None = None
        length = position = 0
        marked = self._run(self._marked, messages, False)
        for mark in _MARKS.finditer(marked):
            pieces.append(marked[position : mark.start()])
            length += mark.start() - position
            position = mark.end()
            if (opened is None) != (mark.group() == _OPEN):
                raise DataError(
                    f"{self.origin}: {{% generation %}} blocks are nested or cut apart; mark each answer once"
                )
            if opened is None:
                opened = length
            else:
                spans.append((opened, length))
                opened = None
        pieces.append(marked[position:])
        if opened is not None or "".join(pieces) != text:
            raise DataError(
                f"{self.origin}: what the template does to a {{% generation %}} block hides where it ends; "
                "print the block directly, without a filter around it"
            )
        return text, spans

    def _compile(self, mark_generation: bool) -> jinja2.Template:
        from jinja2 import TemplateSyntaxError

        from lema_train.data.jinja_sandbox import sandbox

        try:
            return sandbox((_OPEN, _CLOSE) if mark_generation else None).from_string(self.source)
        except TemplateSyntaxError as error:
            raise DataError(
                f"{self.origin}: not a valid chat template, line {error.lineno}: {_one_line(error)}; "
                "take the file again from where the model came from"
            ) from error

    def _run(self, template: jinja2.Template, messages: Sequence[Message], add_generation_prompt: bool) -> str:
        # A None (content of a tool call, say) prints as "None" in most templates; a missing key is what they expect.
        plain = [{key: value for key, value in message.items() if value is not None} for message in messages]
        try:
            return template.render(
                **self._special_tokens,
                messages=plain,
                tools=None,
                documents=None,
                add_generation_prompt=add_generation_prompt,
            )
        except Exception as error:  # foreign code: whatever it raises means that it cannot render these messages
            raise DataError(f"{self.origin}: the chat template refuses these messages: {_one_line(error)}") from error


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__
