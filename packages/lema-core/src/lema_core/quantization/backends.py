"""The codecs of one run: who encodes a weight of a given shape, with what takes over where a backend cannot."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

from torch import Tensor

from lema_core.errors import ConfigError, LemaError, in_one_line
from lema_core.quantization.choice import AUTO, QuantChoice
from lema_core.quantization.codec import WeightCodec
from lema_core.records import QuantBackend, load_object

if TYPE_CHECKING:
    from lema_core.plugins import PluginManager

_log = logging.getLogger(__name__)


class WeightQuantizer:
    """Codecs of the backend that a user asked for. What a backend cannot do is said once, with its reason, and done by
    the next one: never by leaving a weight as it is.

    ``name``: a backend's, or ``"auto"``; ``device_type``: where the run computes; ``warn`` is told each line.
    """

    def __init__(
        self,
        plugins: PluginManager,
        name: str = AUTO,
        device_type: str = "cpu",
        warn: Callable[[str], object] = _log.warning,
    ) -> None:
        self._plugins = plugins
        self._name = name
        self._device_type = device_type
        self._warn = warn
        self._said: set[object] = set()
        self._lock = threading.Lock()
        self._choices: dict[tuple[int | None, str | None], QuantChoice] = {}
        self._codecs: dict[QuantBackend, WeightCodec | None] = {}

    def choice(self, bits: int | None = None, format: str | None = None) -> QuantChoice:
        """Who encodes to so many bits, or into a format; asked once each. Raises ConfigError and PluginError as
        :meth:`lema_core.plugins.PluginManager.choose_quant_backend` does."""
        key = bits, format
        if key not in self._choices:
            choice = self._plugins.choose_quant_backend(self._name, bits, format, self._device_type)
            if choice.missed is not None:
                self._say(choice.missed, choice.missed)
            self._choices[key] = choice
        return self._choices[key]

    def codec(self, shape: tuple[int, ...], bits: int | None = None, format: str | None = None) -> ChosenCodec:
        """For a weight of this shape. Raises ConfigError with every reason where nobody can encode it."""
        choice = self.choice(bits, format)
        able: list[tuple[QuantBackend, WeightCodec]] = []
        reasons: dict[QuantBackend, str] = {}
        for record in choice.backends:
            codec = self._loaded(record)
            if codec is None or (able and codec.format.name != able[0][1].format.name):
                continue
            if (reason := codec.refuses(shape)) is not None:
                reasons[record] = reason
            else:
                able.append((record, codec))
        if not able:
            listed = "; ".join(f"{record}: {reason}" for record, reason in reasons.items())
            raise ConfigError(f"a weight of {list(shape)} cannot be quantized: {listed}")
        if choice.backend in reasons:
            self._say(
                (choice.backend, "refuses"),
                f"{choice.backend} does not take a weight of {list(shape)}: {reasons[choice.backend]}; "
                f"{able[0][0]} takes such ones",
            )
        return ChosenCodec(able, self._say)

    def _loaded(self, record: QuantBackend) -> WeightCodec | None:
        """None where it cannot be imported."""
        if record not in self._codecs:
            try:
                self._codecs[record] = load_object(record.codec)()
            except Exception as error:
                self._codecs[record] = None
                self._say(record, f"{record} cannot be loaded: {in_one_line(error)}")
        return self._codecs[record]

    def _say(self, key: object, line: str) -> None:
        with self._lock:  # blocks are encoded by several threads
            if key in self._said:
                return
            self._said.add(key)
        self._warn(line)


class ChosenCodec(WeightCodec):
    """A backend's codec, and those that give the same format where it fails: then a line says how, and they encode.
    ``backend`` is the name of the first."""

    def __init__(self, codecs: list[tuple[QuantBackend, WeightCodec]], say: Callable[[object, str], None]) -> None:
        self._codecs = codecs
        self._say = say
        record, codec = codecs[0]
        self.backend = record.name
        self.format = codec.format
        self.version = f"{record.name} {codec.version}"

    def encode(self, weight_rK: Tensor, parts: tuple[Tensor, ...]) -> None:
        for (record, codec), (next_record, _) in zip(self._codecs, self._codecs[1:], strict=False):
            try:
                return codec.encode(weight_rK, parts)
            except LemaError:  # it says what is wrong with the weight; another codec would find the same
                raise
            except Exception as error:
                self._say(
                    (record, "fails"),
                    f"{record} fails on {list(weight_rK.shape)} {weight_rK.dtype}: {in_one_line(error)}; "
                    f"{next_record} takes its place",
                )
        return self._codecs[-1][1].encode(weight_rK, parts)
