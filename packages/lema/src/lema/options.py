"""What an option may be: builders of dataclass fields whose metadata holds an :class:`Option`.

Values come from Python, YAML, JSON and the command line, where ``1e-4`` may be a string and ``false`` a bool: an Option
reads every spelling into one value, or refuses it in one line.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from lema_core.budgets import ALLOWED_AMOUNTS, parse_amount
from lema_core.errors import ConfigError
from lema_core.suggest import did_you_mean


@dataclass(frozen=True)
class Option:
    """One documented option.

    ``parse`` returns the normalised value; it raises ValueError for what is not ``allowed``, ConfigError to say more.
    ``null``: None may be given. ``literal``: the command line takes the value as it stands, commas and spaces included.
    ``brief``: ``allowed`` is short and tells something that the help does not, so --help shows it. ``mapping``: the
    value is ``{name: value, ...}``; on the command line braces may be left out and the option given several times,
    which is what a shell makes of ``x={a:1,b:2}`` without quotes.
    """

    group: str
    help: str
    allowed: str
    parse: Callable[[Any], Any]
    null: bool = False
    literal: bool = False
    brief: bool = False
    mapping: bool = False

    def read(self, name: str, value: Any) -> Any:
        """The value of option ``name`` as lema uses it. Raises ConfigError naming key, value and what is allowed."""
        if self.null and (value is None or (isinstance(value, str) and value.lower() in ("null", "none"))):
            return None
        try:
            return self.parse(value)
        except ConfigError as error:
            raise ConfigError(f"{name}: {error}") from None
        except (ValueError, TypeError, OverflowError):
            allowed = f"{self.allowed} or null" if self.null else self.allowed
            raise ConfigError(f"{name}: {_shown(value)} is not allowed; allowed: {allowed}") from None


def _shown(value: Any) -> str:
    text = " ".join(repr(value.value if isinstance(value, Enum) else value).split())
    return text if len(text) <= 80 else f"{text[:77]}..."


def _field(
    default: Any,
    group: str,
    help: str,
    allowed: str,
    parse: Callable[[Any], Any],
    null: bool = False,
    literal: bool = False,
    brief: bool = False,
) -> Any:
    option = Option(group, help, allowed, parse, null or default is None, literal, brief)
    if isinstance(default, list):
        return field(default_factory=lambda: list(default), metadata={"option": option})
    return field(default=default, metadata={"option": option})


def integer(
    default: int | None, group: str, help: str, low: int = 0, high: int | None = None, null: bool = False
) -> Any:
    """A whole number in [low, high]; a float or a string that is one counts (YAML reads 1e3 as a float)."""

    def parse(value: Any) -> int:
        if isinstance(value, bool) or not isinstance(value, (int, float, str)):
            raise ValueError
        number = int(value)
        if isinstance(value, float) and number != value:
            raise ValueError
        if number < low or (high is not None and number > high):
            raise ValueError
        return number

    allowed = f"a whole number from {low}" + (f" to {high}" if high is not None else " up")
    return _field(default, group, help, allowed, parse, null=null)


def number(
    default: float | str | None,
    group: str,
    help: str,
    low: float,
    high: float = math.inf,
    open_low: bool = False,
    null: bool = False,
    word: str = "",
) -> Any:
    """A finite number in [low, high), or (low, high) with ``open_low``; or the single ``word``."""

    def parse(value: Any) -> float | str:
        if word and isinstance(value, str) and value.strip().lower() == word:
            return word
        if isinstance(value, bool) or not isinstance(value, (int, float, str)):
            raise ValueError
        result = float(value)
        if not (low < result if open_low else low <= result) or not result < high:  # also refuses nan
            raise ValueError
        return result

    lowest = f"greater than {low:g}" if open_low else f"from {low:g}"
    highest = f" to below {high:g}" if high < math.inf else ""
    allowed = f"{word} or a number {lowest}{highest}" if word else f"a number {lowest}{highest}"
    return _field(default, group, help, allowed, parse, null=null, brief=high < math.inf)


def flag(default: bool | None, group: str, help: str) -> Any:
    """true or false."""

    def parse(value: Any) -> bool:
        word = str(value).lower()
        if word not in ("true", "false"):
            raise ValueError
        return word == "true"

    return _field(default, group, help, "true or false", parse)


def choice(default: Any, group: str, help: str, values: Iterable[Any]) -> Any:
    """One of ``values`` (strings or enum members), in any case."""
    by_word = {str(value.value if isinstance(value, Enum) else value): value for value in values}
    allowed = " or ".join(by_word) if len(by_word) < 3 else ", ".join(by_word)

    def parse(value: Any) -> Any:
        word = str(value.value if isinstance(value, Enum) else value).lower()
        if word in by_word:
            return by_word[word]
        raise ConfigError(f"{_shown(value)} is not allowed; allowed: {allowed}{did_you_mean(word, by_word)}")

    return _field(default, group, help, allowed, parse, brief=True)


def bits(group: str, help: str, served: tuple[int, ...] = (8,)) -> Any:
    """Null, or the bits of a number in storage that there are codecs for."""
    allowed = " or ".join(map(str, served))

    def parse(value: Any) -> int:
        if isinstance(value, bool) or str(value) not in map(str, served):
            raise ValueError
        return int(value)

    return _field(None, group, help, allowed, parse, brief=True)


def only_null(group: str, help: str, reason: str) -> Any:
    """An option whose only value in this version is null; ``reason`` says what this version does instead."""

    def parse(value: Any) -> None:
        raise ConfigError(f"{_shown(value)} is not allowed; allowed: null; {reason}")

    return _field(None, group, help, "null", parse)


def text(
    default: str | None,
    group: str,
    help: str,
    allowed: str = "text",
    parse: Callable[[str], str] | None = None,
    words: bool = False,
) -> Any:
    """Text or a path. Numbers count as text (``output_dir=2024``); true, false, null only where ``words`` says so."""

    def read(value: Any) -> str:
        if isinstance(value, os.PathLike):
            value = os.fspath(value)
        if not isinstance(value, (str, int, float)) and not (words and value is None):
            raise ValueError
        if isinstance(value, bool) and not words:
            raise ValueError
        return parse(str(value)) if parse else str(value)

    return _field(default, group, help, allowed, read, literal=True)


def path(default: str | None, group: str, help: str) -> Any:
    """A path or a name, not empty."""

    def parse(value: str) -> str:
        if not value.strip():
            raise ValueError
        return value

    return text(default, group, help, "a path or a name that is not empty", parse)


def mapping(group: str, help: str) -> Any:
    """Null, or names with values of JSON's types, copied."""

    def parse(value: Any) -> dict[str, Any]:
        if not isinstance(value, Mapping) or not all(isinstance(name, str) for name in value):
            raise ValueError
        return dict(json.loads(json.dumps(dict(value), allow_nan=False)))

    option = Option(group, help, "a mapping {name: value, ...}", parse, null=True, mapping=True)
    return field(default=None, metadata={"option": option})


