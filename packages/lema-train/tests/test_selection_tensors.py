"""Which of a model's own tensors train: names within layers, the whole model, tied heads, exact counts."""

from __future__ import annotations

import fnmatch
from collections.abc import Sequence
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lema_core.adapter import TensorSpec
from lema_core.errors import ConfigError
from lema_core.selection import EntryCount, decayed, select_tensors

IN_A_BLOCK = (
    ("input_layernorm.weight", (16,), "norm"),
    ("self_attn.q_proj.weight", (16, 16), "linear"),
    ("self_attn.q_proj.bias", (16,), "bias"),
    ("self_attn.xq_proj.weight", (4, 16), "linear"),
    ("mlp.gate.weight", (2, 16), "router"),
    ("mlp.expert_bias", (2,), "buffer"),
    ("mlp.experts.0.gate_proj.weight", (8, 16), "expert"),
    ("mlp.experts.0.up_proj.weight", (8, 16), "expert"),
    ("mlp.experts.0.down_proj.weight", (16, 8), "expert"),
    ("mlp.experts.1.gate_proj.weight", (8, 16), "expert"),
    ("mlp.experts.1.up_proj.weight", (8, 16), "expert"),
    ("mlp.experts.1.down_proj.weight", (16, 8), "expert"),
)


@dataclass
class FourLayers:
    tied: bool = False
    n_layers: int = 4

    def tensors(self) -> Sequence[TensorSpec]:
        tied_to = "model.embed_tokens.weight" if self.tied else None
        blocks = [
            TensorSpec(
                f"model.layers.{layer}.{name}",
                shape,
                role,
                layer,
                expert=int(name.split(".")[2]) if role == "expert" else None,
            )
            for layer in range(self.n_layers)
            for name, shape, role in IN_A_BLOCK
        ]
        return (
            TensorSpec("model.embed_tokens.weight", (50, 16), "embedding"),
            TensorSpec("model.embed_positions.weight", (32, 16), "embedding"),
            *blocks,
            TensorSpec("model.norm.weight", (16,), "norm"),
            TensorSpec("lm_head.weight", (50, 16), "head", tied_to=tied_to),
            TensorSpec("lm_head.bias", (50,), "bias"),
        )


def names(modules: object = (), layers: object = None, tied: bool = False) -> list[str]:
    return [spec.name for spec in select_tensors(FourLayers(tied), modules, layers).tensors]


def like(*patterns: str, tied: bool = False) -> list[str]:
    """The oracle: what the patterns of a shell match, in forward order, without buffers and the tied head."""
    specs = [spec for spec in FourLayers(tied).tensors() if spec.role != "buffer" and spec.tied_to is None]
    return [spec.name for spec in specs if any(fnmatch.fnmatchcase(spec.name, each) for each in patterns)]


