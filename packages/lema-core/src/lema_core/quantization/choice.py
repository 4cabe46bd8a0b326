"""Which backend quantizes, and which takes its place where it cannot."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from lema_core.errors import ConfigError, PluginError, in_one_line
from lema_core.records import QuantBackend
from lema_core.suggest import unknown_name

AUTO = "auto"
#: the backend that needs no library, so that it can take the place of any other
FALLBACK = "custom"


@dataclass(frozen=True)
class QuantChoice:
    """The answer to "who quantizes to so many bits, or into this format?".

    ``backends``: in the order of use. The first one's format is what weights get; the next ones take over where it
    refuses a weight's shape or fails. ``sentences``: one for each candidate, why it was taken or not. ``missed``: why
    the backend that was asked for by name is not used and which one is; None when it is.
    """

    backends: tuple[QuantBackend, ...]
    sentences: tuple[str, ...]
    missed: str | None

    @property
    def backend(self) -> QuantBackend:
        return self.backends[0]

    def __str__(self) -> str:
        return "; ".join(self.sentences)


def choose(
    records: Sequence[QuantBackend],
    name: str,
    bits: int | None,
    format: str | None,
    device_type: str,
    answer: Callable[[int, tuple[str, ...]], str | None] | None,
    left_out: str = "",
) -> QuantChoice:
    """See :meth:`lema_core.plugins.PluginManager.choose_quant_backend`. ``records``: in the order of preference;
    ``answer``: asked with bits and the names that can serve, when the user leaves the choice open; None: nobody is;
    ``left_out``: what errors say about plugins that are not there."""
    wanted = _what(bits, format)
    if name != AUTO and name not in {each.name for each in records}:
        known = [AUTO, *(each.name for each in records)]
        raise ConfigError(f"{unknown_name('quant_backend', name, known)}{left_out}")
    serving = _defaults([each for each in records if bits in (None, each.bits) and format in (None, each.format)])
    if not serving:
        raise ConfigError(f"no backend quantizes to {wanted}; installed: {_listed(records)}{left_out}")
    named = [each for each in serving.values() if name in (AUTO, each.name)]
    sentences, usable = [], []
    for record in named:
        if (reason := why_unavailable(record, device_type)) is not None:
            sentences.append(f"{record.name}: {reason}")
        else:
            usable.append(record)
            if answer is None:
                break
    if not named:
        others = [each for each in records if each.name == name and why_unavailable(each, device_type) is None]
        sentences.append(f"{name}: has no {wanted}" + (f", only {_listed(others)}" if others else ""))
    if len(usable) > 1 and answer is not None:
        usable = [_picked(answer, usable)]
    meant = next(iter([*usable[:1], *named, *serving.values()]))
    places = [*usable[:1], *_stand_ins(records, meant, device_type)]
    backends = tuple(dict.fromkeys(places))
    if not backends:
        raise PluginError(f"no backend can quantize to {wanted}: {'; '.join(sentences)}{left_out}")
    missed = None
    if name not in (AUTO, backends[0].name):
        missed = f"quant_backend={name}: {sentences[0].partition(': ')[2]}; {backends[0]} takes its place"
    return QuantChoice(backends, (*sentences, f"{backends[0]}: chosen"), missed)


def _defaults(records: Sequence[QuantBackend]) -> dict[str, QuantBackend]:
    """The first record of each backend, in order."""
    found: dict[str, QuantBackend] = {}
    for record in records:
        found.setdefault(record.name, record)
    return found


def _stand_ins(records: Sequence[QuantBackend], meant: QuantBackend, device_type: str) -> list[QuantBackend]:
    """Records of FALLBACK: that of the format which weights were to get, and its default for as many bits, which takes
    shapes that the format refuses."""
    own = [each for each in records if each.name == FALLBACK and why_unavailable(each, device_type) is None]
    return [
        *(each for each in own if each.format == meant.format),
        *[each for each in own if each.bits == meant.bits][:1],
    ]


def _picked(answer: Callable[[int, tuple[str, ...]], str | None], usable: list[QuantBackend]) -> QuantBackend:
    names = {each.name: each for each in usable}
    picked = answer(usable[0].bits, tuple(names))
    if picked is not None and picked not in names:
        raise PluginError(f"lema_choose_quant_backend: {unknown_name('quant_backend', str(picked), names)}")
    return usable[0] if picked is None else names[picked]


def _what(bits: int | None, format: str | None) -> str:
    if bits is None and format is None:
        raise ValueError("give bits or a format")
    return format if bits is None else f"{bits} bits" if format is None else f"{format} of {bits} bits"


def why_unavailable(record: QuantBackend, device_type: str) -> str | None:
    """Why it cannot serve here; None when it can. What a plugin raises instead of saying so is a reason too."""
    try:
        return record.unavailable(device_type)
    except Exception as error:
        return in_one_line(error)


def _listed(records: Sequence[QuantBackend]) -> str:
    if not records:
        return "none; packages/lema-quant brings some"
    by_bits: dict[int, list[str]] = {}
    for record in records:
        by_bits.setdefault(record.bits, []).append(str(record))
    return "; ".join(f"{bits} bits: {', '.join(names)}" for bits, names in sorted(by_bits.items(), reverse=True))
