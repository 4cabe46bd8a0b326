"""Every hook is documented so that it can be used from its docstring alone, and every hook is exercised."""

from __future__ import annotations

import inspect
import textwrap
import types
from collections.abc import Callable
from pathlib import Path

import pytest

from lema_core import hookspecs
from lema_core.hookspecs import hookimpl
from lema_core.plugins import PluginManager
from lema_core.records import Architecture, CheckpointSource, Kernel, QuantBackend, StateCodec, TrainingMethod

HOOKS = {
    name: function
    for name, function in vars(hookspecs).items()
    if name.startswith("lema_") and inspect.isfunction(function)
}

ARCHITECTURE = Architecture("tiny", ("tiny_type",), "nowhere:Tiny")
SOURCE = CheckpointSource("everything", refuses=lambda ref: None, locate=lambda ref: Path(ref) / "found")
KERNEL = Kernel("plain", "linear", "*", "nowhere:Plain", 0, unsupported=lambda request: [])
METHOD = TrainingMethod("nothing", "nowhere:Nothing")
CODEC = StateCodec("halves", 16, "nowhere:Halves")
BACKENDS = (QuantBackend("coarse", 3, "three", "nowhere:Three", 5), QuantBackend("custom", 3, "trits", "nowhere:Trits"))


class Complete:
    """A plugin that implements every hook and remembers what it was told."""

    def __init__(self) -> None:
        self.told: list[tuple[object, ...]] = []

    @hookimpl
    def lema_architectures(self):
        return [ARCHITECTURE]

    @hookimpl
    def lema_checkpoint_sources(self):
        return [SOURCE]

    @hookimpl
    def lema_kernels(self):
        return [KERNEL]

    @hookimpl
    def lema_training_methods(self):
        return [METHOD]

    @hookimpl
    def lema_state_codecs(self):
        return [CODEC]

    @hookimpl
    def lema_quant_backends(self):
        return BACKENDS

    @hookimpl
    def lema_config_packages(self):
        return ["tiny.conf"]

    @hookimpl
    def lema_match_architecture(self, hf_config):
        return "tiny" if "tiny_field" in hf_config else None

    @hookimpl
    def lema_choose_quant_backend(self, bits, device, available):
        self.told.append((bits, device, available))
        return "custom"

    @hookimpl
    def lema_plan_budget(self, request):
        return ("plan for", request)

    @hookimpl
    def lema_run_started(self, config):
        self.told.append(("run", config))

    @hookimpl
    def lema_step_finished(self, step, metrics):
        self.told.append(("step", step, metrics))

    @hookimpl
    def lema_checkpoint_saved(self, path, step):
        self.told.append(("saved", path, step))


def told(plugin: Complete) -> object:
    return plugin.told.pop()


# For each hook: what the manager makes of it, and what the plugin above must lead to.
EXERCISES: dict[str, tuple[Callable[[PluginManager, Complete], object], object]] = {
    "lema_architectures": (lambda m, p: m.match_architecture({"model_type": "tiny_type"}), ARCHITECTURE),
    "lema_checkpoint_sources": (lambda m, p: m.locate_checkpoint("here"), Path("here/found")),
    "lema_kernels": (lambda m, p: m.choose_kernel("linear", None, "cpu"), (KERNEL, ["plain: chosen"])),
    "lema_training_methods": (lambda m, p: m.training_method("nothing"), METHOD),
    "lema_state_codecs": (lambda m, p: m.state_codec(16), CODEC),
    "lema_quant_backends": (lambda m, p: tuple(m.quant_backends()), BACKENDS),
    "lema_config_packages": (lambda m, p: m.config_packages(), ["tiny.conf"]),
    "lema_match_architecture": (lambda m, p: m.match_architecture({"tiny_field": 1}), ARCHITECTURE),
    "lema_choose_quant_backend": (
        lambda m, p: (m.choose_quant_backend("auto", 3, device_type="cuda").backend, told(p)),
        (BACKENDS[1], (3, "cuda", ("coarse", "custom"))),
    ),
    "lema_plan_budget": (lambda m, p: m.hook.lema_plan_budget(request=7), ("plan for", 7)),
    "lema_run_started": (lambda m, p: (m.hook.lema_run_started(config="c"), told(p))[1], ("run", "c")),
    "lema_step_finished": (
        lambda m, p: (m.hook.lema_step_finished(step=3, metrics={"loss": 1.0}), told(p))[1],
        ("step", 3, {"loss": 1.0}),
    ),
    "lema_checkpoint_saved": (
        lambda m, p: (m.hook.lema_checkpoint_saved(path=Path("c"), step=3), told(p))[1],
        ("saved", Path("c"), 3),
    ),
}


def example_of(hook: str) -> str:
    doc = inspect.getdoc(HOOKS[hook]) or ""
    _, found, example = doc.partition("Example::\n")
    assert found, f"{hook} has no example"
    return textwrap.dedent(example)


def test_every_hook_has_an_exercise() -> None:
    assert set(EXERCISES) == set(HOOKS)


@pytest.mark.parametrize("hook", sorted(EXERCISES))
def test_hook_reaches_the_plugin(hook: str) -> None:
    plugin = Complete()
    manager = PluginManager()
    assert manager.admit("tiny", "tiny", lambda: plugin), manager.problems
    exercise, expected = EXERCISES[hook]
    assert exercise(manager, plugin) == expected


@pytest.mark.parametrize("hook", sorted(HOOKS))
def test_hook_is_documented(hook: str) -> None:
    doc = inspect.getdoc(HOOKS[hook]) or ""
    prose = doc.partition("Example::")[0]
    for argument in inspect.signature(HOOKS[hook]).parameters:
        assert f"``{argument}``" in prose, f"{hook} does not explain {argument}"
    assert "Called" in prose, f"{hook} does not say when it is called"
    assert any(word in prose for word in ("Yield", "Return", "Nothing is")), f"{hook} does not say what to return"
    assert any(word in prose for word in ("All answers", "first answer", "Every plugin")), (
        f"{hook} does not say what happens to several answers"
    )


@pytest.mark.parametrize("hook", sorted(HOOKS))
def test_example_is_a_plugin(hook: str) -> None:
    plugin = types.ModuleType("pasted")
    exec(compile(example_of(hook), f"<example of {hook}>", "exec"), vars(plugin))
    manager = PluginManager()
    assert manager.admit("pasted", "pasted", lambda: plugin), manager.problems
    assert [each.plugin for each in getattr(manager.hook, hook).get_hookimpls()] == [plugin]
