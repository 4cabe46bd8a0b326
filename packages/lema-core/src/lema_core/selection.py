"""What trains: linear layers that get LoRA, as PEFT means it, or tensors of the model itself.

:func:`select_modules`, for LoRA: a target is a full module path (``model.layers.3.self_attn.q_proj``) or the end of one
at a dot (``q_proj``, ``self_attn.q_proj``, never the ``q_proj`` of ``xq_proj``). ``all-linear`` is every linear layer
except the output head; a layer's experts go by the names of their stacks, ``gate_up_proj`` and ``down_proj``. Layer
limits follow PEFT's ``layers_to_transform``: they apply to modules inside blocks. A module outside every block
(``lm_head``) is selected when a target is its full path, whatever the limits. Unlike PEFT, a full path inside a block
obeys the limits too, and what ends up selecting nothing is an error.

:func:`select_tensors`, for the model's own weights: names work in the same way, but name containers (``self_attn``)
and single tensors (``c_attn.bias``) too, and whatever lies below.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from lema_core.adapter import ModelAdapter, TensorSpec
from lema_core.checkpoint.describe import describe_layers, shorten
from lema_core.errors import ConfigError
from lema_core.suggest import did_you_mean

ALL_LINEAR = "all-linear"
#: places outside the blocks that ``trainable_layers`` can name
EMB, HEAD = "emb", "head"
#: the role of tensors that no gradient changes
BUFFER = "buffer"
#: what transformers stacks of all experts, and under which name
_STACKED = {"gate_proj": "gate_up_proj", "up_proj": "gate_up_proj"}


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


@dataclass(frozen=True)
class EntryCount:
    """How much one entry selects; ``parameters`` is the number of trained numbers."""

    modules: int
    tensors: int
    parameters: int

    def __str__(self) -> str:
        return (
            f"{_number(self.modules, 'module')}, {_number(self.tensors, 'tensor')}, "
            f"{_number(self.parameters, 'parameter')}"
        )


@dataclass(frozen=True)
class TensorSelection:
    """The tensors that train, in forward order, each once.

    ``counts`` has what each entry selects, in the order asked; two entries may share tensors. It is empty for the whole
    model. ``tied`` are heads that share a tensor of the selection, which gets the sum of both gradients.
    """

    tensors: tuple[TensorSpec, ...]
    counts: dict[str, EntryCount]
    tied: tuple[TensorSpec, ...] = ()

    @property
    def num_parameters(self) -> int:
        return sum(math.prod(spec.shape) for spec in self.tensors)

    def describe(self) -> str:
        """One line for the log: what trains in all and where, per entry, and what is tied."""
        amount = f"{_number(self.num_parameters, 'parameter')} in {_number(len(self.tensors), 'tensor')}"
        if self.counts:
            where = describe_layers(spec.layer for spec in self.tensors)
            counts = "; ".join(f"{entry}: {count}" for entry, count in self.counts.items())
            said = f"{amount} train in {where} ({counts})"
        else:
            said = f"the whole model trains: {amount}"
        return said + "".join(
            f"; {spec.name} is tied to {spec.tied_to}: they are one tensor, which trains with the sum of both gradients"
            for spec in self.tied
        )


def decayed(spec: TensorSpec) -> bool:
    """Whether weight decay applies: to matrices and filters, embeddings among them, not to norms and biases."""
    return len(spec.shape) > 1


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
    layers: str | int | Sequence[str | int] | None,
    n_layers: int,
    *,
    option: str = "trainable_layers",
    others: Sequence[str] = (),
) -> tuple[int, ...] | None:
    """Block numbers, ascending, from ``"last:K"``, ``"first:K"`` and numbers; None when there is no limit.

    ``others``: words that the option takes beside these, for the error. Raises ConfigError for K outside 1..n_layers, a
    number outside 0..n_layers-1, or anything else.
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
            words = "".join(f", {word!r}" for word in others)
            raise ConfigError(f"{option}: 'last:K', 'first:K'{words} or a layer's number expected, {entry!r} found")
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


