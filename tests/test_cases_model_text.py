"""Cases about positions, padding and generation of a Llama, each named after its id."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from lema_core.errors import ConfigError, DataError
from lema_core.kv import KVCache
from lema_core.runtime.batch import TokenBatch
from lema_train.data.batching import make_batch
from lema_train.data.rows import Sample
from lema_train.loop import token_batch


def token_ids(rows: int, length: int, seed: int = 7, vocab: int = 128) -> torch.Tensor:
    return torch.randint(0, vocab, (rows, length), generator=torch.Generator().manual_seed(seed))


def hf_logits(llamas, folder: Path, ids: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
    with torch.no_grad():
        return llamas.hf(folder)(ids, attention_mask=mask).logits


def edit_rope(folder: Path, **block: object) -> None:
    """The old spelling: rope_theta beside rope_scaling."""
    path = folder / "config.json"
    config = json.loads(path.read_text())
    config.pop("rope_parameters", None)
    path.write_text(json.dumps({**config, "rope_theta": 10000.0, "rope_scaling": block}))


LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}


@pytest.mark.parametrize("spelling", ["new", "rope_type", "type"])
def test_b17_llama3_scaling_at_every_position(spelling, llamas, tmp_path) -> None:
    """256 tokens, factor 8 from 64: within 1e-4 of HF at every position, in every spelling, and not plain RoPE."""
    folder = llamas.copy(tmp_path / "model", "llama3", num_hidden_layers=2)
    ids = token_ids(1, 256)
    expected = hf_logits(llamas, folder, ids)
    if spelling != "new":
        edit_rope(folder, **{spelling: "llama3"}, **LLAMA3)
        assert (hf_logits(llamas, folder, ids) - expected).abs().max() <= 1e-5
    logits = llamas.open(folder).logits(ids)
    assert (logits - expected).abs().amax(dim=(0, 2)).max() <= 1e-4
    plain = llamas.open(llamas.folder("untied", num_hidden_layers=2, max_position_embeddings=512))
    assert (plain.logits(ids) - expected)[:, -1].abs().max() > 1e-2


@pytest.mark.parametrize("chunk", [16, 50, 255])
def test_b17_llama3_scaling_in_chunks(chunk, llamas) -> None:
    """The same prompt fed in chunks on a cache: each chunk's last logits within 1e-4 of HF."""
    folder = llamas.folder("llama3", num_hidden_layers=2)
    ids = token_ids(2, 256)
    expected = hf_logits(llamas, folder, ids)
    runner = llamas.open(folder).runner
    cache = KVCache(2, (2, *runner.adapter.cache_shape()), 256, 100)
    for start in range(0, 256, chunk):
        stop = min(256, start + chunk)
        batch = TokenBatch(ids[:, start:stop], torch.ones(2, stop, dtype=torch.bool))
        assert (runner.next_logits(batch, cache) - expected[:, stop - 1]).abs().max() <= 1e-4, stop


@pytest.mark.parametrize("kind", ["linear", "dynamic", "yarn"])
@pytest.mark.parametrize("key", ["type", "rope_type", "new"])
def test_b17_other_scalings_at_every_position(kind: str, key: str, llamas, tmp_path) -> None:
    """256 tokens where 64 were trained for: within 1e-4 of HF at every position, and not plain RoPE."""
    folder = llamas.copy(tmp_path / "model", num_hidden_layers=2, max_position_embeddings=64)
    plain = llamas.open(llamas.folder("untied", num_hidden_layers=2, max_position_embeddings=512))
    block: dict[str, object] = {"factor": 4.0}
    if kind == "yarn":
        block["original_max_position_embeddings"] = 64
    edit_rope(folder, **{"rope_type" if key == "new" else key: kind}, **block)
    if key == "new":
        config = json.loads((folder / "config.json").read_text())
        config["rope_parameters"] = {**config.pop("rope_scaling"), "rope_theta": config.pop("rope_theta")}
        (folder / "config.json").write_text(json.dumps(config))
    ids = token_ids(1, 256)
    expected = hf_logits(llamas, folder, ids)
    logits = llamas.open(folder).logits(ids)
    assert (logits - expected).abs().amax(dim=(0, 2)).max() <= 1e-4
    assert (plain.logits(ids) - expected)[:, -1].abs().max() > 1e-2


