"""Near matches for mistyped names."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """``"; did you mean 'x'?"`` when a known name is close to ``name``, else ``""``; to be appended to an error line.

    Case, and ``-`` against ``_``, do not count as differences.
    """
    spellings = {_fold(each): each for each in sorted(known, reverse=True)}
    close = get_close_matches(_fold(name), spellings, n=1, cutoff=0.6)
    return f"; did you mean {spellings[close[0]]!r}?" if close else ""


def unknown_name(what: str, name: str, known: Iterable[str]) -> str:
    """One line for a name that does not exist: what exists, and the near match."""
    names = sorted(set(known))
    return f"unknown {what} {name!r}; known: {', '.join(names) or 'none'}{did_you_mean(name, names)}"


def _fold(name: str) -> str:
    return name.lower().replace("-", "_")
