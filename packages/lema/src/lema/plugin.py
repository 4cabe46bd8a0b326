"""What lema itself brings to the command line: its YAML tree."""

from __future__ import annotations

from collections.abc import Iterable

from lema_core.hookspecs import hookimpl


@hookimpl
def lema_config_packages() -> Iterable[str]:
    yield "lema.conf"