@pytest.mark.parametrize("kind", ["longrope", "mystery"])
@pytest.mark.parametrize("key", ["type", "rope_type"])
def test_b17_unknown_scalings_are_refused_by_name(kind: str, key: str, llamas, tmp_path) -> None:
    """Unsupported or invented: an error that names the type, never plain RoPE."""
    folder = llamas.copy(tmp_path / "model", num_hidden_layers=1)
    edit_rope(folder, **{key: kind}, factor=2.0)
    with pytest.raises(ConfigError, match=f"'{kind}' is not supported"):
        llamas.open(folder)


def greedy_without_cache(model, prompt: list[int], count: int) -> tuple[list[int], list[torch.Tensor]]:
    ids, logits = list(prompt), []
    for _ in range(count):
        logits.append(model.logits(torch.tensor([ids]))[0, -1])
        ids.append(int(logits[-1].argmax()))
    return ids[len(prompt) :], logits


@pytest.mark.parametrize("prompt", [[5], [9, 3, 77, 3, 120, 11]], ids=["one_token", "six_tokens"])
@pytest.mark.parametrize("kv_chunk_size", [8, 8192])
def test_b20_cached_and_uncached_generation_agree(prompt, kv_chunk_size, llamas) -> None:
    """Greedy 40 tokens: cached ids equal re-forwarding and transformers' generate; logits within 1e-4."""
    folder = llamas.folder("tied")
    model = llamas.open(folder)
    expected, logits = greedy_without_cache(model, prompt, 40)
    assert model.generate_ids([prompt], 40, kv_chunk_size=kv_chunk_size) == [expected]
    theirs = llamas.hf(folder).generate(torch.tensor([prompt]), max_new_tokens=40, do_sample=False, pad_token_id=0)
    assert theirs[0, len(prompt) :].tolist() == expected
    cache = KVCache(4, (1, *model.adapter.cache_shape()), 46, kv_chunk_size)
    ids = prompt
    for step, token in enumerate(expected[:10]):
        batch = TokenBatch(torch.tensor([ids]), torch.ones(1, len(prompt) + step, dtype=torch.bool))
        assert (model.runner.next_logits(batch, cache) - logits[step]).abs().max() <= 1e-4
        ids = [token]


def test_b20_no_token_one_token_and_no_prompt(llamas, byte_tokenizer, tmp_path) -> None:
    """0 tokens: the prompt alone. 1 token: one. Empty prompt: from BOS, and without one a clear error."""
    folder = llamas.copy(tmp_path / "model")
    byte_tokenizer(folder)
    model = llamas.open(folder)
    assert model.generate_ids([[1, 2]], 0) == [[]]
    assert model.generate_kv("hello", max_new_tokens=0) == "hello"
    assert model.generate_ids([[1, 2]], 1) == [greedy_without_cache(model, [1, 2], 1)[0]]
    bos = model.tokenizer.bos_id
    assert bos is not None
    expected = model.tokenizer.decode(greedy_without_cache(model, [bos], 5)[0])
    assert model.generate_kv("", max_new_tokens=5) == expected
    with pytest.raises(DataError, match="prompt has no tokens"):
        model.generate_ids([[]], 3)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**settings, "bos_token": None}))
    with pytest.raises(ConfigError, match="BOS"):
        llamas.open(folder).generate_kv("", max_new_tokens=5)


def test_b21_left_padded_generation(llamas) -> None:
    """Prompts of 3 and 9 tokens together: ids equal each alone, logits within 1e-4, equal to HF's left padding."""
    folder = llamas.folder("untied")
    model = llamas.open(folder)
    short, long = token_ids(1, 3)[0].tolist(), token_ids(1, 9, seed=8)[0].tolist()
    together = model.generate_ids([short, long], 10)
    assert together == [model.generate_ids([prompt], 10)[0] for prompt in (short, long)]
    padded = torch.tensor([[0] * 6 + short, long])
    mask = torch.tensor([[0] * 6 + [1] * 3, [1] * 9])
    logits = model.logits(padded, mask)
    assert (logits[0, 6:] - model.logits(torch.tensor([short]))[0]).abs().max() <= 1e-4
    assert (logits[1] - model.logits(torch.tensor([long]))[0]).abs().max() <= 1e-4
    theirs = llamas.hf(folder).generate(padded, attention_mask=mask, max_new_tokens=10, do_sample=False, pad_token_id=0)
    assert theirs[:, 9:].tolist() == together