def select_tensors(
    adapter: ModelAdapter,
    modules: str | Sequence[str] = (),
    layers: str | int | Sequence[str | int] | None = None,
    *,
    modules_option: str = "trainable_modules",
    layers_option: str = "trainable_layers",
) -> TensorSelection:
    """The tensors of ``adapter`` that ``modules`` name within ``layers``; where both are empty all that train.

    ``modules``: parts of tensors' paths from dot to dot; everything at and below such a part is selected: ``q_proj``,
    ``self_attn.q_proj``, ``mlp``, ``input_layernorm``, ``c_attn.bias``, ``experts.gate_up_proj``, a full path. Empty:
    everything within ``layers``.

    ``layers``: as :func:`parse_layers`, and ``emb``, the embedding tables (of positions too), and ``head``, the output
    projection. Both are selected whole, whatever ``modules`` says. The norm before the head is neither: it is selected
    by its full path (``model.norm``), as every module outside the blocks can be within any ``layers``.

    A head that is tied is the tensor it is tied to. Raises ConfigError, naming the option and the entry, for one that
    matches nothing at all, or nothing within the limits.
    """
    candidates = [spec for spec in adapter.tensors() if spec.role != BUFFER]
    entries = [modules] if isinstance(modules, str) else list(modules)
    places = _places(adapter, layers, layers_option)
    chosen: dict[str, list[TensorSpec]] = {}
    for entry in entries:
        everywhere = _below(entry, candidates)
        if not everywhere:
            raise ConfigError(_no_tensor(entry, candidates, modules_option))
        allowed = [spec for spec in everywhere if not places or any(inside(spec) for inside in places.values())]
        # a full path reaches what lies outside the blocks
        chosen[entry] = allowed or [
            spec for spec in everywhere if spec.layer is None and entry in (spec.module, spec.name)
        ]
        if not chosen[entry]:
            raise ConfigError(
                f"{modules_option}: {entry!r} matches nothing within {layers_option}, {', '.join(places)} (only "
                f"{shorten(spec.name for spec in everywhere)}): widen {layers_option} or leave the name out"
            )
    named = {spec.name for specs in chosen.values() for spec in specs}
    for place, inside in places.items():
        within = [spec for spec in candidates if inside(spec)]
        if not entries or place in (EMB, HEAD):
            chosen[place] = [*chosen.get(place, ()), *within]
        elif not any(spec.name in named for spec in within):
            raise ConfigError(
                f"{layers_option}: {place!r} has nothing of {modules_option}, {shorten(entries)}: "
                f"name modules of that layer or leave it out"
            )
    selected = [spec for specs in chosen.values() for spec in specs] if chosen else candidates
    names = {_stored(spec) for spec in selected}
    return TensorSelection(
        tensors=tuple(spec for spec in candidates if spec.tied_to is None and spec.name in names),
        counts={entry: _count(specs) for entry, specs in chosen.items()},
        tied=tuple(spec for spec in candidates if spec.tied_to in names),
    )


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


def _places(
    adapter: ModelAdapter, layers: str | int | Sequence[str | int] | None, option: str
) -> dict[str, Callable[[TensorSpec], bool]]:
    """Which tensors each entry of ``layers`` means, by the entry."""
    heads = {spec.module for spec in adapter.tensors() if spec.role == "head"}
    places: dict[str, Callable[[TensorSpec], bool]] = {}
    for entry in [layers] if isinstance(layers, (str, int)) else layers or ():
        word = str(entry).strip().lower()
        if word == EMB:
            places[word] = lambda spec: spec.role == "embedding"
        elif word == HEAD:
            places[word] = lambda spec: spec.module in heads
        else:
            numbers = parse_layers([entry], adapter.n_layers, option=option, others=(EMB, HEAD)) or ()
            places[word] = lambda spec, numbers=numbers: spec.layer in numbers
    return places


def _below(entry: str, candidates: Iterable[TensorSpec]) -> list[TensorSpec]:
    """Every tensor with ``entry`` in its path between dots. A layer's number alone names no module."""
    if entry.isdecimal():
        return []
    return [spec for spec in candidates if any(f".{entry}." in f".{path}." for path in _paths(spec))]


def _paths(spec: TensorSpec) -> Iterator[str]:
    """The names that a tensor goes by: an expert's also by those of the stacks that transformers has."""
    yield spec.name
    if spec.expert is not None:
        parent, _, leaf = spec.stack.rpartition(".")
        yield spec.stack
        if leaf in _STACKED:
            yield f"{parent}.{_STACKED[leaf]}"


def _stored(spec: TensorSpec) -> str:
    return spec.tied_to or spec.name


def _count(specs: Sequence[TensorSpec]) -> EntryCount:
    sizes = {_stored(spec): math.prod(spec.shape) for spec in specs}
    return EntryCount(len({spec.module for spec in specs}), len(sizes), sum(sizes.values()))


def _number(count: int, what: str) -> str:
    return f"{count:,} {what}{'' if count == 1 else 's'}"


def _no_tensor(entry: str, candidates: Sequence[TensorSpec], option: str) -> str:
    if entry.isdecimal():
        return f"{option}: the name of a module expected, {entry!r} found; layers are for trainable_layers"
    paths = [path for spec in candidates for path in _paths(spec)]
    # without the numbers of layers and experts few names are left to compare with, unless the entry has numbers too
    short = dict.fromkeys(path if re.search(r"\d", entry) else re.split(r"\.\d+\.", path)[-1] for path in paths)
    known = {
        ".".join(parts[start:stop])
        for parts in (path.split(".") for path in short)
        for start in range(len(parts))
        for stop in range(start + 1, len(parts) + 1)
    }
    leaves = dict.fromkeys(spec.stack.rpartition(".")[2] for spec in candidates)
    return (
        f"{option}: {entry!r} matches no tensor of this model{did_you_mean(entry, known)} "
        f"(there are: {', '.join(leaves)})"
    )
