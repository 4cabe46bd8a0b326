"""The architectures of this package."""

from __future__ import annotations

from collections.abc import Iterable

from lema_core.hookspecs import hookimpl
from lema_core.records import Architecture


@hookimpl
def lema_architectures() -> Iterable[Architecture]:
    yield Architecture("llama", model_types=("llama",), adapter="lema_models.llama:LlamaAdapter")
