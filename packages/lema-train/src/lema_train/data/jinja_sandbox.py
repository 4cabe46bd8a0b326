"""Jinja as chat templates are rendered with: sandboxed, with transformers' additions; see ``chat_template``."""

from __future__ import annotations

import json
from datetime import datetime
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
from jinja2.sandbox import ImmutableSandboxedEnvironment


def sandbox(generation_marks: tuple[str, str] | None) -> jinja2.Environment:
    """An environment for one template; ``has_generation`` of it is set once a ``{% generation %}`` block was compiled.

    ``generation_marks``: texts written before and after the body of each such block.
    """
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, jinja2.ext.loopcontrols]
    )
    environment.generation_marks = generation_marks  # type: ignore[attr-defined]
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


class _GenerationBlock(jinja2.ext.Extension):
    """``{% generation %}`` renders its body in a scope of its own, between marks if the environment asks for them."""

    tags = {"generation"}

    def __init__(self, environment: jinja2.Environment) -> None:
        super().__init__(environment)
        environment.extend(generation_marks=None, has_generation=False)

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        lineno = next(parser.stream).lineno
        self.environment.has_generation = True  # type: ignore[attr-defined]
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        marks = self.environment.generation_marks  # type: ignore[attr-defined]
        if marks is not None:
            body = [_literal(marks[0]), *body, _literal(marks[1])]
        return [jinja2.nodes.Scope(body).set_lineno(lineno)]


def _literal(text: str) -> jinja2.nodes.Output:
    return jinja2.nodes.Output([jinja2.nodes.TemplateData(text)])


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own filter escapes HTML; a prompt wants the characters themselves."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
