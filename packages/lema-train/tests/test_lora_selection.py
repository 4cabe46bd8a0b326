"""Which modules train, how their LoRA weights start, and how many there are (PEFT is the oracle for both)."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lema_core.adapter import ModelAdapter, TensorSpec
from lema_core.errors import ConfigError
from lema_core.selection import matches, parse_layers, select_modules
from lema_train.lora import LoraConfig, LoraWeights, count_parameters

SHAPES = {
    "self_attn.q_proj": (16, 16),
    "self_attn.k_proj": (8, 16),
    "self_attn.xq_proj": (4, 16),
    "mlp.down_proj": (16, 24),
}


@dataclass
class FourLayers:
    n_layers: int = 4

    all_linear_routes = False
    all_linear = ModelAdapter.all_linear

    def linear_modules(self) -> Iterable[TensorSpec]:
        for layer in range(self.n_layers):
            for name, shape in SHAPES.items():
                yield TensorSpec(f"model.layers.{layer}.{name}.weight", shape, "linear", layer)
        yield TensorSpec("lm_head.weight", (50, 16), "head")


def modules_of(targets: object, layers: object = None) -> list[str]:
    return [spec.module for spec in select_modules(FourLayers(), targets, layers).modules]


def test_a_target_is_the_end_of_a_path_at_a_dot() -> None:
    expected = [f"model.layers.{layer}.self_attn.q_proj" for layer in range(4)]
    assert modules_of(["q_proj"]) == modules_of(["self_attn.q_proj"]) == modules_of("q_proj") == expected
    assert modules_of(["model.layers.1.self_attn.q_proj"]) == [expected[1]]
    assert modules_of(["layers.1.self_attn.q_proj"]) == [expected[1]]


def test_all_linear_leaves_out_the_output_head() -> None:
    assert len(modules_of("all-linear")) == 16
    assert modules_of(["ALL-LINEAR", "lm_head"])[-1] == "lm_head"


def test_modules_come_in_forward_order_once_and_counts_per_entry() -> None:
    selection = select_modules(FourLayers(), ["down_proj", "q_proj", "self_attn.q_proj"], ["last:2"])
    assert [spec.module for spec in selection.modules] == [
        f"model.layers.{layer}.{name}" for layer in (2, 3) for name in ("self_attn.q_proj", "mlp.down_proj")
    ]
    assert selection.counts == {"down_proj": 2, "q_proj": 2, "self_attn.q_proj": 2}
    assert selection.layers == (2, 3)
    described = selection.describe()
    assert described == "4 modules train in layers 2-3 (down_proj: 2, q_proj: 2, self_attn.q_proj: 2)"


@pytest.mark.parametrize(
    ("layers", "expected"),
    [
        (["last:2"], (2, 3)),
        (["first:1"], (0,)),
        (["last:4"], (0, 1, 2, 3)),
        ([3, "0", "last:1"], (0, 3)),
        (2, (2,)),
        ("Last:1", (3,)),
        (None, None),
        ([], None),
    ],
)
def test_layer_limits(layers: object, expected: object) -> None:
    assert parse_layers(layers, 4) == expected


@pytest.mark.parametrize(
    "entry", ["last:99", "first:0", "last:0", 7, 4, "-1", "2-3", "middle:2", "last", True, 1.5, ""]
)
def test_a_layer_that_is_not_there_is_refused(entry: object) -> None:
    with pytest.raises(ConfigError, match=r"trainable_layers: .*found"):
        parse_layers([entry], 4)


@pytest.mark.parametrize("name", ["nope", "q_poj", "proj", "model.layers.4.self_attn.q_proj", "embed_tokens", ""])
def test_a_target_that_matches_nothing_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="matches no linear layer"):
        modules_of(["q_proj", name])


def test_the_refusal_names_the_near_match_and_what_there_is() -> None:
    with pytest.raises(ConfigError, match=r"'q_poj'.*did you mean 'q_proj'.*down_proj, lm_head, all-linear"):
        modules_of(["q_poj"])


def test_a_target_with_no_module_within_the_layers_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"'model.layers.0.self_attn.q_proj' matches no module within .* layers 2-3"):
        modules_of(["k_proj", "model.layers.0.self_attn.q_proj"], ["last:2"])


def test_the_head_named_in_full_stays_beside_layer_limits_as_in_peft() -> None:
    assert modules_of(["q_proj", "lm_head"], [3]) == ["model.layers.3.self_attn.q_proj", "lm_head"]


def test_no_targets_at_all_are_refused() -> None:
    with pytest.raises(ConfigError, match="at least one"):
        modules_of([])


@settings(max_examples=60, deadline=None)
@given(st.lists(st.text("ab.", max_size=4), min_size=1, max_size=3), st.text("ab.", max_size=8))
def test_matching_is_pefts(targets: list[str], module: str) -> None:
    from peft import LoraConfig as PeftConfig
    from peft.tuners.tuners_utils import check_target_module_exists

    expected = bool(check_target_module_exists(PeftConfig(target_modules=targets), module))
    assert any(matches(target, module) for target in targets) == expected


def test_lora_starts_as_peft_starts() -> None:
    weights = LoraWeights(LoraConfig(rank=64, alpha=16), select_modules(FourLayers(), ["down_proj"]).modules)
    lora_A = weights.parameters()["model.layers.0.mlp.down_proj.lora_A"]
    lora_B = weights.parameters()["model.layers.0.mlp.down_proj.lora_B"]
    assert lora_A.shape == (64, 24) and lora_B.shape == (16, 64)
    assert lora_A.dtype == lora_B.dtype == torch.float32 and lora_A.requires_grad and lora_A.is_leaf
    # Kaiming-uniform with a = sqrt(5) over fan_in 24: bound 1 / sqrt(24), variance bound^2 / 3
    bound = 1 / math.sqrt(24)
    assert 0.95 * bound < lora_A.abs().max().item() <= bound
    assert lora_A.var().item() == pytest.approx(bound**2 / 3, rel=0.1)
    assert not lora_B.any()


def test_the_start_depends_on_seed_and_module_alone() -> None:
    config = LoraConfig(rank=4)
    everything = LoraWeights(config, select_modules(FourLayers(), "all-linear").modules, seed=7)
    few = LoraWeights(config, reversed(select_modules(FourLayers(), ["q_proj"], [2]).modules), seed=7)
    name = "model.layers.2.self_attn.q_proj.lora_A"
    torch.manual_seed(123)
    assert torch.equal(everything.parameters()[name], few.parameters()[name])
    other_seed = LoraWeights(config, few.modules, seed=8).parameters()[name]
    other_layer = everything.parameters()["model.layers.1.self_attn.q_proj.lora_A"]
    assert not torch.equal(few.parameters()[name], other_seed)
    assert not torch.equal(few.parameters()[name], other_layer)


def test_parameter_count_is_exact() -> None:
    config = LoraConfig(rank=3, rank_pattern={"k_proj": 5})
    modules = select_modules(FourLayers(), ["q_proj", "k_proj", "lm_head"], ["last:2"]).modules
    expected = 2 * (3 * (16 + 16) + 5 * (8 + 16)) + 3 * (50 + 16)
    weights = LoraWeights(config, modules)
    assert weights.num_parameters == count_parameters(config, modules) == expected
    assert sum(parameter.numel() for parameter in weights.parameters().values()) == expected


def test_updates_hold_the_parameters_and_the_scale() -> None:
    modules = select_modules(FourLayers(), ["q_proj", "k_proj"]).modules
    plain = LoraWeights(LoraConfig(rank=4, alpha=8, dropout=0.25, alpha_pattern={"k_proj": 2.0}), modules)
    q_name, k_name = (f"model.layers.3.self_attn.{leaf}" for leaf in ("q_proj", "k_proj"))
    update = plain.updates()[q_name]
    assert update.lora_A is plain.parameters()[f"{q_name}.lora_A"]
    assert (update.scale, update.dropout, plain.updates()[k_name].scale) == (2.0, 0.25, 0.5)
    stabilised = LoraWeights(LoraConfig(rank=4, alpha=8, use_rslora=True), modules)
    assert stabilised.updates()[q_name].scale == 4.0


def test_names_by_layer_follow_the_forward_pass() -> None:
    weights = LoraWeights(LoraConfig(rank=2), select_modules(FourLayers(), ["q_proj", "lm_head"], [1, 3]).modules)
    grouped = weights.names_by_layer()
    assert list(grouped) == [1, 3, None]
    assert grouped[3] == [f"model.layers.3.self_attn.q_proj.lora_{part}" for part in "AB"]
    assert [name for names in grouped.values() for name in names] == list(weights.parameters())


@pytest.mark.parametrize(
    "options",
    [
        {"rank": 0},
        {"rank": 1.5},
        {"rank": True},
        {"alpha": 0},
        {"alpha": math.nan},
        {"alpha": "16"},
        {"dropout": 1.0},
        {"dropout": -0.1},
        {"dropout": math.nan},
        {"rank_pattern": {"q_proj": 0}},
        {"alpha_pattern": {"(": 1.0}},
    ],
)
def test_values_out_of_range_are_refused(options: dict[str, object]) -> None:
    with pytest.raises(ConfigError):
        LoraConfig(**options)
