"""``init=random``: the same small model everywhere, in a folder that transformers opens too; every preset's config."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

import lema.random_model
from lema.compose import compose, group_choices
from lema.config import LemaConfig
from lema.model import LemaModel
from lema.random_model import byte_tokens, overridden, random_model
from lema_core.checkpoint import bind_tensors, read_hf_config, read_manifest, read_tensor
from lema_core.errors import CheckpointError, ConfigError, LemaError
from lema_core.plugins import get_plugin_manager
from lema_core.records import load_object
from lema_train.data import Tokenizer

#: parameters as the models' pages on the Hub count them
PARAMETERS = {
    "smollm2_135m": 134_515_008,
    "tinyllama": 1_100_048_384,
    "llama2_7b": 6_738_415_616,
    "llama3_8b": 8_030_261_248,
    "mistral_7b": 7_241_732_096,
    "mixtral": 46_702_792_704,
    "gpt2": 124_439_808,
    "lfm2": 1_170_340_608,
    "lfm2_moe": 8_339_929_856,
}
#: what makes each preset a model of a few hundred thousand weights
SMALL: dict[str, dict[str, Any]] = {
    "smollm2_135m": {"num_attention_heads": 8, "num_key_value_heads": 4, "intermediate_size": 96},
    "tinyllama": {"intermediate_size": 96},
    "llama2_7b": {"intermediate_size": 96},
    "llama3_8b": {"intermediate_size": 96},
    "mistral_7b": {"intermediate_size": 96, "sliding_window": 8},
    "mixtral": {"intermediate_size": 48},
    "gpt2": {"num_attention_heads": 4},
    "lfm2": {"num_hidden_layers": 3, "intermediate_size": 192, "block_multiple_of": 32},
    "lfm2_moe": {"num_hidden_layers": 3, "num_dense_layers": 1, "intermediate_size": 96, "moe_intermediate_size": 32},
}
SMALL = {
    name: {"hidden_size": 64, "num_hidden_layers": 2, "vocab_size": 300, **overrides}
    for name, overrides in SMALL.items()
}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("LEMA_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def small(name: str = "tinyllama", **options: Any) -> LemaConfig:
    overrides = {**SMALL[name], **options.pop("model_overrides", {})}
    preset = compose([f"+model={name}"])
    return LemaConfig(**{**preset.to_dict(), "init": "random", "model_overrides": overrides, **options})


def digest(folder: Path, name: str = "model.safetensors") -> str:
    return hashlib.sha256((folder / name).read_bytes()).hexdigest()


# -------------------------------------------------------------------------------------------------------------- presets


def test_there_is_a_preset_for_every_architecture() -> None:
    assert set(group_choices()["model"]) >= set(PARAMETERS) == set(SMALL)


@pytest.mark.parametrize("name", sorted(PARAMETERS))
def test_a_presets_config_is_transformers_config_of_the_model_people_know(name: str) -> None:
    config = compose([f"+model={name}"])
    hf_config = AutoConfig.for_model(**config.hf_config)
    assert hf_config.architectures == config.hf_config["architectures"]
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(hf_config)
    assert type(model).__name__ == config.hf_config["architectures"][0]
    assert sum(parameter.numel() for parameter in model.parameters()) == PARAMETERS[name]


@pytest.mark.parametrize("name", sorted(PARAMETERS))
def test_a_preset_has_the_tensors_that_lema_reads(name: str) -> None:
    hf_config = compose([f"+model={name}"]).hf_config
    architecture = get_plugin_manager().match_architecture(hf_config)
    tensors = load_object(architecture.adapter).from_hf_config(hf_config).tensors()
    weights = [spec for spec in tensors if spec.tied_to is None]
    # buffers of the file that are not trained, such as the bias of LFM2's routers, are no parameters to transformers
    counted = sum(torch.Size(spec.shape).numel() for spec in weights if not spec.name.endswith("expert_bias"))
    assert counted == PARAMETERS[name]


@pytest.mark.parametrize("name", sorted(PARAMETERS))
def test_a_small_one_of_every_preset_opens_in_lema_and_in_transformers_alike(name: str) -> None:
    config = small(name, model_overrides={"torch_dtype": "float32"} if name != "gpt2" else {})
    ids = torch.arange(12)[None] % 256
    with LemaModel(config) as model:
        folder = model.folder
        logits = model.logits(ids)
    oracle, report = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"] and not report["mismatched_keys"]
    with torch.no_grad():
        expected = oracle.eval()(ids).logits.float()
    assert torch.linalg.norm(logits - expected) <= 1e-5 * torch.linalg.norm(expected)


# ------------------------------------------------------------------------------------------------------------ the model


def test_the_same_bytes_on_every_run_and_machine(cache: Path) -> None:
    folder = random_model(small())
    assert folder.parent == cache / "random" and folder.name.startswith("llama-")
    assert digest(folder) == "fe3d5992eb810dfeb5114bf7395354e83178f497e56a5af1461abd2f5bc86fbf"
    written = (folder / "model.safetensors").stat().st_mtime_ns
    assert random_model(small()) == folder
    assert (folder / "model.safetensors").stat().st_mtime_ns == written


def test_seed_and_config_name_another_model() -> None:
    folders = [
        random_model(small(**options)) for options in ({}, {"seed": 1}, {"model_overrides": {"vocab_size": 301}})
    ]
    assert len({folder.name for folder in folders}) == len({digest(folder) for folder in folders}) == 3


def test_its_weights_are_those_of_an_untrained_model() -> None:
    folder = random_model(small(model_overrides={"hidden_size": 128, "torch_dtype": "float32"}))
    infos = read_manifest(folder).tensors
    embedding = read_tensor(infos["model.embed_tokens.weight"])
    assert embedding.shape == (300, 128) and embedding.dtype == torch.float32
    assert abs(embedding.std().item() - 0.02) < 2e-4 and abs(embedding.mean().item()) < 4e-4
    assert embedding.abs().max() < 0.07 and len(embedding.unique()) > 800
    assert torch.equal(read_tensor(infos["model.norm.weight"]), torch.ones(128))
    query, key = (read_tensor(infos[f"model.layers.0.self_attn.{name}_proj.weight"]) for name in "qv")
    assert not torch.equal(query[:8], key[:8])


def test_values_do_not_depend_on_the_size_of_blocks(monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    whole = digest(random_model(small()))
    monkeypatch.setattr(lema.random_model, "_BLOCK", 1000)
    monkeypatch.setenv("LEMA_CACHE", str(cache / "other"))
    assert digest(random_model(small())) == whole


def test_its_tokenizer_takes_any_text_and_chats(tmp_path: Path) -> None:
    folder = random_model(small())
    tokenizer, oracle = Tokenizer.from_folder(folder), AutoTokenizer.from_pretrained(folder)
    text = "naïve café 你好 \x00\n\t</x>"
    assert tokenizer.decode(tokenizer.encode(text)) == text and len(tokenizer.encode(text)) == len(text.encode())
    assert oracle(text)["input_ids"] == tokenizer.encode(text)
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id) == (256, 257, 258) and tokenizer.vocab_size == 259
    chat = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}]
    assert tokenizer.apply_chat_template(chat) == "user: hi\nassistant: yes</s>\n"
    assert oracle.apply_chat_template(chat, tokenize=False) == tokenizer.apply_chat_template(chat)
    config = read_hf_config(folder)
    assert (config["eos_token_id"], config["vocab_size"]) == (257, 300)


def test_from_python_and_from_a_folder(tiny_llama: Path) -> None:
    hf_config = read_hf_config(tiny_llama)
    with LemaModel(LemaConfig(init="random", hf_config=hf_config, model_overrides={"vocab_size": 260})) as model:
        model.initialize_lora()
        assert model.adapter.vocab_size == 260 and model.generate_kv("hi", max_new_tokens=2).startswith("hi")
        folder = model.folder
    of_folder = LemaConfig(init="random", model_name_or_path=tiny_llama, model_overrides={"vocab_size": 260})
    assert random_model(of_folder) == folder


def test_lora_weights_name_the_folder_as_their_base(tmp_path: Path) -> None:
    with LemaModel(small(lora_rank=2)) as model:
        model.initialize_lora()
        model.save_pretrained(tmp_path / "lora")
    base = json.loads((tmp_path / "lora/adapter_config.json").read_text())["base_model_name_or_path"]
    assert Path(base) == model.folder
    with LemaModel.from_pretrained(tmp_path / "lora") as again:
        assert again.folder == model.folder


@pytest.mark.parametrize("name", ["tinyllama", "mistral_7b", "mixtral", "gpt2", "lfm2", "lfm2_moe"])
def test_a_whole_run_on_text_and_chats(name: str, lema: Any, make_rows: Callable[..., Path], chats: Any) -> None:
    rows = make_rows(lema.cwd / "rows.jsonl", [{"text": "The quick brown fox."}, *chats(3)])
    overrides = [f"model_overrides={key}:{value}" for key, value in SMALL[name].items()]
    options = [f"+model={name}", "init=random", *overrides, f"train_file={rows}", "output_dir=out", "max_steps=2"]
    cache = f"import os; os.environ['LEMA_CACHE'] = {str(lema.cwd / 'cache')!r}"
    trained = lema.ok(*options, "lora_rank=2", before=cache)
    assert "step 2/2" in trained.out and "lema: making a model of random weights" in trained.err
    resumed = lema.ok(*options, "lora_rank=2", "resume=auto", before=cache)
    assert "going on from" in resumed.out and "making" not in resumed.err


# ------------------------------------------------------------------------------------------------------------- refusals


def _refusal(error: type[LemaError], **options: Any) -> str:
    with pytest.raises(error) as caught:
        random_model(small(**options))
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_an_override_that_the_config_does_not_have_has_a_near_match(cache: Path) -> None:
    said = _refusal(ConfigError, model_overrides={"num_hiden_layers": 2})
    assert said.startswith("model_overrides: unknown override 'num_hiden_layers'; known: architectures, attention_bias")
    assert said.endswith("did you mean 'num_hidden_layers'?")
    for special in ("eos_token_id", "n_layer"):
        assert f"unknown override {special!r}" in _refusal(ConfigError, model_overrides={special: 1})
    assert not cache.exists()


def test_sizes_that_contradict_each_other_are_the_adapters_to_say() -> None:
    assert "num_attention_heads=5" in _refusal(ConfigError, model_overrides={"num_attention_heads": 5})


def test_a_vocabulary_that_is_too_small() -> None:
    assert len(byte_tokens()) == 259
    assert "vocab_size 258 is less than the 259 ids" in _refusal(ConfigError, model_overrides={"vocab_size": 258})


def test_nothing_is_written_of_what_has_no_room(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = LemaConfig(**{**compose(["+model=llama2_7b"]).to_dict(), "init": "random"})
    monkeypatch.setattr(lema.random_model, "process_memory_limit", lambda: SimpleNamespace(bytes=8_000_000_000))
    with pytest.raises(
        CheckpointError, match=r"13476831232 bytes \(13\.5 GB\) .*'model_overrides=\{num_hidden_layers:2"
    ):
        random_model(whole)
    whole.model_overrides = {"num_hidden_layers": 32}
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=1000))
    with pytest.raises(CheckpointError, match=r"13476831232 bytes needed, 1000 bytes free .* LEMA_CACHE"):
        random_model(whole)
    assert not list(cache.glob("random/*"))


def test_an_interrupted_write_leaves_nothing(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: Any) -> Any:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(lema.random_model, "random_blocks", interrupted)
        with pytest.raises(KeyboardInterrupt):
            random_model(small())
    assert [path.name for path in (cache / "random").iterdir() if path.is_dir()] == []
    assert random_model(small()).is_dir()


def test_what_random_weights_are_not_for() -> None:
    with pytest.raises(ConfigError, match="model_overrides: they are for init=random"):
        LemaConfig(model_overrides={"hidden_size": 64})
    with pytest.raises(ConfigError, match=r"init=random needs an architecture: \+model=NAME"):
        LemaModel(LemaConfig(init="random"))
    with pytest.raises(ConfigError, match="torch_dtype 'int8'"):
        random_model(small(model_overrides={"torch_dtype": "int8"}))


# ------------------------------------------------------------------------------------------------------------ overrides


def test_common_names_of_sizes_work_for_configs_that_spell_them_otherwise() -> None:
    gpt2 = compose(["+model=gpt2"]).hf_config
    assert overridden(gpt2, {"num_hidden_layers": 3, "hidden_size": 96}) == {**gpt2, "n_layer": 3, "n_embd": 96}


def test_a_list_with_an_entry_per_layer_follows_their_number() -> None:
    lfm2 = compose(["+model=lfm2"]).hf_config
    assert overridden(lfm2, {"num_hidden_layers": 2})["layer_types"] == ["conv", "full_attention"]
    assert overridden(lfm2, {"num_hidden_layers": 4})["layer_types"] == ["conv", "conv", "full_attention", "conv"]
    assert overridden(lfm2, {"num_hidden_layers": 18})["layer_types"] == lfm2["layer_types"] + ["conv", "conv"]
    chosen = {"num_hidden_layers": 2, "layer_types": ["full_attention", "conv"]}
    assert overridden(lfm2, chosen)["layer_types"] == ["full_attention", "conv"]


def test_what_a_shell_makes_of_braces_is_understood() -> None:
    quoted = compose(["+model=tinyllama", "init=random", "model_overrides={num_hidden_layers:2,hidden_size:64}"])
    expanded = ["model_overrides=num_hidden_layers:2", "model_overrides=hidden_size:64"]
    assert compose(["+model=tinyllama", "init=random", *expanded]) == quoted
    assert quoted.model_overrides == {"num_hidden_layers": 2, "hidden_size": 64}


def test_bound_like_any_folder() -> None:
    folder = random_model(small())
    adapter = load_object(get_plugin_manager().match_architecture(read_hf_config(folder)).adapter)
    assert bind_tensors(read_manifest(folder), adapter.from_hf_config(read_hf_config(folder)))