def refused(modules: object = (), layers: object = None) -> str:
    with pytest.raises(ConfigError) as caught:
        select_tensors(FourLayers(), modules, layers)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    ("modules", "layers", "expected"),
    [
        ([], [], ["*"]),
        ([], None, ["*"]),
        (["q_proj"], [], ["*.q_proj.*"]),
        ("q_proj", [], ["*.q_proj.*"]),
        (["self_attn.q_proj"], [], ["*.q_proj.*"]),
        (["self_attn"], [], ["*.self_attn.*"]),
        (["q_proj.bias"], [], ["*.q_proj.bias"]),
        (["bias"], [], ["*.bias"]),
        (["input_layernorm", "q_proj"], ["last:2"], ["*.[23].input_layernorm.*", "*.[23].*.q_proj.*"]),
        (["model.layers.1.self_attn"], [], ["*.1.self_attn.*"]),
        (["layers.1"], [], ["*.layers.1.*"]),
        (["model"], [], ["model.*"]),
        (["model"], [0], ["*.layers.0.*"]),
        (["mlp"], ["first:1"], ["*.layers.0.mlp.*"]),
        (["mlp.gate"], ["first:1"], ["*.layers.0.mlp.gate.*"]),
        (["experts"], [3], ["*.3.mlp.experts.*"]),
        (["experts.1"], [3], ["*.3.mlp.experts.1.*"]),
        (["gate_proj"], [3], ["*.3.mlp.experts.*.gate_proj.*"]),
        (["experts.gate_up_proj"], [3], ["*.3.mlp.experts.*.gate_proj.*", "*.3.mlp.experts.*.up_proj.*"]),
        (["experts.down_proj"], [3], ["*.3.mlp.experts.*.down_proj.*"]),
        ([], ["last:2"], ["*.layers.[23].*"]),
        ([], [3, "0", "Last:1"], ["*.layers.[03].*"]),
        ([], ["emb"], ["*embed_tokens*", "*embed_positions*"]),
        ([], ["HEAD"], ["lm_head.*"]),
        ([], ["emb", "head", "last:1"], ["*embed*", "lm_head.*", "*.layers.3.*"]),
        (["q_proj"], ["last:1", "emb"], ["*.3.*.q_proj.*", "*embed*"]),
        (["q_proj", "lm_head"], [1], ["*.1.*.q_proj.*", "lm_head.*"]),
        (["q_proj", "model.norm"], [1], ["*.1.*.q_proj.*", "model.norm.*"]),
        (["model.norm.weight"], [], ["model.norm.*"]),
        (["embed_tokens"], ["emb"], ["*embed*"]),
    ],
)
def test_what_is_selected(modules: object, layers: object, expected: list[str]) -> None:
    assert names(modules, layers) == like(*expected)


@pytest.mark.parametrize(
    ("modules", "layers", "message"),
    [
        (["q_proj", "nope"], [], "trainable_modules: 'nope' matches no tensor of this model (there are: "),
        (["q_poj"], [], "'q_poj' matches no tensor of this model; did you mean 'q_proj'?"),
        (["self_atn.q_proj"], [], "did you mean 'self_attn.q_proj'?"),
        (["proj"], [], "'proj' matches no tensor"),
        (["model.layers.4.self_attn"], [], "did you mean 'model.layers."),
        (["expert_bias"], [], "'expert_bias' matches no tensor"),
        ([""], [], "'' matches no tensor"),
        (["3"], [], "the name of a module expected, '3' found; layers are for trainable_layers"),
        (["norm"], ["last:2"], "'norm' matches nothing within trainable_layers, last:2 (only model.norm.weight)"),
        (["model.layers.0.mlp"], ["last:2", "emb"], "matches nothing within trainable_layers, last:2, emb (only "),
        (["embed_tokens"], ["head"], "'embed_tokens' matches nothing within trainable_layers, head"),
        (["lm_head"], ["last:2"], "trainable_layers: 'last:2' has nothing of trainable_modules, lm_head"),
        (["layers.1.mlp"], [0, 1], "trainable_layers: '0' has nothing of trainable_modules, layers.1.mlp"),
        ([], ["last:99"], "trainable_layers: last:1 to last:4 expected, 'last:99' found"),
        ([], ["first:0"], "trainable_layers: first:1 to first:4 expected, 'first:0' found"),
        ([], [7], "trainable_layers: a layer from 0 to 3 expected, 7 found"),
        ([], ["embd"], "'last:K', 'first:K', 'emb', 'head' or a layer's number expected, 'embd' found"),
    ],
)
def test_what_is_refused(modules: object, layers: object, message: str) -> None:
    assert message in refused(modules, layers)


