"""LoRA files in both directions between lema and PEFT, and everything that must be refused."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig as PeftConfig
from peft import PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

from lema_core.adapter import ModelAdapter, TensorSpec
from lema_core.errors import CheckpointError
from lema_core.selection import select_modules
from lema_train.lora import LoraConfig, LoraWeights
from lema_train.peft_format import CONFIG_FILE, WEIGHTS_FILE, load_peft, peft_bytes, read_peft_config, save_peft


def base_model(layers: int = 4, hidden: int = 32, tied: bool = False) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=hidden,
        intermediate_size=48,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        tie_word_embeddings=tied,
    )
    return LlamaForCausalLM(config).eval()


class ShapesOf:
    """The linear layers of a transformers model, as an adapter would list them."""

    def __init__(self, model: LlamaForCausalLM) -> None:
        self.n_layers = model.config.num_hidden_layers
        self._linears = [
            (name, tuple(module.weight.shape))
            for name, module in model.named_modules()
            if isinstance(module, torch.nn.Linear)
        ]

    all_linear_routes = False
    all_linear = ModelAdapter.all_linear

    def linear_modules(self) -> Iterable[TensorSpec]:
        for name, shape in self._linears:
            layer = int(name.split(".")[2]) if name.startswith("model.layers.") else None
            yield TensorSpec(f"{name}.weight", shape, "head" if name == "lm_head" else "linear", layer)


@pytest.fixture(scope="module")
def adapter() -> ShapesOf:
    return ShapesOf(base_model())


def trained(adapter: ShapesOf, **options: Any) -> LoraWeights:
    config = LoraConfig(**{"rank": 4, "alpha": 8, **options})
    weights = LoraWeights(config, select_modules(adapter, config.target_modules, config.layers).modules, seed=1)
    generator = torch.Generator().manual_seed(2)
    weights.copy_({n: torch.randn(p.shape, generator=generator) * 0.2 for n, p in weights.parameters().items()})
    return weights


IDS = torch.arange(20).reshape(2, 10) * 3 % 64
SELECTIONS = [
    {"target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"]},
    {"target_modules": "all-linear", "layers": ["last:2"]},
    {"target_modules": ["self_attn.q_proj", "down_proj"], "layers": [0, 2], "use_rslora": True},
    {"target_modules": ["model.layers.1.self_attn.q_proj", "model.layers.2.mlp.up_proj"]},
    {"target_modules": ["q_proj", "lm_head"], "layers": ["last:1"]},
    {"target_modules": ["q_proj", "v_proj"], "rank_pattern": {"v_proj": 2}, "alpha_pattern": {"layers.1.*q_proj": 3.5}},
]


@pytest.mark.parametrize("options", SELECTIONS)
def test_peft_computes_what_lema_wrote(adapter: ShapesOf, tmp_path: Path, options: dict[str, Any]) -> None:
    weights = trained(adapter, **options)
    save_peft(tmp_path, weights, adapter, "some/base")
    assert sorted(path.name for path in tmp_path.iterdir()) == [CONFIG_FILE, WEIGHTS_FILE]
    assert 0 <= (tmp_path / WEIGHTS_FILE).stat().st_size - peft_bytes(weights) < 16384

    model = PeftModel.from_pretrained(base_model(), tmp_path)
    held = {name: param for name, param in model.named_parameters() if "lora_" in name}
    assert len(held) == 2 * len(weights.modules)
    for name, parameter in weights.parameters().items():
        assert torch.equal(held[f"base_model.model.{name}.default.weight"], parameter), name

    # the oracle of the scale: W + scale * B @ A by hand
    merged = base_model()
    for module, update in weights.updates().items():
        merged.get_submodule(module).weight.data += update.scale * (update.lora_B @ update.lora_A).detach()
    with torch.no_grad():
        by_peft, by_hand, base = model(IDS).logits, merged(IDS).logits, base_model()(IDS).logits
    torch.testing.assert_close(by_peft, by_hand, rtol=0, atol=1e-5)
    assert (by_peft - base).abs().max() > 1e-3


def test_the_file_holds_only_lora_tensors_with_metadata(adapter: ShapesOf, tmp_path: Path) -> None:
    weights = trained(adapter, target_modules=["q_proj", "k_proj", "v_proj", "o_proj"])
    save_peft(tmp_path, weights, adapter, None)
    tensors = load_file(tmp_path / WEIGHTS_FILE)
    assert len(tensors) == 2 * 4 * 4
    assert all(name.endswith((".lora_A.weight", ".lora_B.weight")) and t.numel() > 0 for name, t in tensors.items())
    raw = (tmp_path / WEIGHTS_FILE).read_bytes()
    header = json.loads(raw[8 : 8 + int.from_bytes(raw[:8], "little")])
    assert header["__metadata__"]["format"] == "pt"


def peft_folder(tmp_path: Path, model: LlamaForCausalLM | None = None, **options: Any) -> tuple[Path, PeftModel]:
    torch.manual_seed(3)
    config = PeftConfig(**{"r": 4, "lora_alpha": 8, "init_lora_weights": False, "task_type": "CAUSAL_LM", **options})
    made = get_peft_model(model or base_model(), config)
    made.save_pretrained(tmp_path / "peft", save_embedding_layers=False)
    return tmp_path / "peft", made


@pytest.mark.parametrize(
    "options",
    [
        {"target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"]},
        {"target_modules": "all-linear", "use_rslora": True},
        {"target_modules": ["q_proj", "lm_head"], "layers_to_transform": [1, 3]},
        {"target_modules": ["up_proj"], "layers_to_transform": 2, "layers_pattern": "layers"},
        {"target_modules": r".*\.[02]\..*(q|v)_proj"},
        {"target_modules": ["q_proj", "v_proj"], "exclude_modules": ["layers.1.self_attn.q_proj"]},
        {"target_modules": ["q_proj", "gate_proj"], "rank_pattern": {"layers.2.*q_proj": 7}},
        {"target_modules": ["q_proj"], "alpha_pattern": {"q_proj": 32}, "rank_pattern": {"q_proj": 2}},
    ],
)
def test_lema_reads_what_peft_wrote(adapter: ShapesOf, tmp_path: Path, options: dict[str, Any]) -> None:
    folder, model = peft_folder(tmp_path, **options)
    weights = load_peft(folder, adapter)
    held = {
        name.removeprefix("base_model.model.").removesuffix(".default.weight"): param
        for name, param in model.named_parameters()
        if "lora_" in name
    }
    parameters = weights.parameters()
    assert parameters.keys() == held.keys()
    for name, parameter in parameters.items():
        assert torch.equal(parameter, held[name]) and parameter.requires_grad, name
    for module, update in weights.updates().items():
        expected = model.get_submodule(f"base_model.model.{module}").scaling["default"]
        assert update.scale == pytest.approx(expected, rel=1e-12), module

    # and what was read writes the same modules again
    again = tmp_path / "again"
    again.mkdir()
    save_peft(again, weights, adapter, None)
    reread = load_peft(again, adapter)
    assert {n: p.tolist() for n, p in reread.parameters().items()} == {n: p.tolist() for n, p in parameters.items()}
    assert [u.scale for u in reread.updates().values()] == [u.scale for u in weights.updates().values()]


def test_half_precision_files_are_widened(adapter: ShapesOf, tmp_path: Path) -> None:
    folder, _ = peft_folder(tmp_path, target_modules=["q_proj"])
    halves = {name: tensor.bfloat16() for name, tensor in load_file(folder / WEIGHTS_FILE).items()}
    save_file(halves, folder / WEIGHTS_FILE)
    weights = load_peft(folder, adapter)
    for name, parameter in weights.parameters().items():
        assert parameter.dtype == torch.float32
        assert torch.equal(parameter, halves[f"base_model.model.{name}.weight"].float())


def test_files_without_metadata_and_with_the_older_spelling_are_read(adapter: ShapesOf, tmp_path: Path) -> None:
    folder, _ = peft_folder(tmp_path, target_modules=["q_proj", "o_proj"])
    expected = load_peft(folder, adapter).parameters()
    tensors = load_file(folder / WEIGHTS_FILE)
    save_file({n.replace(".weight", ".default.weight"): t for n, t in tensors.items()}, folder / WEIGHTS_FILE)
    older = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "o_proj"], "bias": "none"}
    older |= {"enable_lora": None, "merge_weights": False, "fan_in_fan_out": False, "task_type": "CAUSAL_LM"}
    (folder / CONFIG_FILE).write_text(json.dumps(older))
    found = load_peft(folder, adapter).parameters()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def rename(old: str, new: str) -> Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]:
    return lambda tensors: {name.replace(old, new): tensor for name, tensor in tensors.items()}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda tensors: {n: t for n, t in tensors.items() if ".layers.2." not in n},
            r"4 tensors its config calls for are missing: model\.layers\.2\.self_attn\.q_proj\.lora_A,",
        ),
        (rename("base_model.model.model.", "model."), r"16 tensors are not named .*: model\.layers\.0\.self_attn"),
        (rename("self_attn", "attention"), "16 tensors .* missing.*16 tensors fit no targeted module"),
        (
            lambda tensors: {**tensors, "base_model.model.model.layers.0.mlp.up_proj.lora_A.weight": torch.ones(4, 32)},
            r"1 tensors fit no targeted module of this model: model\.layers\.0\.mlp\.up_proj\.lora_A",
        ),
        (
            lambda tensors: {n: t[:3] if "layers.1.self_attn.q_proj.lora_A" in n else t for n, t in tensors.items()},
            r"layers\.1\.self_attn\.q_proj\.lora_A \[4, 32\] expected, \[3, 32\] found",
        ),
        (
            lambda tensors: {**tensors, "base_model.model.model.embed_tokens.lora_embedding_A": torch.ones(4, 64)},
            "LoRA on embeddings is not supported",
        ),
        (
            lambda tensors: {**tensors, "base_model.model.lm_head.base_layer.weight": torch.ones(64, 32)},
            "copies of base weights .*save_embedding_layers=False",
        ),
        (
            lambda tensors: {**tensors, "base_model.model.model.layers.0.self_attn.q_proj.lora_A.default.weight":
                             torch.ones(4, 32)},
            "another key hold the same weight",
        ),
    ],
)  # fmt: skip
def test_tensors_that_do_not_fit_are_refused(
    adapter: ShapesOf, tmp_path: Path, change: Callable[..., dict[str, torch.Tensor]], message: str
) -> None:
    folder, _ = peft_folder(tmp_path, target_modules=["q_proj", "v_proj"])
    tensors = change(load_file(folder / WEIGHTS_FILE))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / WEIGHTS_FILE)
    with pytest.raises(CheckpointError, match=message) as caught:
        load_peft(folder, adapter)
    assert WEIGHTS_FILE in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("foreign", "message"),
    [
        ({"layers": 6}, r"8 tensors fit no targeted module of this model: model\.layers\.4\."),
        ({"layers": 3}, r"4 tensors its config calls for are missing: model\.layers\.3\."),
        ({"hidden": 40}, r"16 tensors have another shape: .*\[4, 32\] expected, \[4, 40\] found"),
    ],
)
def test_weights_for_another_base_are_refused(
    adapter: ShapesOf, tmp_path: Path, foreign: dict[str, int], message: str
) -> None:
    folder, _ = peft_folder(tmp_path, base_model(**foreign), target_modules=["q_proj", "v_proj"])
    with pytest.raises(CheckpointError, match=message):
        load_peft(folder, adapter)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"modules_to_save": ["lm_head"]}, r"modules_to_save = \['lm_head'\]"),
        ({"use_dora": True}, "use_dora = True"),
        ({"ensure_weight_tying": True}, "ensure_weight_tying = True"),
        ({"lora_bias": True}, "lora_bias = True"),
        ({"bias": "all"}, "bias 'all'"),
        ({"peft_type": "LOHA"}, "peft_type 'LORA' expected, 'LOHA' found"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights 'pissa'"),
        ({"layer_replication": [[0, 4], [2, 4]]}, "layer_replication"),
        ({"trainable_token_indices": [1]}, "trainable_token_indices"),
        ({"some_new_feature": {"on": True}}, "some_new_feature"),
        ({"r": "four"}, "lora_rank: .*'four' found"),
        ({"r": None}, "lora_rank"),
        ({"lora_alpha": None}, "lora_alpha"),
        ({"target_modules": ["c_attn"]}, "match no linear layer of this model"),
        ({"target_modules": "["}, "another type"),
        ({"target_modules": None}, "another type"),
    ],
)
def test_what_is_not_plain_lora_is_refused_by_name(
    adapter: ShapesOf, tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    folder, _ = peft_folder(tmp_path, target_modules=["q_proj"])
    config = read_peft_config(folder)
    (folder / CONFIG_FILE).write_text(json.dumps({**config, **changes}))
    with pytest.raises(CheckpointError, match=message) as caught:
        load_peft(folder, adapter)
    assert str(folder) in str(caught.value) and "\n" not in str(caught.value)


def test_missing_and_damaged_files_are_named(adapter: ShapesOf, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=f"{CONFIG_FILE}: cannot be read"):
        load_peft(tmp_path, adapter)
    folder, _ = peft_folder(tmp_path, target_modules=["q_proj"])
    weights = (folder / WEIGHTS_FILE).read_bytes()
    (folder / WEIGHTS_FILE).write_bytes(weights[: len(weights) // 2])
    with pytest.raises(CheckpointError, match=WEIGHTS_FILE):
        load_peft(folder, adapter)
    (folder / WEIGHTS_FILE).rename(folder / "adapter_model.bin")
    with pytest.raises(CheckpointError, match=r"adapter_model\.bin: a pickle"):
        load_peft(folder, adapter)
    config = read_peft_config(folder)
    (folder / CONFIG_FILE).write_text(json.dumps({key: config[key] for key in config if key != "r"}))
    with pytest.raises(CheckpointError, match="field 'r' is missing"):
        load_peft(folder, adapter)
    (folder / CONFIG_FILE).write_text("{")
    with pytest.raises(CheckpointError, match="not valid JSON"):
        load_peft(folder, adapter)
    (folder / CONFIG_FILE).write_text("[]")
    with pytest.raises(CheckpointError, match="JSON object expected"):
        load_peft(folder, adapter)


def test_a_head_that_shares_the_embeddings_can_have_lora(tmp_path: Path) -> None:
    tied = base_model(tied=True)
    adapter = ShapesOf(tied)
    weights = trained(adapter, target_modules=["lm_head"], alpha=math.pi)
    save_peft(tmp_path, weights, adapter, None)
    model = PeftModel.from_pretrained(base_model(tied=True), tmp_path)
    with torch.no_grad():
        hidden = tied.model(IDS).last_hidden_state
        update = weights.updates()["lm_head"]
        expected = tied.lm_head(hidden) + update.scale * (hidden @ update.lora_A.T) @ update.lora_B.T
        torch.testing.assert_close(model(IDS).logits, expected, rtol=0, atol=1e-5)