@pytest.mark.parametrize("side", ["left", "right"])
def test_b21_extra_padding_leaves_the_loss_alone(side, llamas, oracle) -> None:
    """A row with six more padded places: same loss and gradients, whatever stands in the padding."""
    row, pad = token_ids(1, 7), token_ids(1, 6, seed=9)
    parts = (row, pad) if side == "right" else (pad, row)
    ids = torch.cat(parts, dim=1)
    mask = torch.cat([torch.full_like(part, part is row) for part in parts], dim=1)
    model = llamas.with_lora(llamas.folder("untied"), max_grad_norm=None)
    loss, gradients, _ = oracle.step(model, row)
    padded_loss, padded_gradients, _ = oracle.step(model, ids, mask=mask)
    assert padded_loss == pytest.approx(loss, abs=1e-6)
    assert max(oracle.errors(padded_gradients, gradients).values()) <= 1e-5


def test_b48_the_padding_id_may_be_the_eos(llamas, oracle) -> None:
    """pad = eos, rows of 5 and 9 ending in EOS: one EOS a row is trained, and the loss is that of the rows alone."""
    eos = 1
    rows = [[*token_ids(1, n - 1, seed=n)[0].clamp(min=2).tolist(), eos] for n in (5, 9)]
    batch = token_batch(make_batch([Sample(ids, ids, line=1) for ids in rows], fill_id=eos))
    assert batch.n_targets == 4 + 8 and int((batch.supervised[1] == eos).sum()) == 2
    folder = llamas.folder("untied")
    model = llamas.with_lora(folder, max_grad_norm=None, batch_size=2)
    trainer = model.get_trainer()
    loss = trainer.train_micro_batches([batch])["loss"]
    alone = llamas.with_lora(folder, max_grad_norm=None)
    sums = [oracle.step(alone, torch.tensor([ids]))[0] * (len(ids) - 1) for ids in rows]
    assert loss == pytest.approx(sum(sums) / 12, rel=1e-6)


@pytest.mark.parametrize(
    ("place", "value", "words"),
    [
        ((1, 3), 128, r"row 1, position 3: id 128 is outside the vocabulary of 128"),
        ((0, 0), -1, r"row 0, position 0: id -1 is outside the vocabulary of 128"),
    ],
)
def test_b52_ids_outside_the_vocabulary(place, value, words, llamas) -> None:
    """id = vocab_size, and a negative one: row, position, id and size, in training, logits and generation."""
    ids = token_ids(2, 5)
    ids[place] = value
    model = llamas.with_lora(llamas.folder("untied"), batch_size=1)
    trainer = model.get_trainer()
    with pytest.raises(DataError, match=words):
        model.logits(ids)
    with pytest.raises(DataError, match=words):
        model.generate_ids(ids.tolist(), 3)
    for return_logits in (True, False):
        with pytest.raises(DataError, match=words):
            trainer.train_step(ids, return_logits=return_logits)
    assert trainer.step == 0


def test_b52_past_max_position_embeddings(llamas, oracle, tmp_path) -> None:
    """Llama past its trained positions: one warning with both numbers, and still what HF computes."""
    folder = llamas.folder("untied", max_position_embeddings=16, num_hidden_layers=2)
    model = llamas.with_lora(folder, max_grad_norm=None, learning_rate=1e-3)
    said: list[str] = []
    trainer = model.get_trainer(say=said.append)
    ids = token_ids(1, 24)
    lora = model.save_pretrained(tmp_path / "lora")
    logits, loss = trainer.train_step(ids)
    trainer.train_step(ids, return_logits=False)
    assert [text for text in said if "24 tokens" in text and "16" in text] and len(said) == 1
    expected_loss, _, expected = oracle.peft_step(llamas.peft(folder, lora), ids)
    assert loss == pytest.approx(expected_loss, rel=1e-5)
    assert (logits - expected).abs().max() <= 1e-5
