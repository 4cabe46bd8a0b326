"""Rotary embeddings against transformers' own tables and rotation."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from lema_core.errors import ConfigError
from lema_core.ops.elementwise import TorchElementwise, rotary
from lema_models.rope import RopeConfig, rotary_tables

LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
LLAMA32 = {"factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


def transformers_rope(block: dict[str, Any], head_dim: int) -> LlamaRotaryEmbedding:
    config = LlamaConfig(
        hidden_size=2 * head_dim, num_attention_heads=2, max_position_embeddings=4096, rope_parameters=block
    )
    return LlamaRotaryEmbedding(config)


@pytest.mark.parametrize(
    "block",
    [
        {"rope_type": "default", "rope_theta": 10000.0},
        {"rope_type": "default", "rope_theta": 500000.0},
        {"rope_type": "llama3", "rope_theta": 10000.0, **LLAMA3},
        {"rope_type": "llama3", "rope_theta": 500000.0, **LLAMA32},
    ],
)
@pytest.mark.parametrize("head_dim", [16, 64, 128])
def test_tables_and_rotation(block, head_dim) -> None:
    theirs = transformers_rope(block, head_dim)
    rope = RopeConfig.from_hf_config({"rope_parameters": block})
    assert torch.equal(rope.inverse_frequencies(head_dim), theirs.inv_freq)
    positions = torch.tensor([[0, 1, 2, 63, 64, 2047], [5, 6, 7, 8, 9, 4095]])
    q, k = (torch.randn(2, 2, 6, head_dim, generator=torch.Generator().manual_seed(s)) for s in (0, 1))
    expected = apply_rotary_pos_emb(q, k, *theirs(q, positions))
    tables = rotary_tables(rope, head_dim, positions)
    kernel = TorchElementwise()
    for found, wanted in zip((rotary(kernel, q, tables), rotary(kernel, k, tables)), expected, strict=True):
        assert (found - wanted).abs().max() <= 1e-6


def test_tables_of_a_token_do_not_depend_on_the_others() -> None:
    """Bit for bit, and in the layout of the activations that they turn."""
    rope, positions = RopeConfig(10000.0), torch.arange(3000, 3077).view(7, 11)
    whole = rotary_tables(rope, 20, positions)
    for table in whole:
        assert table.shape == (7, 1, 11, 10) and table.permute(3, 0, 1, 2).flatten(1).is_contiguous()
    for start, stop in ((0, 1), (5, 11)):
        for part, table in zip(rotary_tables(rope, 20, positions[2:3, start:stop]), whole, strict=True):
            assert torch.equal(part, table[2:3, :, start:stop])


@pytest.mark.parametrize(
    "config",
    [
        {"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, **LLAMA3}},
        {"rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", **LLAMA3}},
        {"rope_theta": 5e5, "rope_scaling": {"type": "llama3", **LLAMA3}},
        {"rope_theta": 5e5, "rope_scaling": {"type": "llama3", "rope_type": "llama3", **LLAMA3}},
    ],
)
def test_spellings_are_one(config) -> None:
    assert RopeConfig.from_hf_config(config) == RopeConfig(5e5, "llama3", 8.0, 1.0, 4.0, 64)


def test_two_blocks_are_read_as_transformers_does() -> None:
    """rope_scaling wins over rope_parameters, a theta inside the block over one beside it."""
    config = {
        "rope_theta": 2e4,
        "rope_parameters": {"rope_type": "default", "rope_theta": 7e5},
        "rope_scaling": {"rope_type": "llama3", **LLAMA3},
    }
    for change in ({}, {"rope_scaling": None}, {"rope_scaling": {"type": "llama3", "rope_theta": 3e4, **LLAMA3}}):
        changed = {**config, **change}
        theirs = LlamaRotaryEmbedding(LlamaConfig(head_dim=32, max_position_embeddings=4096, **changed))
        assert torch.equal(RopeConfig.from_hf_config(changed).inverse_frequencies(32), theirs.inv_freq), change


@pytest.mark.parametrize("config", [{}, {"rope_scaling": None}, {"rope_theta": 10000.0, "rope_parameters": {}}])
def test_plain_by_default(config) -> None:
    assert RopeConfig.from_hf_config(config) == RopeConfig(10000.0)


@pytest.mark.parametrize("key", ["type", "rope_type"])
@pytest.mark.parametrize("kind", ["linear", "dynamic", "yarn", "longrope", "proportional", "mystery"])
def test_other_types_are_refused_by_name(kind, key) -> None:
    with pytest.raises(ConfigError, match=f"'{kind}'"):
        RopeConfig.from_hf_config({"rope_scaling": {key: kind, "factor": 2.0}})


def test_missing_numbers_are_named() -> None:
    with pytest.raises(ConfigError, match="lacks factor, original_max_position_embeddings"):
        RopeConfig.from_hf_config({"rope_scaling": {"type": "llama3", "low_freq_factor": 1, "high_freq_factor": 4}})