@settings(max_examples=80, deadline=None)
@given(
    st.lists(st.sampled_from(["q_proj", "self_attn", "mlp", "experts", "gate", "bias"]), max_size=3),
    st.lists(st.sampled_from([0, 2, "last:1", "first:2"]), max_size=2),
)
def test_selections_are_unions_in_forward_order_and_exactly_counted(modules: list[str], layers: list[object]) -> None:
    selection = select_tensors(FourLayers(), modules, layers)
    blocks = {0: {0}, 2: {2}, "last:1": {3}, "first:2": {0, 1}}
    allowed = set().union(*(blocks[each] for each in layers)) if layers else {0, 1, 2, 3}
    expected = [
        spec
        for spec in FourLayers().tensors()
        if spec.role != "buffer"
        and (not modules or any(f".{each}." in f".{spec.name}." for each in modules))
        and (spec.layer in allowed or (spec.layer is None and not layers))
    ]
    assert list(selection.tensors) == expected
    sizes = [spec.shape[0] * (spec.shape[1] if len(spec.shape) > 1 else 1) for spec in expected]
    assert selection.num_parameters == sum(sizes)
    assert list(selection.counts) == list(dict.fromkeys(modules or [str(each) for each in layers]))


def test_counts_of_each_entry() -> None:
    selection = select_tensors(FourLayers(), ["self_attn", "q_proj.bias", "experts"], ["last:2", "head"])
    assert selection.counts == {
        "self_attn": EntryCount(modules=4, tensors=6, parameters=2 * (16 * 16 + 16 + 4 * 16)),
        "q_proj.bias": EntryCount(modules=2, tensors=2, parameters=2 * 16),
        "experts": EntryCount(modules=12, tensors=12, parameters=12 * 8 * 16),
        "head": EntryCount(modules=1, tensors=2, parameters=50 * 17),
    }
    assert selection.num_parameters == 2 * 336 + 12 * 128 + 850  # q_proj.bias is part of self_attn
    assert selection.describe() == (
        "3,058 parameters in 20 tensors train in layers 2-3 and outside the layers "
        "(self_attn: 4 modules, 6 tensors, 672 parameters; q_proj.bias: 2 modules, 2 tensors, 32 parameters; "
        "experts: 12 modules, 12 tensors, 1,536 parameters; head: 1 module, 2 tensors, 850 parameters)"
    )


def test_the_whole_model_leaves_buffers_out() -> None:
    selection = select_tensors(FourLayers())
    assert not [spec for spec in selection.tensors if spec.role == "buffer"]
    assert selection.counts == {} and selection.tied == ()
    assert selection.describe() == f"the whole model trains: {selection.num_parameters:,} parameters in 49 tensors"


def test_a_tied_head_is_the_embedding_and_said_to_be() -> None:
    shared = "model.embed_tokens.weight"
    for modules, layers in ([], ["head"]), (["lm_head.weight"], []), ([shared], []), (["lm_head"], ["last:1", "head"]):
        if layers == ["last:1", "head"]:
            modules = [*modules, "q_proj"]
        selection = select_tensors(FourLayers(tied=True), modules, layers)
        assert selection.tensors[0].name == shared and [spec.name for spec in selection.tied] == ["lm_head.weight"]
        assert selection.describe().endswith(
            f"; lm_head.weight is tied to {shared}: they are one tensor, which trains with the sum of both gradients"
        )
    both = select_tensors(FourLayers(tied=True), [], ["emb", "head"])
    assert [spec.name for spec in both.tensors] == like("*embed*", "lm_head.bias", tied=True)
    assert both.num_parameters == 50 * 16 + 32 * 16 + 50  # shared numbers count once
    assert both.counts["head"] == EntryCount(1, 2, 50 * 17)
    assert select_tensors(FourLayers(tied=True), ["q_proj"]).tied == ()


def test_matrices_decay_and_norms_and_biases_do_not() -> None:
    decaying = {spec.role for spec in FourLayers().tensors() if decayed(spec)}
    assert decaying == {"embedding", "linear", "router", "expert", "head"}
    assert {spec.role for spec in FourLayers().tensors() if not decayed(spec)} == {"norm", "bias", "buffer"}
    assert decayed(TensorSpec("model.layers.0.conv.conv.weight", (16, 1, 3), "conv", 0))
