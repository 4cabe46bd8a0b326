"""Rotary embeddings against transformers' own tables and rotation."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, PhiConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb
from transformers.models.phi.modeling_phi import PhiRotaryEmbedding

from lema_core.blocks.attention import turned
from lema_core.blocks.rope import KINDS, Llama3Rope, RopeConfig, rotary_tables
from lema_core.errors import ConfigError
from lema_core.ops.context import ForwardContext, Segment
from lema_core.ops.elementwise import TorchElementwise, rotary

LONGEST = 64
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 16}
BLOCKS: dict[str, dict[str, Any]] = {
    "plain": {"rope_type": "default", "rope_theta": 10000.0},
    "theta": {"rope_type": "default", "rope_theta": 500000.0},
    "linear": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.5},
    "dynamic": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.3},
    "llama31": {"rope_type": "llama3", "rope_theta": 10000.0, **LLAMA3},
    "llama32": {
        "rope_type": "llama3",
        "rope_theta": 5e5,
        **LLAMA3,
        "factor": 32.0,
        "original_max_position_embeddings": 8192,
    },
    "yarn": YARN,
    "yarn_ramp": {**YARN, "beta_fast": 4.0, "beta_slow": 2.0},
    "yarn_whole": {**YARN, "truncate": False},
    "yarn_factor": {**YARN, "attention_factor": 1.3},
    "yarn_mscale": {**YARN, "mscale": 0.707, "mscale_all_dim": 1.0},
    "yarn_one_mscale": {**YARN, "mscale": 0.707},
    "yarn_deepseek": {**YARN, "factor": None},
}
POSITIONS = torch.tensor([[0, 1, 2, 60, 63], [5, 6, 7, 8, 9]])


def transformers_rope(head_dim: int, **changes: Any) -> LlamaRotaryEmbedding:
    sizes = {"hidden_size": 2 * head_dim, "num_attention_heads": 2, "max_position_embeddings": LONGEST}
    return LlamaRotaryEmbedding(LlamaConfig(**{**sizes, **changes}))


def ours(**changes: Any) -> RopeConfig:
    return RopeConfig.from_hf_config({"max_position_embeddings": LONGEST, **changes})


def tables_at(rope: RopeConfig, head_dim: int, positions_BT: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return rotary_tables(rope, head_dim, ForwardContext(positions_BT))


@pytest.mark.parametrize("block", BLOCKS.values(), ids=BLOCKS)
@pytest.mark.parametrize("head_dim", [16, 20, 128])
def test_frequencies_are_transformers_bits(block, head_dim) -> None:
    theirs = transformers_rope(head_dim, rope_parameters=dict(block))
    rope = ours(rope_parameters=block)
    assert torch.equal(rope.inverse_frequencies(head_dim), theirs.inv_freq)
    assert rope.table_factor == pytest.approx(theirs.attention_scaling, rel=1e-12)


@pytest.mark.parametrize("block", BLOCKS.values(), ids=BLOCKS)
@pytest.mark.parametrize("last", [4, LONGEST - 1, LONGEST, 4095])
def test_rotation(block, last) -> None:
    """Within the longest sequence, one beyond it, and far beyond."""
    theirs = transformers_rope(32, rope_parameters=dict(block))
    positions = POSITIONS.clone()
    positions[0, -1] = last
    q, k = (torch.randn(2, 2, 5, 32, generator=torch.Generator().manual_seed(s)) for s in (0, 1))
    expected = apply_rotary_pos_emb(q, k, *theirs(q, positions))
    tables = tables_at(ours(rope_parameters=block), 32, positions)
    kernel = TorchElementwise()
    for found, wanted in zip((rotary(kernel, q, tables), rotary(kernel, k, tables)), expected, strict=True):
        assert (found - wanted).abs().max() <= 1e-6


def test_the_gradient_of_a_scaled_rotation() -> None:
    tables = tables_at(ours(rope_parameters=BLOCKS["yarn_factor"]), 8, POSITIONS[:1])
    x = torch.randn(1, 2, 5, 8, dtype=torch.float32, generator=torch.Generator().manual_seed(0)).requires_grad_()
    dy = torch.randn(x.shape, generator=torch.Generator().manual_seed(1))
    (dx,) = torch.autograd.grad(rotary(TorchElementwise(), x, tables), x, dy)
    first, second = x.chunk(2, dim=-1)
    cos, sin = tables
    plain = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    (expected,) = torch.autograd.grad(plain, x, dy)
    assert (dx - expected).abs().max() <= 1e-6


def test_tables_of_a_token_do_not_depend_on_the_others() -> None:
    """Bit for bit, and in the layout of the activations that they turn."""
    rope, positions = RopeConfig(rope_theta=10000.0), torch.arange(3000, 3077).view(7, 11)
    whole = tables_at(rope, 20, positions)
    for table in whole:
        assert table.shape == (7, 1, 11, 10) and table.permute(3, 0, 1, 2).flatten(1).is_contiguous()
    for start, stop in ((0, 1), (5, 11)):
        for part, table in zip(tables_at(rope, 20, positions[2:3, start:stop]), whole, strict=True):
            assert torch.equal(part, table[2:3, :, start:stop])


def test_packed_micro_batches_have_each_their_own_length() -> None:
    """The largest position among a micro-batch's rows, as alone: within the longest, far beyond it, just beyond it."""
    rope = ours(rope_parameters=BLOCKS["dynamic"])
    micro_batches = [torch.arange(10).expand(2, -1), torch.arange(300)[None], torch.arange(65)[None]]
    segments, start = [], 0
    for rows in micro_batches:
        segments.append(Segment(start, start + rows.numel(), *rows.shape))
        start += rows.numel()
    packed = torch.cat([rows.reshape(-1) for rows in micro_batches])[None]
    together = rotary_tables(rope, 16, ForwardContext(packed, segments=tuple(segments)))
    for segment, positions in zip(segments, micro_batches, strict=True):
        theirs = transformers_rope(16, rope_parameters=dict(BLOCKS["dynamic"]))(torch.zeros(1), positions)
        alone = tables_at(rope, 16, positions)
        for packed_table, table, wanted in zip(together, alone, theirs, strict=True):
            assert torch.equal(packed_table[0, 0, segment.start : segment.stop], table[:, 0].reshape(-1, 8))
            assert (table[:, 0] - wanted[..., :8]).abs().max() <= 1e-6
    long, short = (together[0][0, 0, segment.start : segment.start + 65] for segment in segments[1:])
    assert not torch.equal(long, short)


