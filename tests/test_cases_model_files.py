"""Cases about a Llama's files, each named after its id: what is read, what is refused, what reaches the computation."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from lema import LemaConfig, LemaModel
from lema_core.checkpoint import bind_tensors, read_manifest, read_tensor
from lema_core.errors import CheckpointError, ConfigError
from lema_core.store.store import TensorStore
from lema_core.testing.simulated import SimulatedAccelerator

CLOSE = 1e-5


def token_ids(rows: int = 2, length: int = 12) -> torch.Tensor:
    return torch.randint(0, 128, (rows, length), generator=torch.Generator().manual_seed(7))


def hf_logits(llamas, folder: Path, ids: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return llamas.hf(folder)(ids).logits


def digest(tensor: torch.Tensor) -> str:
    return hashlib.sha256(tensor.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()


def rewrite(folder: Path, change) -> None:
    """Replace the tensors of ``model.safetensors`` by ``change`` of them."""
    file = folder / "model.safetensors"
    save_file(change(load_file(file)), file, metadata={"format": "pt"})


def edit_config(folder: Path, **values: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


@pytest.mark.parametrize("device", ["cpu", "accelerator"])
@pytest.mark.parametrize("variant", ["untied", "tied_sharded", "bf16"])
def test_b03_every_weight_handed_to_compute_is_the_files(
    variant, device, llamas, small_granules, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Windows of one granule: forward twice and once in reverse, every borrowed block is byte-equal to the file."""
    folder = llamas.folder(variant)
    cut = llamas.cut(llamas.open(folder), small_granules)
    amount = f"{cut.smallest_bytes}B"
    simulated = SimulatedAccelerator(latency_s=1e-4, compute_lag_s=1e-4) if device == "accelerator" else None
    model = llamas.with_lora(folder, simulated, weights_ram=amount, weights_vram=amount)
    infos = bind_tensors(read_manifest(folder), model.adapter)
    expected = {
        (part.tensor, part.start): digest(read_tensor(infos[part.tensor])[part.start : part.stop])
        for parts in cut.layout.parts.values()
        for part in parts
    }
    assert len(set(expected.values())) == len(expected), "every block of every layer has its own content"
    borrow = TensorStore.borrow
    seen: list[tuple[str, int]] = []

    class Lent:
        def __init__(self, store: TensorStore, part) -> None:
            self._inner, self._part = borrow(store, part), part

        def __enter__(self) -> torch.Tensor:
            weight = self._inner.__enter__()
            seen.append((self._part.tensor, self._part.start))
            assert digest(weight.clone()) == expected[seen[-1]], self._part
            return weight

        def __exit__(self, *exc_info: object) -> None:
            self._inner.__exit__(*exc_info)

    ids = token_ids()
    with monkeypatch.context() as patched:
        patched.setattr(TensorStore, "borrow", lambda store, part: Lent(store, part))
        first, second = model.logits(ids), model.logits(ids)
        model.get_trainer().train_step(ids, return_logits=False)
    assert torch.equal(first, second)
    assert all(seen.count(block) >= 3 for block in expected)
    plain = llamas.open(folder, weights_ram=amount)
    assert (plain.logits(ids) - hf_logits(llamas, folder, ids)).abs().max() <= CLOSE


@pytest.mark.parametrize("strategy", ["streaming", "resident"])
@pytest.mark.parametrize("variant", ["tied", "tied_sharded"])
def test_b04_a_tied_head_needs_no_tensor_of_its_own(variant, strategy, llamas) -> None:
    """tie_word_embeddings and no lm_head in the file: logits equal HF, two loads equal each other."""
    folder = llamas.folder(variant)
    assert "lm_head.weight" not in read_manifest(folder).tensors
    ids = token_ids()
    models = [llamas.open(folder, strategy=strategy) for _ in range(2)]
    first, second = (model.logits(ids) for model in models)
    assert torch.equal(first, second)
    assert (first - hf_logits(llamas, folder, ids)).abs().max() <= CLOSE


def test_b04_the_tied_embedding_is_not_held_twice(llamas) -> None:
    """All weights resident: beside them only a few rows of the embedding, not a second one."""
    folder = llamas.folder("tied", vocab_size=100_000, num_hidden_layers=1)
    file_bytes = (folder / "model.safetensors").stat().st_size
    embedding_bytes = 100_000 * 64 * 4
    model = llamas.open(folder, strategy="resident")
    model.logits(token_ids())
    stats = model.stats()["weights"]
    assert file_bytes > embedding_bytes
    assert stats.ram_window_bytes < file_bytes + embedding_bytes / 2
    assert stats.ram_peak_bytes <= stats.ram_window_bytes


def test_b13_a_second_set_of_weights_beside_an_index(llamas, tmp_path) -> None:
    """Index, shards and a model.safetensors of other values: what transformers reads is read, and a warning says so."""
    folder = llamas.copy(tmp_path / "model", "sharded")
    llamas.copy(tmp_path / "other", seed=9)
    (tmp_path / "other" / "model.safetensors").rename(folder / "model.safetensors")
    with pytest.warns(UserWarning, match=r"not read: model-00001-of-00003\.safetensors"):
        model = llamas.open(folder)
    ids = token_ids()
    assert (model.logits(ids) - hf_logits(llamas, folder, ids)).abs().max() <= CLOSE
    assert (model.logits(ids) - hf_logits(llamas, llamas.folder("untied"), ids)).abs().max() > 1e-2