def amount(group: str, help: str) -> Any:
    """A budget as :func:`lema_core.budgets.parse_amount` reads it, kept as it was written ("auto" by default)."""

    def parse(value: Any) -> str:
        if not isinstance(value, (str, int, float)) or isinstance(value, bool):
            raise ValueError
        try:
            parse_amount(value, total_bytes=1 << 40)
        except ConfigError as error:
            raise ConfigError(str(error).removeprefix("budget: ")) from None
        return str(value).strip()

    return _field("auto", group, help, ALLOWED_AMOUNTS, parse, literal=True)


def size(group: str, help: str) -> Any:
    """Null, or bytes as a whole number: given as one, or as an amount with a unit."""

    def parse(value: Any) -> int:
        if isinstance(value, bool) or not isinstance(value, (str, int)):
            raise ValueError
        text = str(value).strip()
        try:
            found = parse_amount(f"{text}B" if text.isdecimal() else text, total_bytes=0)
        except ConfigError:
            raise ValueError from None
        if found is None:
            raise ValueError
        return found

    return _field(None, group, help, "bytes from 1 up, or an amount with a unit such as 5GB", parse, literal=True)


def names(
    default: str | list[Any], group: str, help: str, allowed: str, item: Callable[[Any], Any], word: str = ""
) -> Any:
    """A list whose items ``item`` reads, written as a list or with commas; or the single ``word``."""

    def parse(value: Any) -> Any:
        if isinstance(value, str):
            if word and value.strip().lower() == word:
                return word
            value = [
                part.strip(" '\"") for part in re.sub(r"^\[(.*)\]$", r"\1", value.strip()).split(",") if part.strip()
            ]
        if not isinstance(value, (list, tuple)):
            raise ValueError
        if word and not value:
            raise ValueError
        return [item(each) for each in value]

    return _field(default, group, help, allowed, parse, literal=True)
