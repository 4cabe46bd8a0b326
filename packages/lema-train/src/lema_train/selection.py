"""Which linear layers train: target names and layer limits, as PEFT means them.

A target is a full module path (``model.layers.3.self_attn.q_proj``) or the end of one at a dot (``q_proj``,
``self_attn.q_proj``, never the ``q_proj`` of ``xq_proj``). ``all-linear`` is every linear layer except the output
head; a layer's experts go by the names of their stacks, ``gate_up_proj`` and ``down_proj``.

Layer limits follow PEFT's ``layers_to_transform``: they apply to modules inside blocks. A module outside every block
(``lm_head``) is selected when a target is its full path, whatever the limits. Unlike PEFT, a full path inside a block
obeys the limits too, and what ends up selecting nothing is an error.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from lema_core.adapter import ModelAdapter, TensorSpec
from lema_core.checkpoint.describe import describe_layers, shorten
from lema_core.errors import ConfigError
from lema_core.suggest import did_you_mean

ALL_LINEAR = "all-linear"


@dataclass(frozen=True)
class Selection:
    """The modules that train, in forward order.

    ``counts`` is the number of modules per target entry, in the order asked; an entry may share modules with another.
    ``layers`` are the block numbers of the layer limits, ascending; None without limits.
    """

    modules: tuple[TensorSpec, ...]
    counts: dict[str, int]
    layers: tuple[int, ...] | None

    def describe(self) -> str:
        """One line for the log: modules per target, their sum, the layers."""
        counts = ", ".join(f"{entry}: {count}" for entry, count in self.counts.items())
        where = describe_layers(spec.layer for spec in self.modules)
        return f"{len(self.modules)} modules train in {where} ({counts})"


def matches(target: str, module: str) -> bool:
    """Whether ``target`` is ``module``'s full path or its end at a dot."""
    return module == target or module.endswith(f".{target}")


def select_modules(
    adapter: ModelAdapter,
    targets: str | Sequence[str],
    layers: str | int | Sequence[str | int] | None = None,
    *,
    targets_option: str = "lora_target_modules",
    layers_option: str = "trainable_layers",
) -> Selection:
    """The linear layers of ``adapter`` that ``targets`` name within ``layers`` (None or empty: no limit).

    ``targets``: names, or ``"all-linear"`` alone or among them. ``layers``: see :func:`parse_layers`. Raises
    ConfigError, naming the option and the entry, for an entry that matches nothing at all, or nothing within the
    limits.
    """
    entries = [targets] if isinstance(targets, str) else list(targets)
    if not entries:
        raise ConfigError(f"{targets_option}: at least one module name or {ALL_LINEAR!r} expected, none found")
    limits = parse_layers(layers, adapter.n_layers, option=layers_option)
    linears = list(adapter.linear_modules())
    chosen: set[str] = set()
    counts: dict[str, int] = {}
    for entry in entries:
        everywhere = list(adapter.all_linear()) if entry.lower() == ALL_LINEAR else _matching(entry, linears)
        if not everywhere:
            raise ConfigError(_no_match(entry, linears, targets_option))
        within = [spec.module for spec in everywhere if _within(spec, entry, limits)]
        if not within:
            raise ConfigError(
                f"{targets_option}: {entry!r} matches no module within {layers_option}, "
                f"{describe_layers(limits or ())} (only {shorten(spec.module for spec in everywhere)}): "
                f"widen {layers_option} or leave the name out"
            )
        counts[entry] = len(within)
        chosen.update(within)
    return Selection(tuple(spec for spec in linears if spec.module in chosen), counts, limits)


def parse_layers(
    layers: str | int | Sequence[str | int] | None, n_layers: int, *, option: str = "trainable_layers"
) -> tuple[int, ...] | None:
    """Block numbers, ascending, from ``"last:K"``, ``"first:K"`` and numbers; None when there is no limit.

    Raises ConfigError for K outside 1..n_layers, a number outside 0..n_layers-1, or anything else.
    """
    if layers is None:
        return None
    entries = [layers] if isinstance(layers, (str, int)) else list(layers)
    if not entries:
        return None
    numbers: set[int] = set()
    for entry in entries:
        match = re.fullmatch(r"(?:(last|first):)?(\d+)", str(entry).strip().lower())
        if match is None:
            raise ConfigError(f"{option}: 'last:K', 'first:K' or a layer's number expected, {entry!r} found")
        which, number = match[1], int(match[2])
        if which is None:
            if number >= n_layers:
                raise ConfigError(f"{option}: a layer from 0 to {n_layers - 1} expected, {entry!r} found")
            numbers.add(number)
        else:
            if not 1 <= number <= n_layers:
                raise ConfigError(f"{option}: {which}:1 to {which}:{n_layers} expected, {entry!r} found")
            numbers.update(range(number) if which == "first" else range(n_layers - number, n_layers))
    return tuple(sorted(numbers))


def _matching(entry: str, linears: Iterable[TensorSpec]) -> list[TensorSpec]:
    """Experts' linears go by the name of their stack (``experts.down_proj``), all of a layer together."""
    return [spec for spec in linears if matches(entry, spec.module if spec.expert is None else spec.stack)]


def _within(spec: TensorSpec, entry: str, limits: tuple[int, ...] | None) -> bool:
    if limits is None:
        return True
    return entry == spec.module if spec.layer is None else spec.layer in limits


def _no_match(entry: str, linears: Sequence[TensorSpec], option: str) -> str:
    modules = [spec.module if spec.expert is None else spec.stack for spec in linears]
    leaves = list(dict.fromkeys(module.rpartition(".")[2] for module in modules))
    ends = {module.split(".", start)[-1] for module in modules for start in range(module.count(".") + 1)}
    return (
        f"{option}: {entry!r} matches no linear layer of this model{did_you_mean(entry, ends)} "
        f"(there are: {', '.join([*leaves, ALL_LINEAR])})"
    )
