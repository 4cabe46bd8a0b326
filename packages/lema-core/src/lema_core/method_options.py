"""Options of a training method that a plugin brings: what users write as ``method_options={name: value}``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, fields
from typing import TypeVar

from lema_core.errors import ConfigError
from lema_core.suggest import did_you_mean

OPTION = "method_options"
_WORDS = {bool: "true or false", int: "a whole number", float: "a number", str: "text"}

T = TypeVar("T")


def read_options(into: type[T], given: Mapping[str, object] | None) -> T:
    """An object of the dataclass ``into``, each of whose fields has a default: a bool, int, float or str.

    ``given``: values by field. One must be of its default's type; whole numbers may be spelled as floats, as YAML reads
    1e3. Raises ConfigError that names the key, for a name that is no field's with a near match. What ``__post_init__``
    raises as ConfigError is said to be of ``method_options`` too.
    """
    defaults = {each.name: each.default for each in fields(into)}
    if missing := [name for name, value in defaults.items() if value is MISSING]:
        raise TypeError(f"{into.__name__}: a default expected for {', '.join(missing)}")
    values: dict[str, object] = {}
    for name, value in (given or {}).items():
        if name not in defaults:
            hint = did_you_mean(name, defaults)
            raise ConfigError(f"{OPTION}: unknown option {name!r}{hint} (there are: {', '.join(defaults) or 'none'})")
        values[name] = _read(name, value, type(defaults[name]))
    try:
        return into(**values)
    except ConfigError as error:
        raise ConfigError(f"{OPTION}: {error}") from None


def _read(name: str, value: object, kind: type) -> object:
    if kind is int and isinstance(value, float) and value.is_integer():
        return int(value)
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if type(value) is not kind:
        raise ConfigError(f"{OPTION}: {name}: {_WORDS[kind]} expected, {value!r} found")
    return value
