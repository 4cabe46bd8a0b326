"""What lema itself brings: its YAML tree for the command line, and models by their name on the Hub."""

from __future__ import annotations

from collections.abc import Iterable

from lema.hub import HUB_SOURCE
from lema_core.hookspecs import hookimpl
from lema_core.records import CheckpointSource


@hookimpl
def lema_config_packages() -> Iterable[str]:
    yield "lema.conf"


@hookimpl
def lema_checkpoint_sources() -> Iterable[CheckpointSource]:
    """``org/name``, ``org/name@revision``: asked last, so that whatever is here wins."""
    yield HUB_SOURCE
