"""What Llama's adapter says of itself, and the configs it refuses; test_llama_suite.py has its numbers."""

from __future__ import annotations

import pytest

from lema_core.errors import ConfigError
from lema_core.records import load_object
from lema_models.llama import LlamaAdapter
from lema_models.plugin import lema_architectures


def test_the_record_names_the_adapter_without_importing_it() -> None:
    (record,) = (each for each in lema_architectures() if each.name == "llama")
    assert record.model_types == ("llama",) and load_object(record.adapter) is LlamaAdapter


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"hidden_size": None}, "hidden_size"),
        ({"num_key_value_heads": 3}, "num_attention_heads=4 .* num_key_value_heads=3"),
        ({"hidden_size": 66}, "hidden_size=66 .* num_attention_heads=4"),
        ({"head_dim": 15}, "head_dim=15 is odd"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu'"),
        ({"rope_parameters": {"rope_type": "longrope", "factor": 2.0}}, "'longrope' is not supported"),
        ({"rope_parameters": {"rope_type": "llama3", "factor": 8.0}}, "lacks low_freq_factor"),
    ],
)
def test_fields_that_contradict_each_other(changes, words) -> None:
    config = {
        "vocab_size": 96,
        "hidden_size": 64,
        "intermediate_size": 80,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }
    LlamaAdapter.from_hf_config(config)
    with pytest.raises(ConfigError, match=words):
        LlamaAdapter.from_hf_config({**config, **changes})
