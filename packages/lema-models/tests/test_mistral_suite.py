"""Mistral through lema_core alone, against transformers and PEFT."""

from __future__ import annotations

import pytest
from transformers import MistralConfig as TheirConfig

from lema_core.errors import ConfigError
from lema_core.records import load_object
from lema_core.testing.adapter_suite import AdapterSuite
from lema_models.mistral import MistralAdapter, MistralConfig
from lema_models.plugin import lema_architectures

SIZES = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 90,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e6,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
    "beta_fast": 8.0,
}


@pytest.mark.slow
class TestMistral(AdapterSuite):
    adapter = MistralAdapter
    hf_config = {"model_type": "mistral", **SIZES, "max_position_embeddings": 128, "sliding_window": None}
    variants = {
        "no window": {},
        "tied, window": {"tie_word_embeddings": True, "sliding_window": 5},
        "two keys": {"sliding_window": 2, "num_hidden_layers": 3},
        "wide window": {"sliding_window": 4096, "rope_parameters": {"rope_type": "linear", "factor": 2.0}},
        "odd heads, yarn": {
            "hidden_size": 72,
            "head_dim": 20,
            "num_attention_heads": 6,
            "num_key_value_heads": 3,
            "rms_norm_eps": 1e-2,
            "sliding_window": 7,
            "rope_parameters": YARN,
        },
    }
    slow = frozenset({"no window", "two keys", "wide window", "odd heads, yarn"})
    buffers = {"model.layers.0.self_attn.rotary_emb.inv_freq": (8,)}


def test_the_record_names_the_adapter() -> None:
    (record,) = (each for each in lema_architectures() if each.name == "mistral")
    assert record.model_types == ("mistral",) and load_object(record.adapter) is MistralAdapter


@pytest.mark.parametrize("changes", [{}, {"sliding_window": None}, {"sliding_window": 32}, {"head_dim": 20}])
@pytest.mark.parametrize("without", [(), ("num_key_value_heads",)])
def test_what_is_left_out_means_what_it_means_to_transformers(changes, without) -> None:
    """Above all the window, which the first version's files do not state."""
    given = {**SIZES, "num_attention_heads": 8, **changes}
    given = {name: value for name, value in given.items() if name not in without}
    theirs, ours = TheirConfig(**given), MistralConfig.from_hf_config(given)
    assert ours.window == theirs.sliding_window
    assert (ours.heads.n_kv, ours.heads.dim) == (theirs.num_key_value_heads, theirs.head_dim)
    assert (ours.max_positions, ours.norm_eps) == (theirs.max_position_embeddings, theirs.rms_norm_eps)
    assert ours.rope.rope_theta == theirs.rope_parameters["rope_theta"]


def test_fields_that_are_wrong() -> None:
    with pytest.raises(ConfigError, match="sliding_window=0; a whole number above 0 expected"):
        MistralConfig.from_hf_config({**SIZES, "sliding_window": 0})
    with pytest.warns(UserWarning, match="layer_types=.* is not applied"):
        MistralConfig.from_hf_config({**SIZES, "layer_types": ["full_attention"] * 2})
