"""Finds the installed plugins, admits those that behave, and answers what exists.

One bad plugin never takes the program down: it is left out as a whole, one warning is logged,
:attr:`PluginManager.problems` keeps the reason, and ``LEMA_DISABLE_PLUGINS=name,name`` (distribution names) leaves a
plugin out on purpose. pluggy's own entry-point loader is not used, because it lets an import error in one plugin end
the program.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pluggy

from lema_core import hookspecs
from lema_core.errors import CheckpointError, ConfigError, PluginError, in_one_line
from lema_core.quantization.choice import AUTO, QuantChoice, choose
from lema_core.records import (
    Architecture,
    CheckpointSource,
    Kernel,
    QuantBackend,
    StateCodec,
    TrainingMethod,
    load_object,
)
from lema_core.suggest import unknown_name

if TYPE_CHECKING:
    from lema_core.quantization.formats import WireFormat

ENTRY_POINT_GROUP = "lema"
DISABLE_VARIABLE = "LEMA_DISABLE_PLUGINS"

# Loaded before all others, so that a name which lema ships cannot be taken over by whatever else is installed.
_FIRST_PARTY = ("lema-core", "lema-models", "lema-cuda", "lema-quant", "lema-train", "lema")

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class PluginProblem:
    """Why a plugin was left out. ``package`` is the distribution, ``plugin`` its entry point, ``error`` one line."""

    package: str
    plugin: str
    error: str


@dataclass(frozen=True)
class _Registry:
    """What one registry hook may yield, and the keys of each answer that nobody else may have."""

    hook: str
    record: type
    what: str
    keys: Callable[[Any], list[str]]


def _architecture_keys(record: Architecture) -> list[str]:
    if not isinstance(record.model_types, tuple):  # ("llama") without a comma would be one model type per letter
        raise PluginError(f"architecture {record.name!r} has model_types {record.model_types!r}, expected a tuple")
    return [repr(record.name), *(f"for model_type {model_type!r}" for model_type in record.model_types)]


_REGISTRIES = (
    _Registry("lema_architectures", Architecture, "architecture", _architecture_keys),
    _Registry("lema_checkpoint_sources", CheckpointSource, "checkpoint source", lambda each: [repr(each.name)]),
    _Registry("lema_kernels", Kernel, "kernel", lambda each: [f"{each.name!r} for {each.op} on {each.device_type}"]),
    _Registry("lema_training_methods", TrainingMethod, "training method", lambda each: [repr(each.name)]),
    _Registry("lema_state_codecs", StateCodec, "state codec", lambda each: [repr(each.name), f"for {each.bits} bits"]),
    _Registry("lema_quant_backends", QuantBackend, "backend", lambda each: [f"{each.name!r} for {each.format}"]),
    _Registry("lema_config_packages", str, "config package", lambda each: [repr(each)]),
)


@dataclass
class _Answers:
    """The answers to one registry hook in loading order, and which package has which key."""

    records: list[Any] = field(default_factory=list)
    owners: dict[str, str] = field(default_factory=dict)


class PluginManager:
    """The plugins of one program. Empty when made; :func:`get_plugin_manager` gives the one with all installed ones."""

    def __init__(self) -> None:
        self.problems: list[PluginProblem] = []
        #: packages whose plugin is in use, in loading order
        self.packages: list[str] = []
        self._manager = pluggy.PluginManager(hookspecs.PROJECT)
        self._manager.add_hookspecs(hookspecs)
        self._answers = {registry.hook: _Answers() for registry in _REGISTRIES}

    @property
    def hook(self) -> Any:
        """For calling the hooks of one answer and the observers: ``manager.hook.lema_run_started(config=config)``."""
        return self._manager.hook

    # ---------------------------------------------------------------------------------------------------------- loading

    def load_installed(self) -> None:
        """Admit every installed plugin that :data:`DISABLE_VARIABLE` does not name."""
        disabled = {_normalise(name) for name in os.environ.get(DISABLE_VARIABLE, "").split(",") if name.strip()}
        for package, entry_point in _installed():
            if package not in disabled:
                self.admit(package, entry_point.name, entry_point.load)

    def admit(self, package: str, plugin: str, load: Callable[[], object]) -> bool:
        """Load a plugin and take its answers, or record why not; True when it is in. Never raises for a plugin's fault.

        ``load`` returns the plugin: a module or any object whose attributes are marked with ``hookimpl``.
        """
        name = f"{package}:{plugin}"
        try:
            self._register(package, name, load())
        # A module that calls sys.exit() while it is imported would end the program too.
        except (Exception, SystemExit) as error:
            if self._manager.has_plugin(name):
                self._manager.unregister(name=name)
            problem = PluginProblem(package, plugin, _one_line(error))
            self.problems.append(problem)
            _log.warning("plugin %r of package %s is left out: %s", plugin, package, problem.error)
            return False
        if package not in self.packages:
            self.packages.append(package)
        return True

    def _register(self, package: str, name: str, registered: object) -> None:
        if self._manager.is_registered(registered):
            raise PluginError(f"already loaded as {self._manager.get_name(registered)}")
        self._manager.register(registered, name=name)
        self._manager.check_pending()
        if not self._manager.get_hookcallers(registered):
            raise PluginError("implements no hook; mark its functions with lema_core.hookspecs.hookimpl")
        # Nothing is kept until everything was seen to be right: a plugin is in, or it is out.
        admitted = {registry.hook: self._ask(registry, package, name) for registry in _REGISTRIES}
        for hook, answers in admitted.items():
            self._answers[hook].records += answers.records
            self._answers[hook].owners.update(answers.owners)

    def _ask(self, registry: _Registry, package: str, name: str) -> _Answers:
        """What one plugin answers to a registry hook. Raises PluginError for a bad or taken record."""
        answers = _Answers()
        others = {plugin for plugin in self._manager.get_plugins() if self._manager.get_name(plugin) != name}
        caller = self._manager.subset_hook_caller(registry.hook, others)
        for answer in caller():
            if isinstance(answer, (str, bytes)) or not isinstance(answer, Iterable):
                raise PluginError(
                    f"{registry.hook} gives {answer!r}, expected an iterable of {registry.record.__name__}"
                )
            for record in answer:
                if not isinstance(record, registry.record):
                    raise PluginError(f"{registry.hook} yields {record!r}, expected {registry.record.__name__}")
                for key in registry.keys(record):
                    owner = answers.owners.get(key) or self._answers[registry.hook].owners.get(key)
                    if owner is not None:
                        raise PluginError(f"{registry.hook} yields {registry.what} {key}, which {owner} has already")
                    answers.owners[key] = package
                answers.records.append(record)
        return answers

    # ------------------------------------------------------------------------------------------------------ what exists

    def architectures(self) -> dict[str, Architecture]:
        """Architectures by name."""
        return _by_name(self._answers["lema_architectures"].records)

    def training_methods(self) -> dict[str, TrainingMethod]:
        """Training methods by name."""
        return _by_name(self._answers["lema_training_methods"].records)

    def state_codecs(self) -> dict[int, StateCodec]:
        """Codecs of optimizer states and gradients by their bits."""
        records = sorted(self._answers["lema_state_codecs"].records, key=lambda each: each.bits)
        return {each.bits: each for each in records}

    def quant_backends(self) -> list[QuantBackend]:
        """Backends in the order of preference: falling priority, then name; of one backend, as it yields them."""
        return sorted(self._answers["lema_quant_backends"].records, key=lambda each: (-each.priority, each.name))

    def checkpoint_sources(self) -> list[CheckpointSource]:
        """Checkpoint sources in the order they are asked: falling priority, then name."""
        return sorted(self._answers["lema_checkpoint_sources"].records, key=lambda each: (-each.priority, each.name))

    def kernels(self) -> list[Kernel]:
        """Kernels by operation, then in the order of preference: falling priority, then name."""
        records = self._answers["lema_kernels"].records
        return sorted(records, key=lambda each: (each.op, -each.priority, each.name, each.device_type))

    def config_packages(self) -> list[str]:
        """Packages with YAML files for the command line, in loading order."""
        return list(self._answers["lema_config_packages"].records)

    # ---------------------------------------------------------------------------------------------------------- choices

    def match_architecture(self, hf_config: Mapping[str, Any]) -> Architecture:
        """The architecture for a parsed ``config.json``.

        Raises ConfigError when no installed architecture serves it, PluginError when a plugin answers with a name that
        no architecture has.
        """
        architectures = self.architectures()
        answer = self.hook.lema_match_architecture(hf_config=hf_config)
        if answer is not None:
            if answer not in architectures:
                raise PluginError(
                    f"lema_match_architecture: {unknown_name('architecture', str(answer), architectures)}"
                )
            return architectures[answer]
        served = {model_type: each for each in architectures.values() for model_type in each.model_types}
        model_type = hf_config.get("model_type") or _model_type_of_class(hf_config, served)
        if model_type is None:
            raise ConfigError(
                f"config.json has no model_type, and its architectures name no known class; known: {_listed(served)}"
            )
        if model_type not in served:
            raise ConfigError(f"{unknown_name('model_type', str(model_type), served)}{self._left_out()}")
        return served[model_type]

    def training_method(self, name: str) -> TrainingMethod:
        """A training method by name. Raises ConfigError listing what exists."""
        methods = self.training_methods()
        if name not in methods:
            raise ConfigError(f"{unknown_name('training_mode', name, methods)}{self._left_out()}")
        return methods[name]

    def state_codec(self, bits: int, option: str = "opt_state_bits") -> StateCodec:
        """The codec for so many bits. Raises ConfigError, naming ``option``, with what there is."""
        codecs = self.state_codecs()
        if bits not in codecs:
            known = ", ".join(f"{each.bits} ({each.name})" for each in codecs.values()) or "none"
            hint = "" if codecs else "; packages/lema-quant brings 8"
            raise ConfigError(f"{option}: no codec for {bits} bits; installed: {known}{hint}{self._left_out()}")
        return codecs[bits]

    def choose_quant_backend(
        self, name: str = AUTO, bits: int | None = None, format: str | None = None, device_type: str = "cpu"
    ) -> QuantChoice:
        """Who encodes weights to so many ``bits``, or into a ``format``, or into a format that has so many bits.

        ``name`` is what the user wrote as ``quant_backend``. ``auto`` is the first backend that can serve, or what
        ``lema_choose_quant_backend`` says. One asked for by name that cannot serve is replaced by ``custom``, and
        ``missed`` of the answer says why. :class:`lema_core.quantization.backends.WeightQuantizer` acts on the answer.

        Raises ConfigError for a name, bits or a format that nobody has, with those that there are; PluginError with
        every reason when nobody can serve, and when a plugin's answer names no backend that can.
        """
        hook = self.hook.lema_choose_quant_backend

        def answer(bits: int, available: tuple[str, ...]) -> str | None:
            return hook(bits=bits, device=device_type, available=available)

        if format is not None and format not in (known := self._format_names()):
            raise ConfigError(f"{unknown_name('weights_format', format, known)}{self._left_out()}")
        # Who can serve is tried out only as far as somebody wants to know: it costs importing libraries.
        asked = answer if hook.get_hookimpls() else None
        return choose(self.quant_backends(), name, bits, format, device_type, asked, self._left_out())

    def wire_format(self, name: str) -> WireFormat:
        """A format of quantized weights by name: one that lema knows, or a backend's own.

        Raises ConfigError with those that there are, PluginError when the backend's codec cannot be imported or gives
        another format.
        """
        known = _wire_formats()
        if name in known:
            return known[name]
        for record in self.quant_backends():
            if record.format == name:
                try:
                    format = load_object(record.codec)().format
                except Exception as error:
                    raise PluginError(f"quant backend {record.name}: {record.codec}: {_one_line(error)}") from error
                if format.name != name:
                    raise PluginError(f"quant backend {record.name}: {record.codec} gives {format.name}, not {name}")
                return format
        raise ConfigError(f"{unknown_name('weights_format', name, self._format_names())}{self._left_out()}")

    def _format_names(self) -> list[str]:
        return [*_wire_formats(), *(each.format for each in self.quant_backends())]

    def locate_checkpoint(self, ref: str | Path) -> Path:
        """The local folder of what the user named. Raises CheckpointError with every reason when all refuse."""
        ref = str(ref)
        refusals = []
        for source in self.checkpoint_sources():
            reason = source.refuses(ref)
            if reason is None:
                return source.locate(ref)
            refusals.append(f"{source.name}: {reason}")
        raise CheckpointError(
            f"cannot open model {ref!r}: {'; '.join(refusals) or 'no checkpoint source is installed'}{self._left_out()}"
        )

    def choose_kernel(self, op: str, request: Any, device_type: str, name: str = "auto") -> tuple[Kernel, list[str]]:
        """The kernel for an operation, and one sentence per candidate that says why it was or was not taken.

        ``name`` other than ``"auto"`` forces that kernel. Raises ConfigError for a name that no kernel of ``op`` has,
        PluginError with every reason when none can serve.
        """
        candidates = [kernel for kernel in self.kernels() if kernel.op == op]
        if name != "auto":
            known = [kernel.name for kernel in candidates]
            candidates = [kernel for kernel in candidates if kernel.name == name]
            if not candidates:
                raise ConfigError(f"{unknown_name(f'kernel for {op}', name, ['auto', *known])}{self._left_out()}")
        chosen: Kernel | None = None
        sentences = []
        for kernel in candidates:
            reasons = _refusals(kernel, request, device_type)
            if reasons:
                sentences.append(f"{kernel.name}: {', '.join(reasons)}")
            elif chosen is None:
                chosen = kernel
                sentences.append(f"{kernel.name}: chosen")
            else:
                sentences.append(f"{kernel.name}: usable, but {chosen.name} is preferred")
        if chosen is None:
            raise PluginError(
                f"no kernel for {op} on {device_type}: {'; '.join(sentences) or 'none is installed'}{self._left_out()}"
            )
        return chosen, sentences

    def _left_out(self) -> str:
        """For errors about something that does not exist: a plugin that was left out might have brought it."""
        if not self.problems:
            return ""
        return "; left out: " + ", ".join(f"{each.package} ({each.error})" for each in self.problems)


@cache
def get_plugin_manager() -> PluginManager:
    """The manager with all installed plugins; they are loaded at the first call."""
    manager = PluginManager()
    manager.load_installed()
    return manager


def _installed() -> list[tuple[str, metadata.EntryPoint]]:
    """(distribution, entry point) of every installed plugin, lema's own first, then by name, the same everywhere."""
    found = []
    for entry_point in metadata.entry_points(group=ENTRY_POINT_GROUP):
        found.append((_normalise(entry_point.dist.name) if entry_point.dist else "unknown", entry_point))

    def order(item: tuple[str, metadata.EntryPoint]) -> tuple[int, str, str]:
        package, entry_point = item
        rank = _FIRST_PARTY.index(package) if package in _FIRST_PARTY else len(_FIRST_PARTY)
        return rank, package, entry_point.name

    return sorted(found, key=order)


def _normalise(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name.strip()).lower()


def _one_line(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return text if isinstance(error, PluginError) and text else in_one_line(error)


def _by_name(records: list[Any]) -> dict[str, Any]:
    return {record.name: record for record in sorted(records, key=lambda each: each.name)}


def _wire_formats() -> dict[str, WireFormat]:
    # Imported here: formats need torch, which --help and a mistyped option do not wait for.
    from lema_core.quantization.formats import wire_formats

    return wire_formats()


def _listed(names: Iterable[str]) -> str:
    return ", ".join(sorted(names)) or "none"


def _refusals(kernel: Kernel, request: Any, device_type: str) -> list[str]:
    if kernel.device_type not in ("*", device_type):
        return [f"for {kernel.device_type} only"]
    return kernel.unsupported(request)


def _model_type_of_class(hf_config: Mapping[str, Any], served: Mapping[str, object]) -> str | None:
    """For a config without ``model_type``: the known one that its class spells (``LlamaForCausalLM`` -> ``llama``)."""
    for class_name in hf_config.get("architectures") or ():
        stem = str(class_name).partition("For")[0].lower()
        for model_type in sorted(served):
            if model_type.replace("_", "").lower() == stem:
                return model_type
    return None
