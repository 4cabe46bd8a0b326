"""The plugin manager against well-behaved plugins, made in the test."""

from __future__ import annotations

from pathlib import Path

import pytest

from lema_core.errors import CheckpointError, ConfigError, PluginError
from lema_core.hookspecs import hookimpl
from lema_core.plugins import PluginManager
from lema_core.records import Architecture, CheckpointSource, Kernel, StateCodec, TrainingMethod


class Registry:
    """A plugin whose registry hooks answer with the given records."""

    def __init__(self, *records: object) -> None:
        self.records = records

    def of(self, kind: type) -> list[object]:
        return [record for record in self.records if isinstance(record, kind)]

    @hookimpl
    def lema_architectures(self):
        return self.of(Architecture)

    @hookimpl
    def lema_checkpoint_sources(self):
        return self.of(CheckpointSource)

    @hookimpl
    def lema_kernels(self):
        return self.of(Kernel)

    @hookimpl
    def lema_training_methods(self):
        return self.of(TrainingMethod)

    @hookimpl
    def lema_state_codecs(self):
        return self.of(StateCodec)


class Matcher:
    def __init__(self, answer: object) -> None:
        self.answer = answer

    @hookimpl
    def lema_match_architecture(self, hf_config):
        return self.answer


def manager_of(*plugins: object) -> PluginManager:
    manager = PluginManager()
    for number, plugin in enumerate(plugins):
        manager.admit(f"package-{number}", "plugin", lambda plugin=plugin: plugin)
    return manager


def kernel(
    name: str, priority: int = 0, device_type: str = "*", reasons: tuple[str, ...] = (), op: str = "linear"
) -> Kernel:
    return Kernel(name, op, device_type, f"nowhere:{name}", priority, unsupported=lambda request: list(reasons))


def source(name: str, priority: int, reason: str | None) -> CheckpointSource:
    return CheckpointSource(name, refuses=lambda ref: reason, locate=lambda ref: Path(name), priority=priority)


LLAMA = Architecture("llama", ("llama",), "nowhere:Llama")
LFM2_MOE = Architecture("lfm2_moe", ("lfm2_moe",), "nowhere:Lfm2Moe")


# -------------------------------------------------------------------------------------------------- match_architecture


def test_model_type_decides() -> None:
    manager = manager_of(Registry(LLAMA, LFM2_MOE))
    assert manager.match_architecture({"model_type": "lfm2_moe", "architectures": ["LlamaForCausalLM"]}) is LFM2_MOE
    assert list(manager.architectures()) == ["lfm2_moe", "llama"]


@pytest.mark.parametrize(("class_name", "expected"), [("LlamaForCausalLM", LLAMA), ("Lfm2MoeForCausalLM", LFM2_MOE)])
def test_class_name_decides_where_model_type_is_missing(class_name: str, expected: Architecture) -> None:
    assert manager_of(Registry(LLAMA, LFM2_MOE)).match_architecture({"architectures": [class_name]}) is expected


def test_unknown_model_type_lists_what_exists() -> None:
    with pytest.raises(
        ConfigError, match=r"unknown model_type 'lama'; known: lfm2_moe, llama; did you mean 'llama'\?$"
    ):
        manager_of(Registry(LLAMA, LFM2_MOE)).match_architecture({"model_type": "lama"})


def test_config_that_says_nothing_is_refused() -> None:
    with pytest.raises(ConfigError, match="known: llama"):
        manager_of(Registry(LLAMA)).match_architecture({"architectures": ["BertForMaskedLM"]})


def test_plugins_answer_before_model_type() -> None:
    special = Architecture("special", (), "nowhere:Special")
    manager = manager_of(Registry(LLAMA, special), Matcher("special"))
    assert manager.match_architecture({"model_type": "llama"}) is special


def test_first_answer_that_is_not_none_counts_and_the_last_loaded_is_asked_first() -> None:
    manager = manager_of(Registry(LLAMA, LFM2_MOE), Matcher("llama"), Matcher("lfm2_moe"), Matcher(None))
    assert manager.match_architecture({}) is LFM2_MOE


def test_answer_that_names_no_architecture_is_an_error() -> None:
    with pytest.raises(PluginError, match=r"lema_match_architecture: unknown architecture 'lama'; known: llama"):
        manager_of(Registry(LLAMA), Matcher("lama")).match_architecture({"model_type": "llama"})


# --------------------------------------------------------------------------------------------------- locate_checkpoint


def test_sources_are_asked_by_falling_priority() -> None:
    manager = manager_of(Registry(source("low", 0, None), source("high", 5, None), source("highest", 9, "no")))
    assert manager.locate_checkpoint("x") == Path("high")
    assert [each.name for each in manager.checkpoint_sources()] == ["highest", "high", "low"]


def test_all_refusals_are_in_one_line() -> None:
    manager = manager_of(Registry(source("folder", 0, "no such folder"), source("hub", -1, "offline")))
    with pytest.raises(CheckpointError) as caught:
        manager.locate_checkpoint(Path("some/model"))
    assert str(caught.value) == "cannot open model 'some/model': folder: no such folder; hub: offline"


