"""What lema finds through the entry point ``qwen``."""

from __future__ import annotations

from collections.abc import Iterable

from lema_core.hookspecs import hookimpl
from lema_core.records import Architecture


@hookimpl
def lema_architectures() -> Iterable[Architecture]:
    """An adapter is imported when a model of its kind is opened, not before."""
    yield Architecture("qwen2", model_types=("qwen2",), adapter="lema_qwen.qwen2:Qwen2Adapter")
    yield Architecture("qwen3", model_types=("qwen3",), adapter="lema_qwen.qwen3:Qwen3Adapter")


@hookimpl
def lema_config_packages() -> Iterable[str]:
    """The files behind ``+model=``."""
    yield "lema_qwen.conf"
