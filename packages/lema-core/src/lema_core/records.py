"""The frozen records that hooks yield. A record names code as ``"pkg.mod:Name"``; listing records imports none of
it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any


def load_object(path: str) -> Any:
    """Import ``"pkg.mod:Name"`` and return the object. Raises ImportError or AttributeError as Python does."""
    module, _, name = path.partition(":")
    return getattr(import_module(module), name)


@dataclass(frozen=True)
class Architecture:
    """Support for one model architecture.

    ``model_types`` are values of ``model_type`` in a Hugging Face ``config.json``; ``adapter`` names a
    :class:`lema_core.adapter.ModelAdapter` subclass.
    """

    name: str
    model_types: tuple[str, ...]
    adapter: str


@dataclass(frozen=True)
class CheckpointSource:
    """A way to turn what the user named into a local folder in Hugging Face layout.

    ``refuses(ref)`` returns why this source cannot serve ``ref`` or None when it can; it is fast and touches no
    network. ``locate(ref)`` returns the folder, converting or downloading where it must. Sources are asked by falling
    ``priority``.
    """

    name: str
    refuses: Callable[[str], str | None]
    locate: Callable[[str], Path]
    priority: int = 0


@dataclass(frozen=True)
class Kernel:
    """One implementation of an operation on one kind of device (``"*"``: any).

    ``impl`` names the callable; ``unsupported(request)`` returns the reasons it cannot serve, empty when it can.
    The usable kernel of highest ``priority`` is chosen. ``variant()``, where there are several, names what this machine
    gets of it, such as "avx512"; it is asked after ``unsupported`` returned nothing.
    """

    name: str
    op: str
    device_type: str
    impl: str
    priority: int
    unsupported: Callable[[Any], list[str]]
    variant: Callable[[], str] | None = None


@dataclass(frozen=True)
class TrainingMethod:
    """A way of training: ``method`` names a :class:`lema_core.training.TrainingMethodClass`."""

    name: str
    method: str


@dataclass(frozen=True)
class StateCodec:
    """A way to keep optimizer states and gradients in fewer bits.

    ``bits`` is what users write as ``opt_state_bits`` and ``grad_acc_bits``; ``codec`` names a class like
    :class:`lema_core.store.codec.StateCodecClass`.
    """

    name: str
    bits: int
    codec: str


@dataclass(frozen=True)
class QuantBackend:
    """One wire format that a backend encodes weights in; a backend that has several yields a record for each.

    ``name`` is what users write as ``quant_backend``, ``format`` what they write as ``weights_format``, ``bits``
    (``weights_bits``) the format's. ``codec`` names what makes a :class:`lema_core.quantization.codec.WeightCodec`
    without arguments: a class, as a rule; it is imported when a weight is encoded, or one of a format that only this
    backend knows is read. ``unavailable(device_type)`` gives the reason why it cannot serve here, with what to do, or
    None; it is asked when somebody wants to quantize, so it may import a library to see whether that works.
    ``quant_backend=auto`` takes the first available one by falling ``priority``; the backend ``custom`` has 0. Of
    several formats with the same bits, the one yielded first is the backend's default.
    """

    name: str
    bits: int
    format: str
    codec: str
    priority: int = 0
    unavailable: Callable[[str], str | None] = lambda device_type: None

    def __str__(self) -> str:
        return f"{self.name} ({self.format})"