def test_b13_a_second_set_of_weights_without_an_index(llamas, tmp_path) -> None:
    """Clashing names and no index: an error that names both files."""
    folder = llamas.copy(tmp_path / "model", "sharded")
    llamas.copy(tmp_path / "other", seed=9)
    (tmp_path / "other" / "model.safetensors").rename(folder / "model.safetensors")
    (folder / "model.safetensors.index.json").unlink()
    with pytest.raises(CheckpointError, match=r"model-00001-of-00003\.safetensors and model\.safetensors both hold"):
        llamas.open(folder)


def test_b14_rotary_buffers_of_older_files_are_ignored(llamas, tmp_path, recwarn) -> None:
    """rotary_emb.inv_freq in every layer: no warning, logits equal HF."""
    folder = llamas.copy(tmp_path / "model")
    rewrite(
        folder,
        lambda tensors: {
            **tensors,
            **{f"model.layers.{i}.self_attn.rotary_emb.inv_freq": torch.ones(8) for i in range(4)},
        },
    )
    model = llamas.open(folder)
    assert not [w for w in recwarn if "no use" in str(w.message)]
    ids = token_ids()
    assert (model.logits(ids) - hf_logits(llamas, llamas.folder("untied"), ids)).abs().max() <= CLOSE


@pytest.mark.parametrize("prefix", ["model.language_model.", "language_model.model.", ""])
def test_b14_longer_and_shorter_prefixes(prefix, llamas, tmp_path) -> None:
    """The same Llama under another prefix gives the same logits."""
    folder = llamas.copy(tmp_path / "model")
    rewrite(
        folder,
        lambda tensors: {
            prefix + name.removeprefix("model.") if name.startswith("model.") else name: tensor
            for name, tensor in tensors.items()
        },
    )
    ids = token_ids()
    logits = llamas.open(folder).logits(ids)
    assert (logits - hf_logits(llamas, llamas.folder("untied"), ids)).abs().max() <= CLOSE


def test_b14_an_unknown_prefix_is_refused_by_name(llamas, tmp_path) -> None:
    """Names that nothing matches: an error that says what was expected and found."""
    folder = llamas.copy(tmp_path / "model")
    rewrite(folder, lambda tensors: {f"net.{name}": tensor for name, tensor in tensors.items()})
    with pytest.raises(CheckpointError, match=r"net\.lm_head\.weight.*found"):
        llamas.open(folder)


def test_b14_an_unknown_tensor_is_named_and_a_missing_one_is_an_error(llamas, tmp_path) -> None:
    """foo.weight: a warning; without layer 2's up_proj: an error."""
    folder = llamas.copy(tmp_path / "model")
    rewrite(folder, lambda tensors: {**tensors, "foo.weight": torch.ones(3)})
    with pytest.warns(UserWarning, match=r"foo\.weight"):
        model = llamas.open(folder)
    ids = token_ids()
    assert (model.logits(ids) - hf_logits(llamas, llamas.folder("untied"), ids)).abs().max() <= CLOSE
    gone = "model.layers.2.mlp.up_proj.weight"
    rewrite(folder, lambda tensors: {n: t for n, t in tensors.items() if n not in (gone, "foo.weight")})
    with pytest.raises(CheckpointError, match=rf"layer 2.*{gone}"):
        llamas.open(folder)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"num_attention_heads": 8, "num_key_value_heads": 3}, ["num_attention_heads=8", "num_key_value_heads=3"]),
        ({"num_attention_heads": 5, "num_key_value_heads": 5, "head_dim": None}, ["hidden_size=64", "=5"]),
        ({"num_hidden_layers": 3}, ["3 layers", "have 4"]),
        ({"num_hidden_layers": 5}, ["layer 4", "5 layers", "have 4"]),
        ({"intermediate_size": 120}, ["mlp.gate_proj.weight", "[120, 64]", "[112, 64]"]),
        ({"vocab_size": 127}, ["embed_tokens", "[127, 64]", "[128, 64]"]),
        ({"hidden_size": 32, "head_dim": 16}, ["embed_tokens", "[128, 32]", "[128, 64]"]),
    ],
)
def test_b50_config_against_shapes(values, words, llamas, tmp_path) -> None:
    """Fields that contradict each other or the files: one line that names them, before any weight is read."""
    folder = llamas.copy(tmp_path / "model")
    edit_config(folder, **values)
    with pytest.raises((ConfigError, CheckpointError)) as caught:
        LemaModel(LemaConfig(model_name_or_path=str(folder), device="cpu"))
    message = str(caught.value)
    assert "\n" not in message
    for word in words:
        assert word in message, message


def test_b53_a_tokenizer_larger_than_the_model(llamas, byte_tokenizer, tmp_path) -> None:
    """130 ids for 128 embedding rows: an error that names both numbers."""
    folder = llamas.copy(tmp_path / "model")
    byte_tokenizer(folder, 130)
    model = llamas.open(folder)
    with pytest.raises(ConfigError, match=r"130 ids.*128 rows"):
        _ = model.tokenizer


def test_b53_a_padded_vocabulary(llamas, byte_tokenizer, tmp_path) -> None:
    """192 embedding rows for a tokenizer of 130: works, logits equal HF."""
    folder = llamas.copy(tmp_path / "model", vocab_size=192)
    byte_tokenizer(folder, 130)
    model = llamas.open(folder)
    ids = torch.tensor([model.tokenizer.encode("hello there")])
    logits = model.logits(ids)
    assert logits.shape[-1] == 192
    assert (logits - hf_logits(llamas, folder, ids)).abs().max() <= CLOSE
