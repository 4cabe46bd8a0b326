"""Reads ``config.json``: what is missing, mistyped or contradicts itself is one line that names the fields."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any

from lema_core.errors import ConfigError


class HfConfig(dict[str, Any]):
    """A parsed ``config.json`` with typed reads. A field that is missing or null has the default; without a default
    that is a ConfigError, as is a value of the wrong type."""

    def require(self, *names: str) -> None:
        """Raises one ConfigError that names all missing fields."""
        missing = [name for name in names if self.get(name) is None]
        if missing:
            raise ConfigError(f"config.json lacks {', '.join(missing)}")

    def size(self, name: str, default: int | None = None) -> int:
        """A whole number above 0."""
        size = self.optional_size(name) or default
        if size is None:
            raise ConfigError(f"config.json lacks {name}")
        return size

    def optional_size(self, name: str, default: int | None = None) -> int | None:
        """A whole number above 0, or None. Here null is None whatever the default, which only a missing field has."""
        value = self.get(name, default)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
            raise ConfigError(f"config.json: {name}={value!r}; a whole number above 0 expected")
        return value

    def count(self, name: str, default: int) -> int:
        """A whole number, 0 or more."""
        value = default if self.get(name) is None else self[name]
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise ConfigError(f"config.json: {name}={value!r}; a whole number expected, 0 or more")
        return value

    def token_id(self, name: str, vocab_size: int, default: int | None = None) -> int | None:
        """An id of the vocabulary, negative ones counted from its end; None for null and for ids beyond it. Here null
        is None whatever the default, which only a missing field has."""
        value = self.get(name, default)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int):
            raise ConfigError(f"config.json: {name}={value!r}; a token id expected")
        row = value + vocab_size if value < 0 else value
        return row if 0 <= row < vocab_size else None

    def layer_types(self, n_layers: int, *kinds: str) -> tuple[str, ...] | None:
        """``layer_types``, one of ``kinds`` for each layer; None where config.json leaves them out."""
        found = self.get("layer_types")
        if found is None:
            return None
        wrong = sorted(set(found) - set(kinds))
        if len(found) != n_layers or wrong:
            known = " or ".join(map(repr, kinds))
            what = ", ".join(map(repr, wrong)) or f"{len(found)} entries"
            raise ConfigError(f"config.json: layer_types: {n_layers} times {known} expected, {what} found")
        return tuple(found)

    def number(self, name: str, default: float) -> float:
        value = default if self.get(name) is None else self[name]
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise ConfigError(f"config.json: {name}={value!r}; a number expected")
        return float(value)

    def flag(self, name: str, default: bool = False) -> bool:
        value = default if self.get(name) is None else self[name]
        if not isinstance(value, bool):
            raise ConfigError(f"config.json: {name}={value!r}; true or false expected")
        return value

    def expect(self, name: str, *allowed: Any) -> Any:
        """The value of a field that may be missing or one of ``allowed``, of which the first is the default."""
        value = allowed[0] if self.get(name) is None else self[name]
        if value not in allowed:
            known = " or ".join(map(repr, allowed))
            raise ConfigError(f"config.json: {name}={value!r} is not this architecture's; {known} expected")
        return value

    def not_applied(self, *names: str) -> None:
        """Warn of fields that ask for something this version leaves out, such as ``attention_dropout``."""
        for name in names:
            if self.get(name):
                warnings.warn(f"config.json: {name}={self[name]} is not applied", stacklevel=3)


@dataclass(frozen=True)
class Heads:
    """``n`` query heads share ``n_kv`` key/value heads of ``dim`` features each."""

    n: int
    n_kv: int
    dim: int

    @classmethod
    def from_hf_config(cls, hf: HfConfig, default_n_kv: int | None = None, default_dim: int | None = None) -> Heads:
        """A missing ``num_key_value_heads`` is ``default_n_kv``, null one as many as there are query heads; no
        ``head_dim`` is ``default_dim``, else the hidden size shared out.

        Raises ConfigError for numbers that contradict each other.
        """
        hidden, n = hf.size("hidden_size"), hf.size("num_attention_heads")
        n_kv = hf.optional_size("num_key_value_heads", default_n_kv) or n
        if n % n_kv:
            raise ConfigError(f"config.json: num_attention_heads={n} is not a multiple of num_key_value_heads={n_kv}")
        dim = hf.optional_size("head_dim") or default_dim
        if dim is None and hidden % n:
            raise ConfigError(
                f"config.json: hidden_size={hidden} is not a multiple of num_attention_heads={n}, "
                "and no head_dim is given"
            )
        dim = dim or hidden // n
        if dim % 2:
            raise ConfigError(f"config.json: head_dim={dim} is odd; rotary embeddings turn pairs")
        return cls(n, n_kv, dim)