# ------------------------------------------------------------------------------------------------------- choose_kernel


def test_best_usable_kernel_is_chosen_and_every_candidate_explained() -> None:
    fast, cuda, torch = kernel("fast", 9, reasons=("no AVX2", "not built")), kernel("dp4a", 5, "cuda"), kernel("torch")
    manager = manager_of(Registry(torch, kernel("slow", -1), fast, cuda, kernel("other", 99, op="norm")))
    chosen, reasons = manager.choose_kernel("linear", object(), "cpu")
    assert chosen is torch
    assert reasons == [
        "fast: no AVX2, not built",
        "dp4a: for cuda only",
        "torch: chosen",
        "slow: usable, but torch is preferred",
    ]
    assert manager.choose_kernel("linear", object(), "cuda")[0] is cuda


def test_kernel_by_name() -> None:
    torch = kernel("torch")
    manager = manager_of(Registry(kernel("fast", 9), torch, kernel("gpu", 0, "cuda")))
    assert manager.choose_kernel("linear", None, "cpu", name="torch") == (torch, ["torch: chosen"])
    with pytest.raises(ConfigError, match=r"unknown kernel for linear 'torhc'; known: .*; did you mean 'torch'\?"):
        manager.choose_kernel("linear", None, "cpu", name="torhc")
    with pytest.raises(PluginError, match="no kernel for linear on cpu: gpu: for cuda only"):
        manager.choose_kernel("linear", None, "cpu", name="gpu")


def test_one_name_may_serve_several_kinds_of_device() -> None:
    cpu, cuda = kernel("native", 0, "cpu"), kernel("native", 0, "cuda")
    manager = manager_of(Registry(cpu, cuda))
    assert manager.choose_kernel("linear", None, "cuda", name="native")[0] is cuda


def test_operation_without_a_kernel() -> None:
    with pytest.raises(PluginError, match="no kernel for linear on cpu: none is installed"):
        manager_of().choose_kernel("linear", None, "cpu")


# ---------------------------------------------------------------------------------------------------- training methods


def test_unknown_training_method_lists_what_exists() -> None:
    manager = manager_of(Registry(TrainingMethod("lora", "nowhere:Lora")))
    with pytest.raises(ConfigError, match=r"unknown training_mode 'lor'; known: lora; did you mean 'lora'\?"):
        manager.training_method("lor")


# -------------------------------------------------------------------------------------------------------- state codecs


def test_state_codecs_are_found_by_their_bits() -> None:
    halves, bytes_ = StateCodec("halves", 16, "nowhere:Halves"), StateCodec("bytes", 8, "nowhere:Bytes")
    manager = manager_of(Registry(halves), Registry(bytes_))
    assert manager.state_codec(8) is bytes_ and manager.state_codec(16) is halves
    assert manager.state_codecs() == {8: bytes_, 16: halves}
    with pytest.raises(
        ConfigError, match=r"^grad_acc_bits: no codec for 4 bits; installed: 8 \(bytes\), 16 \(halves\)$"
    ):
        manager.state_codec(4, "grad_acc_bits")


def test_the_package_that_brings_state_codecs_is_named() -> None:
    with pytest.raises(
        ConfigError, match=r"^opt_state_bits: no codec for 8 bits; installed: none; packages/lema-quant brings 8$"
    ):
        manager_of().state_codec(8)


def test_one_codec_for_a_number_of_bits() -> None:
    first, second = StateCodec("first", 8, "nowhere:First"), StateCodec("second", 8, "nowhere:Second")
    manager = manager_of(Registry(first), Registry(second))
    assert manager.state_codec(8) is first
    assert manager.problems[0].error == "lema_state_codecs yields state codec for 8 bits, which package-0 has already"


# ----------------------------------------------------------------------------------------------------------- admission


def test_refused_plugin_leaves_nothing_behind() -> None:
    fresh = TrainingMethod("fresh", "nowhere:Fresh")
    manager = manager_of(Registry(LLAMA), Registry(fresh, LLAMA))
    assert manager.packages == ["package-0"]
    assert manager.training_methods() == {}
    assert len(manager.hook.lema_architectures.get_hookimpls()) == 1
    assert manager_of(Registry(LLAMA), Registry(fresh)).training_methods() == {"fresh": fresh}


def test_two_entry_points_of_one_object_load_it_once() -> None:
    plugin = Registry(LLAMA)
    manager = manager_of(plugin, plugin)
    assert list(manager.architectures()) == ["llama"]
    assert manager.problems[0].error == "already loaded as package-0:plugin"


def test_left_out_plugins_are_named_where_something_is_missing() -> None:
    manager = manager_of(Registry(LLAMA))
    manager.admit("lema-qwen", "qwen", lambda: __import__("no_such_module_anywhere"))
    with pytest.raises(
        ConfigError, match=r"unknown model_type 'qwen2'; known: llama; left out: lema-qwen \(ModuleNotFound"
    ):
        manager.match_architecture({"model_type": "qwen2"})
