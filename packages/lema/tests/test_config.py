"""LemaConfig reads every spelling into one value and refuses the rest in one line."""

from __future__ import annotations

import copy
import dataclasses
import json
import pickle
from pathlib import Path
from typing import Any

import pytest

from lema.config import FULL_OPTIONS, LORA_OPTIONS, LemaConfig, MemoryStrategy
from lema_core.errors import ConfigError


def _refusal(**options: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        LemaConfig(**options)
    message = str(caught.value)
    assert "\n" not in message and caught.value.exit_code == 2
    return message


def test_every_field_has_a_default_and_says_what_it_is() -> None:
    LemaConfig()
    for name, option in LemaConfig.options().items():
        assert option.help.endswith((".", "].")) and option.group and option.allowed, name


def test_defaults_pass_their_own_checks_and_survive_json() -> None:
    config = LemaConfig(trainable_layers=["last:2", 0], lora_target_modules="q_proj, v_proj", strategy="Resident")
    restored = LemaConfig.from_dict(json.loads(json.dumps(config.to_dict())))
    assert restored == config and restored.strategy is MemoryStrategy.RESIDENT
    assert restored.lora_target_modules == ["q_proj", "v_proj"]


def test_copies_are_configs() -> None:
    config = LemaConfig(seed=3)
    for other in (copy.deepcopy(config), pickle.loads(pickle.dumps(config)), dataclasses.replace(config)):
        assert other == config and other is not config


@pytest.mark.parametrize("value", ["1e-4", 1e-4, "1.0e-4", "0.0001"])
def test_numbers_written_as_text_are_numbers(value: Any) -> None:
    assert LemaConfig(learning_rate=value).learning_rate == 1e-4


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("max_steps", 1e3, 1000),
        ("max_steps", "12", 12),
        ("max_steps", "null", None),
        ("gradient_checkpointing", "True", True),
        ("gradient_checkpointing", None, None),
        ("gradient_checkpointing", "none", None),
        ("gradient_checkpointing", "Null", None),
        ("gradient_checkpointing", "false", False),
        ("target_step_time_ms", 250.0, 250),
        ("target_step_time_ms", "null", None),
        ("kv_ram", 0.5, "0.5"),
        ("activations_vram", "1.5GiB", "1.5GiB"),
        ("debug", "false", False),
        ("strategy", "RESIDENT", MemoryStrategy.RESIDENT),
        ("strategy", MemoryStrategy.STREAMING, MemoryStrategy.STREAMING),
        ("device", "CUDA:1", "cuda:1"),
        ("resume", False, "none"),
        ("resume", "False", "none"),
        ("resume", None, "none"),
        ("resume", True, "auto"),
        ("resume", "Auto", "auto"),
        ("resume", "runs/A/checkpoint-5", "runs/A/checkpoint-5"),
        ("output_dir", Path("runs/first"), "runs/first"),
        ("output_dir", 2024, "2024"),
        ("weights_ram", 0.3, "0.3"),
        ("weights_ram", " 4 GB ", "4 GB"),
        ("lora_target_modules", "all-linear", "all-linear"),
        ("lora_target_modules", ["mlp.up_proj"], ["mlp.up_proj"]),
        ("lora_target_modules", "['q_proj', \"k_proj\"]", ["q_proj", "k_proj"]),
        ("trainable_layers", "first:2,3", ["first:2", 3]),
        ("trainable_layers", "[last:4]", ["last:4"]),
        ("trainable_layers", [0, "3"], [0, 3]),
        ("max_grad_norm", None, None),
        ("training_mode", "LoRA", "lora"),
        ("training_mode", "Selective_Full", "selective_full"),
        ("skip_nonfinite", "False", False),
        ("loss_scale", "Auto", "auto"),
        ("loss_scale", "65536", 65536.0),
        ("lr_schedule", "Cosine", "cosine"),
    ],
)
def test_spellings(name: str, value: Any, expected: Any) -> None:
    result = getattr(LemaConfig(**{name: value}), name)
    assert result == expected and type(result) is type(expected)


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("trainable_modules", "q_proj, self_attn.o_proj", ["q_proj", "self_attn.o_proj"]),
        ("trainable_modules", ["model.layers.3.mlp"], ["model.layers.3.mlp"]),
        ("trainable_modules", [], []),
        ("trainable_layers", "EMB,head,Last:2,0", ["emb", "head", "last:2", 0]),
        ("opt_state_bits", "8", 8),
        ("opt_state_bits", 8, 8),
        ("grad_acc_bits", "null", None),
        ("grad_accum_backend", "DISK", "disk"),
        ("opt_state_ram", "0.25", "0.25"),
    ],
)
def test_spellings_for_a_models_own_weights(name: str, value: Any, expected: Any) -> None:
    result = getattr(LemaConfig(training_mode="selective_full", **{name: value}), name)
    assert result == expected and type(result) is type(expected)


