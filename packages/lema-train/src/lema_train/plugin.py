"""The training methods of this package."""

from __future__ import annotations

from collections.abc import Iterable

from lema_core.hookspecs import hookimpl
from lema_core.records import TrainingMethod


@hookimpl
def lema_training_methods() -> Iterable[TrainingMethod]:
    yield TrainingMethod("lora", method="lema_train.method:LoraMethod")
    yield TrainingMethod("selective_full", method="lema_train.full:FullTraining")
