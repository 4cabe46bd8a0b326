"""What config.json may say, and the one line that a wrong field gets."""

from __future__ import annotations

import warnings

import pytest

from lema_core.blocks.config import Heads, HfConfig
from lema_core.errors import ConfigError


def test_missing_fields_are_named_together() -> None:
    hf = HfConfig({"hidden_size": 8, "vocab_size": None})
    hf.require("hidden_size")
    with pytest.raises(ConfigError, match=r"^config\.json lacks vocab_size, num_hidden_layers$"):
        hf.require("vocab_size", "hidden_size", "num_hidden_layers")


def test_defaults() -> None:
    hf = HfConfig({"null": None})
    assert hf.size("absent", 3) == hf.size("null", 3) == 3 and hf.number("null", 1e-5) == 1e-5
    assert hf.count("null", 0) == 0 and HfConfig({"none": 0}).count("none", 28) == 0
    assert hf.flag("null", default=True) and not hf.flag("absent")
    assert hf.optional_size("absent", 4096) == 4096 and hf.optional_size("null", 4096) is None
    assert hf.expect("null", "silu", "swish") == "silu"
    with pytest.raises(ConfigError, match="lacks null"):
        hf.size("null")


@pytest.mark.parametrize(
    ("read", "value", "words"),
    [
        (lambda hf: hf.size("x"), "64", "x='64'; a whole number above 0 expected"),
        (lambda hf: hf.size("x"), 0, "x=0; a whole number"),
        (lambda hf: hf.size("x"), 2.0, r"x=2\.0; a whole number"),
        (lambda hf: hf.size("x"), True, "x=True; a whole number"),
        (lambda hf: hf.optional_size("x"), -1, "x=-1; a whole number"),
        (lambda hf: hf.count("x", 2), -1, "x=-1; a whole number expected, 0 or more"),
        (lambda hf: hf.number("x", 1.0), "1e-5", "x='1e-5'; a number expected"),
        (lambda hf: hf.number("x", 1.0), False, "x=False; a number expected"),
        (lambda hf: hf.flag("x"), "true", "x='true'; true or false expected"),
        (lambda hf: hf.flag("x"), 1, "x=1; true or false expected"),
        (lambda hf: hf.expect("x", "silu", "swish"), "gelu", "x='gelu' .* 'silu' or 'swish' expected"),
    ],
)
def test_wrong_values_are_named(read, value, words) -> None:
    with pytest.raises(ConfigError, match=words):
        read(HfConfig({"x": value}))


def test_layer_types() -> None:
    kinds = "full_attention", "conv"
    assert HfConfig({"layer_types": None}).layer_types(2, *kinds) is None
    assert HfConfig({"layer_types": ["conv", "full_attention"]}).layer_types(2, *kinds) == ("conv", "full_attention")
    with pytest.raises(ConfigError, match="layer_types: 3 times 'full_attention' or 'conv' expected, 1 entries found"):
        HfConfig({"layer_types": ["conv"]}).layer_types(3, *kinds)
    with pytest.raises(ConfigError, match="expected, 'mystery' found"):
        HfConfig({"layer_types": ["conv", "mystery"]}).layer_types(2, *kinds)


def test_what_is_not_applied_is_told() -> None:
    with pytest.warns(UserWarning, match=r"attention_dropout=0\.1 is not applied"):
        HfConfig({"attention_dropout": 0.1}).not_applied("attention_dropout", "absent")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        HfConfig({"attention_dropout": 0.0, "other": None}).not_applied("attention_dropout", "other")


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, Heads(4, 4, 16)),
        ({"num_key_value_heads": 2, "head_dim": 20}, Heads(4, 2, 20)),
        ({"num_key_value_heads": None, "head_dim": None}, Heads(4, 4, 16)),
        ({"hidden_size": 66, "head_dim": 16}, Heads(4, 4, 16)),
    ],
)
def test_heads(changes, expected) -> None:
    assert Heads.from_hf_config(HfConfig({"hidden_size": 64, "num_attention_heads": 4, **changes})) == expected


def test_an_architecture_has_defaults_of_its_own() -> None:
    hf = HfConfig({"hidden_size": 64, "num_attention_heads": 4})
    assert Heads.from_hf_config(hf, default_n_kv=2, default_dim=128) == Heads(4, 2, 128)
    assert Heads.from_hf_config(HfConfig({**hf, "num_key_value_heads": None}), default_n_kv=2) == Heads(4, 4, 16)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_key_value_heads": 3}, "num_attention_heads=4 is not a multiple of num_key_value_heads=3"),
        ({"hidden_size": 66}, "hidden_size=66 is not a multiple of num_attention_heads=4"),
        ({"head_dim": 15}, "head_dim=15 is odd"),
    ],
)
def test_heads_that_contradict_each_other(changes, words) -> None:
    with pytest.raises(ConfigError, match=words):
        Heads.from_hf_config(HfConfig({"hidden_size": 64, "num_attention_heads": 4, **changes}))


@pytest.mark.parametrize(
    ("changes", "default", "expected"),
    [
        ({}, None, None),
        ({}, 0, 0),
        ({"pad_token_id": None}, 0, None),
        ({"pad_token_id": 7}, 0, 7),
        ({"pad_token_id": -1}, None, 9),
        ({"pad_token_id": 10}, None, None),
    ],
)
def test_token_ids(changes, default, expected) -> None:
    """A negative one as torch's embedding counts it."""
    assert HfConfig(changes).token_id("pad_token_id", 10, default) == expected


@pytest.mark.parametrize("wrong", ["0", True, 1.0])
def test_what_is_no_token_id(wrong) -> None:
    with pytest.raises(ConfigError, match=r"pad_token_id=.* a token id expected"):
        HfConfig({"pad_token_id": wrong}).token_id("pad_token_id", 10)
