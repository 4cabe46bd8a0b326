"""Figures that were measured once, kept between runs with all that they depend on."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from lema_core.cache import cache_folder
from lema_core.files import replacing

#: rises when figures are taken in another way
_FORMAT = 4

T = TypeVar("T")


class Kept(NamedTuple):
    """``measured``: when, ISO 8601. ``file``: None where it could not be written."""

    measured: str
    file: Path | None


def measured_once(
    key: Mapping[str, str],
    read: Callable[[Any], T],
    measure: Callable[[], T],
    write: Callable[[T], Any],
    say: Callable[[str], None],
    refresh: bool = False,
) -> tuple[T, Kept]:
    """What is kept under ``key``, or what ``measure`` gives now.

    ``write`` makes JSON of it; ``read`` undoes that, and raises KeyError, TypeError or ValueError for what it cannot
    be. ``refresh`` measures again. ``say`` hears why a file was not used, or could not be written.
    """
    name = hashlib.blake2b(json.dumps(key, sort_keys=True).encode(), digest_size=8).hexdigest()
    file = cache_folder("flight") / f"{name}.json"
    if not refresh:
        try:
            found = json.loads(file.read_text(encoding="utf-8"))
            if found["format"] == _FORMAT:
                if found["key"] != key:
                    raise ValueError("it describes another machine")
                return read(found["figures"]), Kept(str(found["measured"]), file)
            say(f"flight check: {file} is of another version of lema; measuring again")
        except FileNotFoundError:
            pass
        except (OSError, ValueError, KeyError, TypeError) as error:
            reason = " ".join(str(error).split())
            say(f"flight check: {file} cannot be used ({type(error).__name__}: {reason}); measuring again")
    figures = measure()
    measured = datetime.now().astimezone().isoformat(timespec="seconds")
    text = json.dumps({"format": _FORMAT, "measured": measured, "key": key, "figures": write(figures)}, indent=2)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with replacing(file) as partial:
            partial.write_text(text + "\n", encoding="utf-8")
    except OSError as error:
        say(f"flight check: {file}: not kept: {error.strerror or error}; LEMA_CACHE says where it goes")
        return figures, Kept(measured, None)
    return figures, Kept(measured, file)