def test_dynamic_while_tokens_come_one_by_one() -> None:
    """As transformers' module, called again for each token: the frequencies of the largest position so far."""
    rope = ours(rope_parameters=BLOCKS["dynamic"])
    theirs = transformers_rope(16, rope_parameters=dict(BLOCKS["dynamic"]))
    calls = [torch.arange(60)[None], *(torch.tensor([[position]]) for position in range(60, 70))]
    for positions in calls:
        for found, wanted in zip(tables_at(rope, 16, positions), theirs(torch.zeros(1), positions), strict=True):
            assert (found[:, 0] - wanted[..., :8]).abs().max() <= 1e-6


@pytest.mark.parametrize("kind", ["plain", "linear", "dynamic", "yarn", "llama31"])
def test_a_part_of_each_head(kind) -> None:
    """Phi turns the first features of each head only."""
    block = {**BLOCKS[kind], "partial_rotary_factor": 0.5}
    config = PhiConfig(
        hidden_size=64, num_attention_heads=2, max_position_embeddings=LONGEST, rope_parameters=dict(block)
    )
    theirs = PhiRotaryEmbedding(config)
    rope = RopeConfig.from_hf_config({"max_position_embeddings": LONGEST, "rope_parameters": block}, partial=True)
    assert torch.equal(rope.inverse_frequencies(32), theirs.inv_freq)
    x = torch.randn(2, 3, 5, 32, generator=torch.Generator().manual_seed(0))
    cos, sin = theirs(x, POSITIONS)
    expected = torch.cat((apply_rotary_pos_emb(x[..., :16], x[..., :16], cos, sin)[0], x[..., 16:]), dim=-1)
    found = turned(_Rotary(), x, tables_at(rope, 32, POSITIONS))
    assert (found - expected).abs().max() <= 1e-6 and torch.equal(found[..., 16:], x[..., 16:])
    config = {"max_position_embeddings": LONGEST, "partial_rotary_factor": 0.5, "rope_parameters": BLOCKS[kind]}
    assert RopeConfig.from_hf_config(config, partial=True) == rope
    with pytest.raises(ConfigError, match=r"partial_rotary_factor=0\.5"):
        RopeConfig.from_hf_config(config)


