"""What the options of quantized weights may be, and which mean something together."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lema_core.errors import ConfigError
from lema_core.suggest import did_you_mean

if TYPE_CHECKING:
    from lema.config import LemaConfig

#: lema's own backends and wire formats, with the bits of these; plugins, which take a moment to load, bring more
_BACKENDS = ("custom", "torchao", "quanto", "bitsandbytes")
_FORMATS = {"int8": 8, "int4-32": 4, "int4-64": 4, "int4-128": 4, "nf4": 4}


def read_quant_backend(value: str) -> str:
    """A backend's name, in any case, or auto. Raises ConfigError listing those that exist for another."""
    name = value.lower()
    if name in ("auto", *_BACKENDS):
        return name
    from lema_core.plugins import get_plugin_manager

    known = {each.name.lower(): each.name for each in get_plugin_manager().quant_backends()}
    if name not in known:
        existing = ["auto", *dict.fromkeys([*_BACKENDS, *known.values()])]
        near = did_you_mean(value, existing)
        raise ConfigError(f"{value!r} is not allowed; what exists: {', '.join(existing)}{near}")
    return known[name]


def read_weights_format(value: str) -> str:
    """A wire format's name, in any case. Raises ConfigError listing those that exist for another."""
    format_bits(value.lower())
    return value.lower()


def format_bits(name: str) -> int:
    """Bits of a code of a wire format. Raises ConfigError for a name that does not exist."""
    if name in _FORMATS:
        return _FORMATS[name]
    from lema_core.plugins import get_plugin_manager

    known = _FORMATS | {each.format: each.bits for each in get_plugin_manager().quant_backends()}
    if name not in known:
        raise ConfigError(f"{name!r} is not allowed; what exists: {', '.join(known)}{did_you_mean(name, known)}")
    return known[name]


def read_pattern(value: Any) -> str:
    """A part of a tensor's name, or a shell pattern. Raises ValueError for what is no text."""
    if not isinstance(value, str) or not value.strip():
        raise ValueError
    return value.strip()


def check_quantization(config: LemaConfig) -> None:
    """Raises ConfigError for options that mean nothing together."""
    bits, format = config.weights_bits, config.weights_format
    if bits is None:
        for name, nothing in (("weights_format", None), ("quant_backend", "auto"), ("quant_exclude", [])):
            if getattr(config, name) != nothing:
                raise ConfigError(
                    f"{name}: {getattr(config, name)!r} is for weights that are to be quantized, and weights_bits is "
                    "null; give weights_bits=8 or 4, or leave it out"
                )
    elif format is not None and format_bits(format) != bits:
        raise ConfigError(
            f"weights_format: {format!r} has {format_bits(format)} bits, and weights_bits is {bits}; make them agree, "
            "or leave weights_format out"
        )
    if config.weights_compute == "w8a8" and bits != 8:
        given = "null" if bits is None else bits
        raise ConfigError(
            f"weights_compute: 'w8a8' is for weights_bits=8, and weights_bits is {given}; it rounds activations, so it "
            "is never taken without"
        )