@pytest.mark.parametrize(
    ("name", "value", "allowed"),
    [
        ("learning_rate", "abc", "greater than 0"),
        ("learning_rate", -1, "greater than 0"),
        ("learning_rate", float("nan"), "greater than 0"),
        ("learning_rate", float("inf"), "greater than 0"),
        ("learning_rate", True, "greater than 0"),
        ("lora_rank", 0, "from 1 up"),
        ("lora_rank", 1.5, "from 1 up"),
        ("save_steps", 0, "from 1 up"),
        ("lora_dropout", 1, "to below 1"),
        ("eval_split", 1.0, "to below 1"),
        ("seed", -1, "from 0"),
        ("batch_size", None, "from 1 up"),
        ("opt_state_bits", 4, "8 or null"),
        ("opt_state_bits", True, "8 or null"),
        ("kv_bits", 8, "null"),
        ("grad_acc_bits", "eight", "8 or null"),
        ("grad_accum_backend", "vram", "auto, ram, disk"),
        ("loss_scale", 0, "auto or a number greater than 0"),
        ("loss_scale", "inf", "auto or a number greater than 0"),
        ("skip_nonfinite", 2, "true or false"),
        ("target_step_time_ms", 0, "from 1 up"),
        ("target_step_time_ms", 0.5, "from 1 up"),
        ("gradient_checkpointing", "maybe", "true or false or null"),
        ("opt_state_ram", "4XB", '"4.0GB"'),
        ("grad_acc_vram", 2, 'write "2GB"'),
        ("activations_ram", "0", "greater than 0"),
        ("weights_bits", 7, "8 or 4 or null"),
        ("weights_bits", True, "8 or 4 or null"),
        ("quant_backend", "torchoa", "what exists: auto, custom, torchao, quanto, bitsandbytes"),
        ("weights_format", "int4_32", "did you mean 'int4-32'?"),
        ("weights_compute", "int8", "auto, dequant, w8a8"),
        ("quant_exclude", [""], "[down_proj,lm_head]"),
        ("backend", "cuda", "auto, cpp, python"),
        ("training_mode", "selective_ful", "did you mean 'selective_full'?"),
        ("trainable_modules", [3], "[q_proj,mlp]"),
        ("trainable_modules", "q proj", "[q_proj,mlp]"),
        ("strategy", "residnt", "did you mean 'resident'?"),
        ("task", "trian", "did you mean 'train'?"),
        ("device", "gpu", "cuda:N"),
        ("weights_ram", 4, 'write "4GB"'),
        ("weights_ram", "4XB", '"4.0GB"'),
        ("weights_ram", True, '"4.0GB"'),
        ("trainable_layers", "last:0", "last:N"),
        ("trainable_layers", ["-1"], "last:N"),
        ("trainable_layers", ["embedding"], "emb and head"),
        ("lora_target_modules", [], "q_proj"),
        ("lora_target_modules", "q proj", "q_proj"),
        ("lora_target_modules", [3], "q_proj"),
        ("output_dir", "", "not empty"),
        ("resume", "", "none, auto"),
        ("debug", "maybe", "true or false"),
    ],
)
def test_refusals_name_key_value_and_what_is_allowed(name: str, value: Any, allowed: str) -> None:
    message = _refusal(**{name: value})
    assert message.startswith(f"{name}: ") and allowed in message
    listed = ("trainable_layers", "trainable_modules", "lora_target_modules", "quant_exclude")
    assert name in listed or str(value) in message