class _Rotary:
    """What ``turned`` needs of ops."""

    def rotary(self, x: torch.Tensor, tables: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        return rotary(TorchElementwise(), x, tables)


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
    expected = Llama3Rope(
        rope_theta=5e5,
        factor=8.0,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        original_max_position_embeddings=64,
    )
    assert RopeConfig.from_hf_config(config) == expected


@pytest.mark.parametrize("block", BLOCKS.values(), ids=BLOCKS)
def test_the_old_spelling_of_each_kind(block) -> None:
    old = {"rope_theta": block["rope_theta"], "rope_scaling": {k: v for k, v in block.items() if k != "rope_theta"}}
    old["rope_scaling"]["type"] = old["rope_scaling"].pop("rope_type")
    assert ours(**old) == ours(rope_parameters=block)


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"rope_scaling": None},
        {"rope_scaling": {"type": "llama3", "rope_theta": 3e4, **LLAMA3}},
        {"original_max_position_embeddings": 32},
        {"rope_scaling": {"type": "yarn", "factor": 4.0}},
        {"rope_scaling": {"type": "linear", "rope_type": "dynamic", "factor": 3.0}},
    ],
)
def test_where_numbers_stand_twice_or_not_at_all(change) -> None:
    """rope_scaling wins over rope_parameters, a theta inside the block over one beside it, an original length beside
    the block over one inside, max_position_embeddings stands in for it, rope_type wins over type."""
    config = {
        "rope_theta": 2e4,
        "rope_parameters": {"rope_type": "default", "rope_theta": 7e5},
        "rope_scaling": {"rope_type": "llama3", **LLAMA3},
    }
    changed = {**config, **change}
    expected = transformers_rope(32, **copy.deepcopy(changed))
    assert torch.equal(ours(**changed).inverse_frequencies(32), expected.inv_freq)


@pytest.mark.parametrize("config", [{}, {"rope_scaling": None}, {"rope_theta": 10000.0, "rope_parameters": {}}])
def test_plain_by_default(config) -> None:
    assert RopeConfig.from_hf_config(config) == RopeConfig(rope_theta=10000.0)


@pytest.mark.parametrize("key", ["type", "rope_type"])
@pytest.mark.parametrize("kind", ["longrope", "proportional", "mystery"])
def test_other_types_are_refused_by_name(kind, key) -> None:
    with pytest.raises(ConfigError, match=f"'{kind}'"):
        RopeConfig.from_hf_config({"rope_scaling": {key: kind, "factor": 2.0}})


def test_every_kind_is_one_of_transformers() -> None:
    assert set(KINDS) <= {"default", *ROPE_INIT_FUNCTIONS}


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (
            {"rope_scaling": {"type": "llama3", "low_freq_factor": 1, "high_freq_factor": 4}},
            "lacks factor, original_max_position_embeddings",
        ),
        ({"rope_scaling": {"type": "linear"}}, "'linear' lacks factor"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "'dynamic' lacks max_position_embeddings"),
        ({"rope_scaling": {"type": "yarn"}, "max_position_embeddings": 64}, "'yarn' lacks factor"),
        ({"rope_scaling": {"type": "linear", "factor": "2"}}, "factor='2' of rope_type 'linear'; a number"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "for full_attention; one set"),
    ],
)
def test_what_is_missing_or_wrong_is_named(config, words) -> None:
    with pytest.raises(ConfigError, match=words):
        RopeConfig.from_hf_config(config)


def test_numbers_that_a_kind_has_no_use_for_are_named() -> None:
    """Above all a factor without a type, which transformers leaves out too."""
    with pytest.warns(UserWarning, match="'default' has no use for factor"):
        assert ours(rope_scaling={"factor": 2.0}) == RopeConfig(rope_theta=10000.0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for block in BLOCKS.values():
            ours(rope_parameters=block)
