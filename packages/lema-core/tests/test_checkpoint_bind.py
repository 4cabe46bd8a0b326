"""The names of files meet the names of models."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from lema_core.adapter import ModelAdapter, TensorSpec
from lema_core.checkpoint import bind_tensors, read_manifest, read_tensor
from lema_core.errors import CheckpointError

HIDDEN, VOCAB, FEED_FORWARD = 4, 6, 8


class TwoMatrixAdapter(ModelAdapter):
    """A model of an embedding, blocks of two matrices, a norm and a head; only its tensors matter here."""

    prefixes: ClassVar[tuple[str, ...]] = ("model.", "", "model.language_model.", "language_model.model.")
    ignored: ClassVar[tuple[str, ...]] = (r"rotary_emb\.inv_freq$",)

    def __init__(self, n_layers: int = 3, tied: bool = False, feed_forward: int = FEED_FORWARD) -> None:
        self.n_layers, self.tied, self.feed_forward = n_layers, tied, feed_forward
        self.hidden_size, self.vocab_size, self.max_positions = HIDDEN, VOCAB, None

    def tensors(self) -> Sequence[TensorSpec]:
        embedding = "model.embed_tokens.weight"
        specs = [TensorSpec(embedding, (VOCAB, HIDDEN), "embedding")]
        for layer in range(self.n_layers):
            root = f"model.layers.{layer}.mlp"
            specs.append(TensorSpec(f"{root}.up_proj.weight", (self.feed_forward, HIDDEN), "linear", layer))
            specs.append(TensorSpec(f"{root}.down_proj.weight", (HIDDEN, self.feed_forward), "linear", layer))
        specs.append(TensorSpec("model.norm.weight", (HIDDEN,), "norm"))
        tied_to = embedding if self.tied else None
        specs.append(TensorSpec("lm_head.weight", (VOCAB, HIDDEN), "head", tied_to=tied_to))
        return specs


# only what the model's tensors are called matters here, so the math stays abstract
TwoMatrixAdapter.__abstractmethods__ = frozenset()


def weights(n_layers: int = 3, head: bool = True) -> dict[str, Tensor]:
    torch.manual_seed(0)
    specs = TwoMatrixAdapter(n_layers).tensors()
    return {spec.name: torch.randn(spec.shape) for spec in specs if head or spec.name != "lm_head.weight"}


def renamed(prefix: str, head: str) -> dict[str, Tensor]:
    return {
        head if name == "lm_head.weight" else prefix + name.removeprefix("model."): tensor
        for name, tensor in weights().items()
    }


def bind(folder: Path, tensors: dict[str, Tensor], adapter: TwoMatrixAdapter | None = None) -> dict[str, Tensor]:
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    bound = bind_tensors(read_manifest(folder), adapter or TwoMatrixAdapter())
    return {name: read_tensor(info) for name, info in bound.items()}


def assert_equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.parametrize(
    ("prefix", "head"),
    [
        ("model.", "lm_head.weight"),
        ("", "lm_head.weight"),
        ("model.language_model.", "lm_head.weight"),
        ("model.language_model.", "model.lm_head.weight"),
        ("language_model.model.", "language_model.lm_head.weight"),
        ("language_model.model.", "lm_head.weight"),
    ],
)
def test_prefixes(tmp_path: Path, recwarn: pytest.WarningsRecorder, prefix: str, head: str) -> None:
    found = bind(tmp_path, renamed(prefix, head))
    assert_equal(found, weights())
    assert list(found) == [spec.name for spec in TwoMatrixAdapter().tensors()]
    assert not recwarn.list


def test_an_unknown_prefix_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"model\.embed_tokens\.weight expected.*vision\.embed_tokens\.weight"):
        bind(tmp_path, renamed("vision.", "vision.head"))


def test_two_full_sets_are_ambiguous(tmp_path: Path) -> None:
    both = renamed("model.", "lm_head.weight") | renamed("model.language_model.", "lm_head.weight")
    with pytest.raises(CheckpointError, match=r"'model\.' and 'model\.language_model\.'"):
        bind(tmp_path, both)


def test_two_heads_are_ambiguous(tmp_path: Path) -> None:
    tensors = renamed("language_model.model.", "language_model.lm_head.weight")
    tensors["lm_head.weight"] = torch.zeros(VOCAB, HIDDEN)
    with pytest.raises(CheckpointError, match=r"lm_head\.weight and language_model\.lm_head\.weight"):
        bind(tmp_path, tensors)


def test_ignored_tensors_are_dropped_silently_and_unknown_ones_named(
    tmp_path: Path, recwarn: pytest.WarningsRecorder
) -> None:
    tensors = weights() | {f"model.layers.{i}.self_attn.rotary_emb.inv_freq": torch.ones(2) for i in range(3)}
    assert_equal(bind(tmp_path, tensors), weights())
    assert not recwarn.list
    with pytest.warns(UserWarning, match=r"1 tensors .*: foo\.weight"):
        assert_equal(bind(tmp_path, tensors | {"foo.weight": torch.ones(1)}), weights())


@pytest.mark.parametrize("prefix", ["model.", ""])
def test_more_layers_in_the_file_than_in_the_config(tmp_path: Path, prefix: str) -> None:
    tensors = {prefix + name.removeprefix("model."): tensor for name, tensor in weights(4).items()}
    tensors["lm_head.weight"] = tensors.pop(prefix + "lm_head.weight")
    with pytest.raises(CheckpointError, match=rf"says 3 layers, the files have 4: layer 3 .*{prefix}layers\.3\.mlp"):
        bind(tmp_path, tensors)


def test_fewer_layers_in_the_file_than_in_the_config(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError) as caught:
        bind(tmp_path, weights(3), TwoMatrixAdapter(5))
    message = str(caught.value)
    assert "4 tensors of the model are not in its files (layers 3-4): model.layers.3.mlp.up_proj.weight" in message
    assert "says 5 layers, the files have 3" in message and "\n" not in message


def test_one_missing_tensor_is_named(tmp_path: Path) -> None:
    tensors = weights()
    del tensors["model.layers.1.mlp.down_proj.weight"], tensors["model.norm.weight"]
    with pytest.raises(
        CheckpointError, match=r"\(layer 1 and outside the layers\): .*1\.mlp\.down_proj\.weight, model\.norm"
    ):
        bind(tmp_path, tensors)


def test_shape_mismatch_names_expected_and_found(tmp_path: Path) -> None:
    expected = r"'model\.layers\.0\.mlp\.up_proj\.weight': shape \[16, 4\] expected from the config, \[8, 4\] found"
    with pytest.raises(CheckpointError, match=expected):
        bind(tmp_path, weights(), TwoMatrixAdapter(feed_forward=FEED_FORWARD + 8))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_stays(tmp_path: Path, dtype: torch.dtype) -> None:
    tensors = {name: tensor.to(dtype) for name, tensor in weights().items()}
    assert_equal(bind(tmp_path, tensors), tensors)


@pytest.mark.parametrize("dtype", [torch.float64, torch.int8, torch.float8_e4m3fn])
def test_other_dtypes_are_refused(tmp_path: Path, dtype: torch.dtype) -> None:
    tensors = weights() | {"model.norm.weight": torch.ones(HIDDEN).to(dtype)}
    with pytest.raises(
        CheckpointError, match=r"'model\.norm\.weight': dtype (F64|I8|F8_E4M3) found, F32, F16, BF16 expected"
    ):
        bind(tmp_path, tensors)


def bind_infos(folder: Path, tensors: dict[str, Tensor]) -> tuple[bool, dict[str, Tensor]]:
    """Whether embedding and head share one place in the file, and the tensors."""
    save_file(tensors, folder / "model.safetensors")
    bound = bind_tensors(read_manifest(folder), TwoMatrixAdapter(tied=True))
    shared = bound["lm_head.weight"] is bound["model.embed_tokens.weight"]
    return shared, {name: read_tensor(info) for name, info in bound.items()}


def test_tied_head_shares_the_embedding(tmp_path: Path) -> None:
    shared, found = bind_infos(tmp_path, weights(head=False))
    assert shared and torch.equal(found["lm_head.weight"], weights()["model.embed_tokens.weight"])


def test_tied_head_stored_instead_of_the_embedding(tmp_path: Path) -> None:
    tensors = weights()
    del tensors["model.embed_tokens.weight"]
    shared, found = bind_infos(tmp_path, tensors)
    assert shared and torch.equal(found["model.embed_tokens.weight"], tensors["lm_head.weight"])


def test_tied_head_with_an_equal_copy_is_shared(tmp_path: Path, recwarn: pytest.WarningsRecorder) -> None:
    tensors = weights()
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    shared, _ = bind_infos(tmp_path, tensors)
    assert shared and not recwarn.list


def test_tied_head_with_other_values_stays_apart_with_a_warning(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match=re.escape("lm_head.weight to model.embed_tokens.weight")):
        shared, found = bind_infos(tmp_path, weights())
    assert not shared and torch.equal(found["lm_head.weight"], weights()["lm_head.weight"])


def test_tied_head_of_another_shape_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"'lm_head\.weight': shape"):
        bind_infos(tmp_path, weights() | {"lm_head.weight": torch.ones(VOCAB + 1, HIDDEN)})


def test_neither_of_a_tied_pair(tmp_path: Path) -> None:
    tensors = weights(head=False)
    del tensors["model.embed_tokens.weight"]
    with pytest.raises(CheckpointError, match=r"model\.embed_tokens\.weight, lm_head\.weight"):
        bind_infos(tmp_path, tensors)