def test_unknown_names_have_a_near_match() -> None:
    assert _refusal(learning_rat=1e-4) == "unknown option 'learning_rat'; did you mean 'learning_rate'?"
    assert "--help" in _refusal(zzzzz=1)


def test_assignment_is_checked_like_the_constructor() -> None:
    config = LemaConfig()
    config.lora_rank = "8"  # type: ignore[assignment]
    assert config.lora_rank == 8
    with pytest.raises(ConfigError, match="lora_rank: -8"):
        config.lora_rank = -8
    with pytest.raises(ConfigError, match="did you mean 'lora_rank'"):
        config.lora_rnk = 8  # type: ignore[attr-defined]
    assert config.lora_rank == 8


def test_options_that_contradict_each_other() -> None:
    assert "warmup_steps: 20 is more than max_steps 10" in _refusal(warmup_steps=20, max_steps=10)
    assert "contradict" in _refusal(eval_file="a.jsonl", eval_split=0.1)
    assert "nothing to evaluate" in _refusal(eval_steps=5)
    assert _refusal(hardware="t4") == "hardware: 't4' is for task=plan; task=train runs on this machine"
    assert "plot: true is for task=plan" in _refusal(plot=True, task="doctor")
    assert LemaConfig(task="plan", hardware="t4", plot="true").plot is True


def test_options_of_quantization_that_mean_nothing_together() -> None:
    for name, value in (("weights_format", "nf4"), ("quant_backend", "torchao"), ("quant_exclude", ["lm_head"])):
        message = _refusal(**{name: value})
        assert message.startswith(f"{name}: {value!r} is for weights that are to be quantized")
        assert getattr(LemaConfig(weights_bits=4, **{name: value}), name) == value
    assert "'nf4' has 4 bits, and weights_bits is 8" in _refusal(weights_bits=8, weights_format="NF4")
    assert "weights_bits is null" in _refusal(weights_compute="w8a8")
    assert "weights_bits is 4" in _refusal(weights_compute="w8a8", weights_bits=4)
    assert LemaConfig(weights_compute="W8A8", weights_bits="8").weights_compute == "w8a8"


def test_long_values_are_shown_in_part() -> None:
    assert len(_refusal(learning_rate="x" * 1000)) < 200


@pytest.mark.parametrize(
    ("mode", "name", "value"),
    [
        ("lora", "trainable_modules", ["q_proj"]),
        ("lora", "opt_state_bits", 8),
        ("lora", "grad_acc_bits", 8),
        ("lora", "grad_accum_backend", "disk"),
        ("selective_full", "lora_rank", 8),
        ("selective_full", "lora_alpha", 8.0),
        ("selective_full", "lora_dropout", 0.1),
        ("selective_full", "lora_target_modules", ["q_proj"]),
        ("selective_full", "use_rslora", True),
    ],
)
def test_options_of_another_training_mode_are_refused(mode: str, name: str, value: Any) -> None:
    other = "lora" if mode == "selective_full" else "selective_full"
    message = _refusal(training_mode=mode, **{name: value})
    assert message == (
        f"{name}: {value!r} is for training_mode={other}, and training_mode is {mode}; leave one of them out"
    )
    assert name in (FULL_OPTIONS if mode == "lora" else LORA_OPTIONS)
    assert getattr(LemaConfig(training_mode=other, **{name: value}), name) == value


def test_places_outside_the_blocks_are_for_a_models_own_weights() -> None:
    assert "'emb' is for training_mode=selective_full" in _refusal(trainable_layers=["last:2", "emb"])
    assert LemaConfig(trainable_layers=["last:2"]).trainable_layers == ["last:2"]


def test_defaults_of_every_mode_survive_json() -> None:
    for mode in ("lora", "selective_full"):
        config = LemaConfig(training_mode=mode)
        assert LemaConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config
