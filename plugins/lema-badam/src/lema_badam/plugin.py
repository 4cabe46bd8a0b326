"""What lema finds through the entry point ``badam``."""

from __future__ import annotations

from collections.abc import Iterable

from lema_core.hookspecs import hookimpl
from lema_core.records import TrainingMethod


@hookimpl
def lema_training_methods() -> Iterable[TrainingMethod]:
    """The method is imported when a run asks for ``training_mode=badam``, not before."""
    yield TrainingMethod("badam", method="lema_badam.method:BlockTraining")
