"""Findings by section: tables on a terminal, plain lines when piped."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TextIO


@dataclass(frozen=True)
class Row:
    """One finding. ``serves``: True or False for something that could serve here, None for a plain fact."""

    name: str
    detail: str
    serves: bool | None = None


def print_sections(sections: Mapping[str, Sequence[Row]], out: TextIO) -> None:
    """Write the rows of every section under its title."""
    if out.isatty():
        _print_tables(sections, out)
        return
    width = max((len(row.name) for rows in sections.values() for row in rows), default=0)
    for title, rows in sections.items():
        print(f"{title}:", file=out)
        for row in rows:
            print(f"  {row.name:<{width}} {_verdict(row):<4}{row.detail}".rstrip(), file=out)
        print(file=out)


def _print_tables(sections: Mapping[str, Sequence[Row]], out: TextIO) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(file=out)
    for title, rows in sections.items():
        table = Table(title=title, title_justify="left", show_header=False, box=None, pad_edge=False)
        for row in rows:
            style = {True: "green", False: "yellow", None: ""}[row.serves]
            table.add_row(Text(f"  {row.name}"), Text(_verdict(row), style=style), Text(row.detail))
        console.print(table, "")


def _verdict(row: Row) -> str:
    return {True: "yes", False: "no", None: ""}[row.serves]
