"""A GGUF file written here from a random Llama gives that Llama back."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from lema_core.errors import CheckpointError
from lema_gguf.cache import cached_folder
from lema_gguf.convert import convert
from lema_gguf.plugin import lema_checkpoint_sources
from lema_gguf.refs import find_gguf, refuses

HIDDEN, HEADS, KV_HEADS, LAYERS, FEED_FORWARD, HEAD_DIM = 64, 4, 2, 2, 96, 16

_TO_GGUF = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def gguf_name(name: str) -> str:
    module, _, suffix = name.rpartition(".")
    if module in _TO_GGUF:
        return f"{_TO_GGUF[module]}.{suffix}"
    _, _, layer, rest = module.split(".", 3)
    return f"blk.{layer}.{_TO_GGUF[rest]}.{suffix}"


def permute(rows: Tensor, heads: int) -> Tensor:
    """llama.cpp's order, spelled out row by row: new row (head, i, half) is old row (head, half, i)."""
    head_dim = len(rows) // heads
    order = [
        head * head_dim + half * (head_dim // 2) + i
        for head in range(heads)
        for i in range(head_dim // 2)
        for half in range(2)
    ]
    return rows[order]


def vocabulary() -> tuple[list[str], list[str], list[int]]:
    """The byte alphabet, a few merges, one control and one user-defined token."""
    from tokenizers.pre_tokenizers import ByteLevel

    merges = ["Ġ a", "h e", "l l", "he ll", "hell o", "Ċ Ċ", "Ġ Ġ"]
    tokens = ["<|end|>", *sorted(ByteLevel.alphabet()), *(merge.replace(" ", "") for merge in merges), "<think>"]
    return tokens, merges, [3] + [1] * (len(tokens) - 2) + [4]


def random_llama(**overrides: object) -> LlamaForCausalLM:
    torch.manual_seed(0)
    settings = {
        "vocab_size": len(vocabulary()[0]),
        "hidden_size": HIDDEN,
        "intermediate_size": FEED_FORWARD,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "max_position_embeddings": 128,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
        "rope_parameters": {"rope_type": "default", "rope_theta": 5000.0},
    }
    config = LlamaConfig(**{**settings, **overrides})
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.2)
    return model


def write_gguf(
    path: Path,
    model: LlamaForCausalLM,
    kind: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32,
    *,
    architecture: str = "llama",
    tokenizer_model: str = "gpt2",
    pre: str = "smollm",
    extra: dict[str, np.ndarray] | None = None,
    raw: dict[str, tuple[np.ndarray, gguf.GGMLQuantizationType]] | None = None,
    **keys: object,
) -> None:
    writer = gguf.GGUFWriter(str(path), architecture)
    config = model.config
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    tokens, merges, kinds = vocabulary()
    writer.add_tokenizer_model(tokenizer_model)
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_merges(merges)
    writer.add_token_types(kinds)
    writer.add_eos_token_id(0)
    writer.add_bos_token_id(0)
    writer.add_chat_template("{% for m in messages %}{{ m['content'] }}<|end|>{% endfor %}")
    for key, value in keys.items():
        name = key.replace("__", ".")
        {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}[type(value)](
            name, value
        )
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        if gguf_name(name) in (raw or {}):
            blocks, blocks_kind = raw[gguf_name(name)]
            writer.add_tensor(gguf_name(name), blocks, raw_dtype=blocks_kind)
            continue
        heads = HEADS if ".q_proj." in name else KV_HEADS if ".k_proj." in name else None
        values = (tensor if heads is None else permute(tensor, heads)).contiguous()
        add(writer, gguf_name(name), values.numpy(), kind if values.dim() == 2 else gguf.GGMLQuantizationType.F32)
    for name, array in (extra or {}).items():
        add(writer, name, array, gguf.GGMLQuantizationType.F32)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def add(writer: gguf.GGUFWriter, name: str, values: np.ndarray, kind: gguf.GGMLQuantizationType) -> None:
    if kind is gguf.GGMLQuantizationType.F32:
        writer.add_tensor(name, values)
    elif kind is gguf.GGMLQuantizationType.F16:
        writer.add_tensor(name, values.astype(np.float16))
    else:
        writer.add_tensor(name, gguf.quantize(values, kind), raw_dtype=kind)


def converted(gguf_path: Path) -> Path:
    folder = gguf_path.with_suffix("")
    folder.mkdir()
    convert(gguf_path, folder)
    return folder


@pytest.fixture(autouse=True)
def cache_in_tmp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LEMA_CACHE", str(tmp_path / "cache"))


@pytest.mark.parametrize(
    "overrides",
    [{}, {"tie_word_embeddings": True}, {"attention_bias": True, "mlp_bias": True}],
    ids=["untied", "tied", "biases"],
)
def test_float32_file_gives_the_source_model_back(tmp_path: Path, overrides: dict[str, bool]) -> None:
    model = random_llama(**overrides)
    write_gguf(tmp_path / "m.gguf", model)
    loaded = AutoModelForCausalLM.from_pretrained(converted(tmp_path / "m.gguf"))
    ours, source = loaded.state_dict(), model.state_dict()
    assert ours.keys() == source.keys()
    assert all(torch.equal(ours[name], source[name]) for name in source)
    ids = torch.arange(20)[None]
    assert torch.equal(loaded(ids).logits, model(ids).logits)
    for field in ("rms_norm_eps", "rope_parameters", "max_position_embeddings", "head_dim", "tie_word_embeddings"):
        assert getattr(loaded.config, field) == getattr(model.config, field), field


@pytest.mark.parametrize("kind", ["F16", "BF16"])
def test_half_precision_is_kept(tmp_path: Path, kind: str) -> None:
    model = random_llama()
    write_gguf(tmp_path / "m.gguf", model, gguf.GGMLQuantizationType[kind])
    folder = converted(tmp_path / "m.gguf")
    dtype = {"F16": torch.float16, "BF16": torch.bfloat16}[kind]
    ours = load_file(folder / "model.safetensors")
    for name, source in model.state_dict().items():
        expected = source.to(dtype) if source.dim() == 2 else source
        assert ours[name].dtype == expected.dtype and torch.equal(ours[name], expected), name
    assert json.loads((folder / "config.json").read_text())["torch_dtype"] == str(dtype).removeprefix("torch.")


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"])
def test_quantized_values_are_stored_exactly(tmp_path: Path, kind: str) -> None:
    model = random_llama()
    kind = gguf.GGMLQuantizationType[kind]
    write_gguf(tmp_path / "m.gguf", model, kind)
    ours = load_file(converted(tmp_path / "m.gguf") / "model.safetensors")
    for name, source in model.state_dict().items():
        if source.dim() == 2:  # rows are quantized one by one, so the order of rows does not matter
            expected = torch.from_numpy(gguf.dequantize(gguf.quantize(source.numpy(), kind), kind))
            assert ours[name].dtype == torch.float32 and torch.equal(ours[name], expected), name


@pytest.mark.parametrize("kind", ["Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"])
def test_k_quants_follow_gguf(tmp_path: Path, kind: str) -> None:
    """gguf reads K-quants but cannot write them, so the blocks are random bytes."""
    kind = gguf.GGMLQuantizationType[kind]
    block, nbytes = gguf.GGML_QUANT_SIZES[kind]
    raw = np.random.default_rng(0).integers(0, 64, size=(HIDDEN, nbytes), dtype=np.uint8)
    model = random_llama(intermediate_size=block)
    write_gguf(tmp_path / "m.gguf", model, raw={"blk.0.ffn_down.weight": (raw, kind)})
    ours = load_file(converted(tmp_path / "m.gguf") / "model.safetensors")["model.layers.0.mlp.down_proj.weight"]
    np.testing.assert_array_equal(ours.numpy(), gguf.dequantize(raw, kind))


def test_llama3_rope_factors_become_rope_scaling(tmp_path: Path) -> None:
    scaling = {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    model = random_llama(rope_parameters=scaling)
    plain = random_llama(rope_parameters={"rope_type": "default", "rope_theta": 500000.0})
    factors = (plain.model.rotary_emb.inv_freq / model.model.rotary_emb.inv_freq).numpy()
    write_gguf(tmp_path / "m.gguf", model, extra={"rope_freqs.weight": factors})
    loaded = AutoModelForCausalLM.from_pretrained(converted(tmp_path / "m.gguf"))
    assert torch.allclose(loaded.model.rotary_emb.inv_freq, model.model.rotary_emb.inv_freq, rtol=1e-6)
    write_gguf(tmp_path / "bad.gguf", model, extra={"rope_freqs.weight": factors + 0.5})
    with pytest.raises(CheckpointError, match=r"rope_freqs\.weight"):
        converted(tmp_path / "bad.gguf")


def test_linear_rope_scaling(tmp_path: Path) -> None:
    model = random_llama()
    write_gguf(tmp_path / "m.gguf", model, llama__rope__scaling__type="linear", llama__rope__scaling__factor=4.0)
    config = json.loads((converted(tmp_path / "m.gguf") / "config.json").read_text())
    assert config["rope_scaling"] == {"rope_type": "linear", "factor": 4.0}


def test_tokenizer_and_its_config(tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf", random_llama(), tokenizer__ggml__eot_token_id=5)
    folder = converted(tmp_path / "m.gguf")
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert tokenizer.encode("hello<|end|><think>").tokens == ["hello", "<|end|>", "<think>"]
    assert tokenizer.encode("\n\n12").tokens == ["ĊĊ", "1", "2"]
    assert tokenizer.decode(tokenizer.encode("héllo ≠ 12\n").ids) == "héllo ≠ 12\n"
    hf = AutoTokenizer.from_pretrained(folder)
    assert hf("hello a\n\n1")["input_ids"] == tokenizer.encode("hello a\n\n1").ids
    assert hf.apply_chat_template([{"role": "user", "content": "hello"}], tokenize=False) == "hello<|end|>"
    assert (hf.bos_token, hf.eos_token) == ("<|end|>", "<|end|>")
    assert json.loads((folder / "generation_config.json").read_text())["eos_token_id"] == [0, 5]


def test_llama_bpe_adds_begin_of_text_and_keeps_words_whole(tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf", random_llama(), pre="llama-bpe")
    tokenizer = Tokenizer.from_file(str(converted(tmp_path / "m.gguf") / "tokenizer.json"))
    assert tokenizer.encode("hello").tokens == ["<|end|>", "hello"]
    write_gguf(tmp_path / "n.gguf", random_llama(), pre="llama-bpe", tokenizer__ggml__add_bos_token=False)
    tokenizer = Tokenizer.from_file(str(converted(tmp_path / "n.gguf") / "tokenizer.json"))
    assert tokenizer.encode("hello").tokens == ["hello"]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"architecture": "falcon"}, "architecture 'falcon'"),
        ({"tokenizer_model": "llama"}, "tokenizer.ggml.model 'llama'"),
        ({"pre": "qwen2"}, "tokenizer.ggml.pre 'qwen2'"),
        ({"llama__expert_count": 8}, "llama.expert_count"),
        ({"llama__rope__scaling__type": "longrope", "llama__rope__scaling__factor": 2.0}, "'longrope'"),
        ({"llama__attention__key_length": 32}, "llama.rope.dimension_count 16"),
        ({"split__count": 3}, "split"),
        ({"extra": {"blk.0.attn_sinks.weight": np.zeros(4, np.float32)}}, "'blk.0.attn_sinks.weight'"),
        ({"extra": {"blk.0.attn_q.bias": np.zeros(HIDDEN, np.float32)}}, "not 'blk.0.attn_k.bias'"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(tmp_path: Path, options: dict[str, object], words: str) -> None:
    write_gguf(tmp_path / "m.gguf", random_llama(), **options)
    with pytest.raises(CheckpointError) as caught:
        converted(tmp_path / "m.gguf")
    assert words in str(caught.value) and str(tmp_path / "m.gguf") in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("keep", [0, 3, 100, 5000, -100])
def test_damaged_files_are_refused(tmp_path: Path, keep: int) -> None:
    write_gguf(tmp_path / "m.gguf", random_llama())
    whole = (tmp_path / "m.gguf").read_bytes()
    (tmp_path / "cut.gguf").write_bytes(whole[:keep])
    with pytest.raises(CheckpointError, match=r"cut\.gguf: not a readable GGUF file"):
        cached_folder(tmp_path / "cut.gguf")
    assert not [path for path in (tmp_path / "cache").rglob("*") if path.is_dir() and path.name != "gguf"]


def test_cache_converts_once_and_notices_a_new_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "m.gguf"
    write_gguf(path, random_llama())
    first = cached_folder(path)
    assert first.parent == tmp_path / "cache" / "gguf"
    assert "converting" in capsys.readouterr().err
    assert cached_folder(path) == first
    assert capsys.readouterr().err == ""
    os.utime(path, ns=(1, 1))
    assert cached_folder(path) != first


def test_unfinished_folder_of_a_dead_process_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    write_gguf(path, random_llama())
    folder = cached_folder(path)
    partial = folder.with_name(f".{folder.name}.partial")
    folder.rename(partial)
    (partial / "config.json").write_text("{")
    assert json.loads((cached_folder(path) / "config.json").read_text())["model_type"] == "llama"
    assert not partial.exists()


def test_two_processes_at_once(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    write_gguf(path, random_llama())
    code = "import sys, pathlib, lema_gguf.cache as c; print(c.cached_folder(pathlib.Path(sys.argv[1])))"
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    children = [subprocess.Popen([sys.executable, "-c", code, str(path)], **pipes) for _ in range(2)]
    answers = [child.communicate() for child in children]
    assert {out.strip() for out, _ in answers} == {str(cached_folder(path))}
    assert sum("converting" in error for _, error in answers) == 1


def test_unwritable_cache_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("LEMA_CACHE", str(tmp_path / "file"))
    write_gguf(tmp_path / "m.gguf", random_llama())
    with pytest.raises(CheckpointError, match="LEMA_CACHE"):
        cached_folder(tmp_path / "m.gguf")


def test_references(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "heavy_package"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('must not be imported')")
    (package / "a.gguf").write_bytes(b"")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert find_gguf("package:heavy_package") == package / "a.gguf"
    (package / "b.gguf").write_bytes(b"")
    assert find_gguf("package:heavy_package/b.gguf") == package / "b.gguf"
    with pytest.raises(CheckpointError, match=r"a\.gguf, b\.gguf; name one as package:heavy_package/a\.gguf"):
        find_gguf("package:heavy_package")
    with pytest.raises(CheckpointError, match=r"no 'c\.gguf'"):
        find_gguf("package:heavy_package/c.gguf")
    with pytest.raises(CheckpointError, match="no package 'not_there_at_all'"):
        find_gguf("package:not_there_at_all")
    with pytest.raises(CheckpointError, match="not a package name"):
        find_gguf("package:heavy_package.sub")
    with pytest.raises(CheckpointError, match="no such file"):
        find_gguf(str(tmp_path / "none.gguf"))
    assert refuses("meta-llama/Llama-3.2-1B") == "neither a .gguf file nor package:NAME"


def test_source_record(tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf", random_llama())
    (source,) = lema_checkpoint_sources()
    assert source.refuses(str(tmp_path / "m.gguf")) is None
    assert (source.locate(str(tmp_path / "m.gguf")) / "config.json").is_file()


def test_reading_the_plugin_loads_no_torch() -> None:
    code = (
        "import sys, lema_gguf.plugin as p; list(p.lema_checkpoint_sources()); "
        "print(*(name for name in ('torch', 'gguf', 'tokenizers') if name in sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "\n"
