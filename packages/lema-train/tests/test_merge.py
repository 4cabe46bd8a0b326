"""Merged folders beside PEFT's ``merge_and_unload``, and everything that must be refused."""

from __future__ import annotations

import json
import os
import shutil
from collections import namedtuple
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import split_torch_state_dict_into_shards
from peft import LoraConfig as PeftConfig
from peft import PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM
from transformers.pytorch_utils import Conv1D

from lema_core.adapter import ModelAdapter, TensorSpec
from lema_core.checkpoint import TensorInfo, read_header, read_manifest
from lema_core.errors import CheckpointError
from lema_train import merge_write
from lema_train.merge import Change, Changes
from lema_train.merge_lora import lora_changes
from lema_train.merge_plan import plan_merge
from lema_train.merge_write import MergeReport, write_merged

IDS = torch.arange(20).reshape(2, 10) * 3 % 64
pytestmark = pytest.mark.filterwarnings(
    "ignore:Model (has|with) `tie_word_embeddings", "ignore:.*save_embedding_layers"
)


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


class Described:
    """A transformers model as a model adapter declares it: its tensors, and nothing that computes."""

    ignored = ()

    def __init__(self, model: torch.nn.Module) -> None:
        self.prefixes = (f"{model.base_model_prefix}.", "")
        self.n_layers = model.config.num_hidden_layers
        self._specs = []
        first: dict[int, str] = {}
        for name, parameter in model.named_parameters(remove_duplicate=False):
            module = model.get_submodule(name.rpartition(".")[0])
            head = name.startswith("lm_head")
            role = "norm"
            if isinstance(module, (torch.nn.Linear, Conv1D)) and name.endswith(".weight"):
                role = "head" if head else "linear"
            elif isinstance(module, torch.nn.Embedding):
                role = "embedding"
            number = [int(part) for part in name.split(".") if part.isdigit()]
            tied = first.get(id(parameter))
            first.setdefault(id(parameter), name)
            self._specs.append(
                TensorSpec(
                    name, tuple(parameter.shape), role, number[0] if number else None, tied, isinstance(module, Conv1D)
                )
            )

    def tensors(self) -> list[TensorSpec]:
        return self._specs

    def unfolded(self, found: Mapping[str, TensorInfo]) -> Mapping[str, TensorInfo]:
        return found

    all_linear_routes = False
    all_linear = ModelAdapter.all_linear

    def linear_modules(self) -> Iterable[TensorSpec]:
        return (spec for spec in self._specs if spec.role in ("linear", "head"))


def llama(tied: bool = False, hidden: int = 32, layers: int = 3) -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=64, hidden_size=hidden, intermediate_size=48, num_hidden_layers=layers, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, tie_word_embeddings=tied,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def gpt2() -> GPT2LMHeadModel:
    return GPT2LMHeadModel(GPT2Config(vocab_size=64, n_embd=32, n_layer=2, n_head=4, n_positions=32))


class Case:
    """A base folder and a PEFT folder trained on it, and what PEFT makes of the two."""

    def __init__(self, folder: Path, model: torch.nn.Module, dtype: torch.dtype = torch.float32) -> None:
        self.base, self.lora, self.out = folder / "base", folder / "lora", folder / "out"
        self.adapter = Described(model)
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.2 + (parameter.ndim == 1))
        model.to(dtype).save_pretrained(self.base)
        (self.base / "tokenizer.json").write_text('{"model": "a tokenizer"}')

    def open(self, folder: Path | None = None) -> torch.nn.Module:
        return AutoModelForCausalLM.from_pretrained(folder or self.base, dtype=torch.float32).eval()

    def train(self, **options: Any) -> Case:
        """Write a PEFT folder in which everything that trains is random."""
        torch.manual_seed(3)
        given = {"r": 4, "lora_alpha": 8, "init_lora_weights": False, "task_type": "CAUSAL_LM", **options}
        model = get_peft_model(self.open(), PeftConfig(**given))
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "modules_to_save" in name:
                    parameter += torch.randn(parameter.shape) * 0.1
        model.save_pretrained(self.lora)
        return self

    def live(self) -> PeftModel:
        return PeftModel.from_pretrained(self.open(), self.lora).eval()

    def merge(self, dtype: torch.dtype | None = None, shard: int | None = None, **how: Any) -> MergeReport:
        manifest = read_manifest(self.base)
        plan = plan_merge(manifest, lora_changes(self.lora, self.adapter, manifest), dtype, shard)
        return write_merged(plan, self.out, [self.lora], **how)


def tensors_of(folder: Path) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        tensors = load_file(path)
        assert not found.keys() & tensors.keys()
        found |= tensors
    return found


def logits(model: torch.nn.Module) -> Tensor:
    with torch.no_grad():
        return model(IDS).logits


def bits(tensor: Tensor) -> bytes:
    return tensor.contiguous().view(torch.uint8).numpy().tobytes()


OPTIONS: list[dict[str, Any]] = [
    {"target_modules": "all-linear"},
    {"target_modules": ["q_proj", "v_proj"], "use_rslora": True},
    {
        "target_modules": ["q_proj", "down_proj"],
        "rank_pattern": {"down_proj": 2},
        "alpha_pattern": {"layers.1.*q_proj": 3.5},
    },
    {"target_modules": ["q_proj", "lm_head"], "layers_to_transform": [1]},
]


@pytest.mark.parametrize("options", OPTIONS)
def test_in_fp32_it_is_what_peft_merges(tmp_path: Path, options: dict[str, Any]) -> None:
    case = Case(tmp_path, llama()).train(**options)
    report = case.merge()
    merged, base, expected = tensors_of(case.out), tensors_of(case.base), case.live().merge_and_unload()
    state = expected.state_dict()
    changed = {name for name in base if not torch.equal(state[name], base[name])}
    assert merged.keys() == base.keys() and changed and report.changed == len(changed)
    for name, tensor in merged.items():
        if name in changed:
            torch.testing.assert_close(tensor, state[name], rtol=0, atol=1e-6)
        else:
            assert bits(tensor) == bits(base[name]), name
    assert (logits(case.open(case.out)) - logits(expected)).abs().max() <= 1e-6
    assert (logits(case.open(case.out)) - logits(case.live())).abs().max() <= 1e-5
    assert (logits(case.open(case.out)) - logits(case.open())).abs().max() > 1e-3


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_stored_in_fewer_bits_it_is_rounded_once(tmp_path: Path, dtype: torch.dtype) -> None:
    case = Case(tmp_path, llama(), dtype).train(target_modules="all-linear")
    report = case.merge()
    merged, base, state = tensors_of(case.out), tensors_of(case.base), case.live().merge_and_unload().state_dict()
    for name, tensor in merged.items():
        assert tensor.dtype == dtype and bits(tensor) == bits(state[name].to(dtype)), name
    moved = sum(int((merged[name] != base[name]).sum()) for name in base)
    wanted = sum(int((state[name] != base[name].float()).sum()) for name in base)
    assert (report.updated, report.updated - report.lost) == (wanted, moved) and report.lost > 0
    sizes = [(folder / "model.safetensors").stat().st_size for folder in (case.base, case.out)]
    assert abs(sizes[1] / sizes[0] - 1) < 0.05
    assert (case.out / "config.json").read_bytes() == (case.base / "config.json").read_bytes()


def test_what_is_beside_the_weights_comes_along(tmp_path: Path) -> None:
    case = Case(tmp_path, llama()).train(target_modules=["q_proj"])
    (case.base / "additional_chat_templates").mkdir()
    kept = {"chat_template.jinja", "LICENSE", "vocab.txt", "modeling_own.py", "additional_chat_templates/tool.jinja"}
    for name in [*kept, "README.md", ".hidden.json", "pytorch_model.bin", "training_args.bin", "adapter_config.json"]:
        (case.base / name).write_text(f"content of {name}")
    case.merge()
    written = {path.relative_to(case.out).as_posix() for path in case.out.rglob("*") if path.is_file()}
    kept |= {"config.json", "generation_config.json", "tokenizer.json"}
    assert written == kept | {"model.safetensors"}
    assert all((case.out / name).read_bytes() == (case.base / name).read_bytes() for name in kept)


@pytest.mark.parametrize("metadata", [None, {}, {"format": "mlx", "made": "here"}])
def test_metadata_of_files_is_kept_and_says_pt(tmp_path: Path, metadata: dict[str, str] | None) -> None:
    case = Case(tmp_path, llama()).train(target_modules=["q_proj"])
    path = case.base / "model.safetensors"
    tensors = load_file(path)
    save_file(tensors, path, metadata=metadata)
    case.merge()
    header = read_header(case.out / "model.safetensors")
    assert header.metadata == {**(metadata or {}), "format": "pt"}
    assert list(header.tensors) == sorted(
        read_header(path).tensors, key=lambda n: read_header(path).tensors[n].segment.offset
    )


def sharded(case: Case, max_shard_size: str) -> None:
    model = case.open()
    shutil.rmtree(case.base)
    model.save_pretrained(case.base, max_shard_size=max_shard_size)


def test_shards_are_kept_as_they_are(tmp_path: Path) -> None:
    case = Case(tmp_path, llama()).train(target_modules="all-linear")
    sharded(case, "30KB")
    names = {path.name for path in case.base.glob("*.safetensors")}
    case.merge()
    assert len(names) > 3 and {path.name for path in case.out.glob("*.safetensors")} == names
    for name in names:
        assert list(read_header(case.out / name).tensors) == list(read_header(case.base / name).tensors)
    index = "model.safetensors.index.json"
    assert json.loads((case.out / index).read_text()) == json.loads((case.base / index).read_text())
    torch.testing.assert_close(logits(case.open(case.out)), logits(case.live()), rtol=0, atol=1e-5)


@pytest.mark.parametrize("shard", [1, 7_000, 30_000, 10**9])
def test_other_shards_are_those_that_transformers_makes(tmp_path: Path, shard: int) -> None:
    case = Case(tmp_path, llama()).train(target_modules="all-linear")
    sharded(case, "30KB")
    case.merge(shard=shard)
    ordered = {
        name: tensor for path in sorted(case.base.glob("*.safetensors")) for name, tensor in load_file(path).items()
    }
    in_order = {
        name: ordered[name]
        for path in sorted(case.base.glob("*.safetensors"))
        for name in sorted(read_header(path).tensors, key=lambda n, p=path: read_header(p).tensors[n].segment.offset)
    }
    expected = split_torch_state_dict_into_shards(in_order, max_shard_size=shard)
    written = {path.name: list(read_header(path).tensors) for path in case.out.glob("*.safetensors")}
    assert written == expected.filename_to_tensors
    index = case.out / "model.safetensors.index.json"
    assert index.exists() == expected.is_sharded
    if expected.is_sharded:
        found = json.loads(index.read_text())
        assert found["weight_map"] == expected.tensor_to_filename
        assert found["metadata"]["total_size"] == sum(t.nbytes for t in in_order.values())
        assert found["metadata"]["total_parameters"] == sum(t.numel() for t in in_order.values())
    torch.testing.assert_close(logits(case.open(case.out)), logits(case.live()), rtol=0, atol=1e-5)


@pytest.mark.parametrize("other_name", ["one.safetensors", "model-00001-of-00001.safetensors"])
def test_a_single_file_of_another_name_becomes_servable(tmp_path: Path, other_name: str) -> None:
    case = Case(tmp_path, llama()).train(target_modules=["q_proj"])
    expected = logits(case.live())
    (case.base / "model.safetensors").rename(case.base / other_name)
    if other_name != "one.safetensors":
        names = read_header(case.base / other_name).tensors
        index = {"metadata": {"total_size": 5}, "weight_map": dict.fromkeys(names, other_name)}
        (case.base / "model.safetensors.index.json").write_text(json.dumps(index))
    case.merge()
    torch.testing.assert_close(logits(case.open(case.out)), expected, rtol=0, atol=1e-5)


TIED: list[tuple[dict[str, Any], bool]] = [
    ({"target_modules": ["q_proj", "lm_head"]}, True),
    ({"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]}, True),
    ({"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens"]}, True),
    ({"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens", "lm_head"]}, True),
    ({"target_modules": ["q_proj"], "modules_to_save": ["norm"]}, False),
    ({"target_modules": ["q_proj"]}, False),
]


@pytest.mark.parametrize("both_in_file", [False, True])
@pytest.mark.parametrize(("options", "untied"), TIED)
def test_a_tied_head_that_changed_alone_is_untied(
    tmp_path: Path, options: dict[str, Any], untied: bool, both_in_file: bool
) -> None:
    case = Case(tmp_path, llama(tied=True)).train(**options)
    if both_in_file:
        tensors = load_file(case.base / "model.safetensors")
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
        save_file(tensors, case.base / "model.safetensors", metadata={"format": "pt"})
    case.merge()
    merged = tensors_of(case.out)
    assert ("lm_head.weight" in merged) == (untied or both_in_file)
    assert json.loads((case.out / "config.json").read_text())["tie_word_embeddings"] == (not untied)
    if "embed_tokens" not in options.get("modules_to_save", []):
        assert bits(merged["model.embed_tokens.weight"]) == bits(tensors_of(case.base)["model.embed_tokens.weight"])
    loaded = case.open(case.out)
    torch.testing.assert_close(logits(loaded), logits(case.live()), rtol=0, atol=1e-5)
    assert (loaded.lm_head.weight is loaded.model.embed_tokens.weight) == (not untied)


@pytest.mark.parametrize("options", [{"target_modules": ["q_proj"]}, {"target_modules": ["q_proj", "lm_head"]}])
@pytest.mark.parametrize("tied", [False, True])
def test_copies_of_base_weights_in_the_adapter_count(tmp_path: Path, options: dict[str, Any], tied: bool) -> None:
    """PEFT loads them into the base, whatever they hold: here not what the base has."""
    case = Case(tmp_path, llama(tied), torch.bfloat16)
    model = get_peft_model(case.open(), PeftConfig(r=2, init_lora_weights=False, task_type="CAUSAL_LM", **options))
    with torch.no_grad():
        model.get_base_model().get_output_embeddings().weight.mul_(1.5)
    model.save_pretrained(case.lora, save_embedding_layers=True)
    assert len(load_file(case.lora / "adapter_model.safetensors")) > 2 * len(options["target_modules"])
    case.merge(torch.float32)
    torch.testing.assert_close(logits(case.open(case.out)), logits(case.live()), rtol=0, atol=1e-5)


def without_prefix(folder: Path) -> None:
    path = folder / "model.safetensors"
    tensors = {name.removeprefix("transformer."): tensor for name, tensor in load_file(path).items()}
    save_file(tensors, path, metadata={"format": "pt"})


@pytest.mark.parametrize("prefix", [True, False])
@pytest.mark.parametrize("targets", [["c_attn", "c_proj", "c_fc"], ["c_attn", "lm_head"]])
def test_conv1d_lies_the_other_way_round(tmp_path: Path, targets: list[str], prefix: bool) -> None:
    case = Case(tmp_path, gpt2()).train(target_modules=targets)
    if not prefix:
        without_prefix(case.base)
    case.merge()
    expected = {"lm_head.weight"} if "lm_head" in targets else set()
    assert tensors_of(case.out).keys() == tensors_of(case.base).keys() | expected
    torch.testing.assert_close(logits(case.open(case.out)), logits(case.live()), rtol=0, atol=1e-5)


@pytest.mark.parametrize("make", [llama, gpt2])
@pytest.mark.parametrize("block", [1, 100, 1000])
def test_blocks_of_rows_change_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make: Callable[[], torch.nn.Module], block: int
) -> None:
    case = Case(tmp_path, make(), torch.bfloat16).train(target_modules="all-linear")
    case.merge(torch.float32)
    whole = tensors_of(case.out)
    steps: list[int] = []
    monkeypatch.setattr(merge_write, "_BLOCK", block)
    case.merge(torch.float32, advance=steps.append)
    for name, tensor in tensors_of(case.out).items():
        torch.testing.assert_close(tensor, whole[name], rtol=0, atol=1e-7)
    total = sum(tensor.nbytes for tensor in whole.values())
    assert min(steps) > 0 and sum(steps) == total


def test_changes_may_be_made_to_some_rows_of_a_tensor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As to one expert of a fused tensor; what is opened is opened once, and not before its rows come."""
    monkeypatch.setattr(merge_write, "_BLOCK", 10)
    fused = torch.arange(4 * 3 * 5.0).view(4, 3, 5)
    save_file({"experts": fused.clone(), "other": torch.ones(3, dtype=torch.int64)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text("{}")
    opened: list[int] = []

    def add(value: int) -> Callable[[], Callable[[Tensor, int], None]]:
        def update(rows: Tensor, start: int) -> None:
            rows += value * torch.arange(start + 1, start + 1 + len(rows)).unsqueeze(1)

        def opens() -> Callable[[Tensor, int], None]:
            opened.append(value)
            return update

        return opens

    changes = Changes({"experts": (Change(9, 3, add(1000)), Change(3, 3, add(100)), Change(3, 3, add(10)))})
    write_merged(plan_merge(read_manifest(tmp_path), changes, torch.float64), tmp_path / "out", [])
    expected = fused.double()
    expected[1] += 110 * torch.arange(1, 4).unsqueeze(1)
    expected[3] += 1000 * torch.arange(1, 4).unsqueeze(1)
    merged = tensors_of(tmp_path / "out")
    assert torch.equal(merged["experts"], expected) and opened == [100, 10, 1000]
    assert merged["other"].dtype == torch.int64
    assert json.loads((tmp_path / "out/config.json").read_text()) == {"torch_dtype": "float64"}


def test_tensors_that_the_model_does_not_know_are_kept_byte_for_byte(tmp_path: Path) -> None:
    case = Case(tmp_path, llama(), torch.bfloat16).train(target_modules=["q_proj"])
    tensors = load_file(case.base / "model.safetensors")
    extra = {
        "foo.weight": torch.tensor([float("nan"), 1e30]),
        "bar": torch.arange(5, dtype=torch.int8),
        "f8": torch.ones(2, 3).to(torch.float8_e4m3fn),
        "model.norm.weight": tensors["model.norm.weight"].float(),
        "nothing": torch.empty(0, 4),
    }
    save_file(tensors | extra, case.base / "model.safetensors")
    with pytest.warns(UserWarning, match=r"no use for: .*foo\.weight"):
        case.merge()
    merged = tensors_of(case.out)
    for name, tensor in extra.items():
        assert merged[name].dtype == tensor.dtype and bits(merged[name]) == bits(tensor), name


def test_another_type_is_written_everywhere_and_in_the_config(tmp_path: Path) -> None:
    case = Case(tmp_path, llama(), torch.bfloat16).train(target_modules="all-linear")
    assert case.merge().lost > 0
    report = case.merge(torch.float32)
    assert (report.updated, report.lost) == (0, 0)
    assert {tensor.dtype for tensor in tensors_of(case.out).values()} == {torch.float32}
    assert json.loads((case.out / "config.json").read_text())["dtype"] == "float32"
    model = AutoModelForCausalLM.from_pretrained(case.out, dtype="auto")
    assert model.dtype == torch.float32
    torch.testing.assert_close(logits(model), logits(case.live()), rtol=0, atol=1e-5)


def test_updates_below_the_rounding_are_counted(tmp_path: Path) -> None:
    """1 - 1e-3 in bf16 is 1 again."""
    save_file({"w": torch.ones(5, 7).bfloat16()}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text("{}")
    changes = Changes({"w": (Change(0, 4, lambda: lambda rows, start: rows.sub_(1e-3)),)})
    report = write_merged(plan_merge(read_manifest(tmp_path), changes), tmp_path / "out", [])
    assert (report.updated, report.lost) == (28, 28)
    assert torch.equal(tensors_of(tmp_path / "out")["w"], torch.ones(5, 7).bfloat16())


# -- refusals


def refusal(case: Case, **how: Any) -> str:
    with pytest.raises(CheckpointError) as caught:
        case.merge(**how)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.fixture
def case(tmp_path: Path) -> Case:
    return Case(tmp_path, llama(), torch.float16).train(target_modules=["q_proj"])


def other_base(case: Case, model: torch.nn.Module) -> None:
    shutil.rmtree(case.base)
    model.save_pretrained(case.base)
    case.adapter = Described(model)


def test_another_base_is_refused_by_name(case: Case) -> None:
    other_base(case, llama(hidden=48))
    assert "model.layers.0.self_attn.q_proj.lora_A [4, 48] expected, [4, 32] found" in refusal(case)
    other_base(case, llama(layers=2))
    assert "fit no targeted module of this model: model.layers.2.self_attn.q_proj.lora_A" in refusal(case)
    other_base(case, llama(layers=4))
    assert "are missing: model.layers.3.self_attn.q_proj.lora_A" in refusal(case)
    tensors = load_file(case.base / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, case.base / "model.safetensors")
    assert "model.layers.1.mlp.up_proj.weight" in refusal(case)
    assert not case.out.exists()


def test_added_tokens_are_refused_with_both_shapes(tmp_path: Path) -> None:
    case = Case(tmp_path, llama())
    model = case.open()
    model.resize_token_embeddings(66, mean_resizing=False)
    model = get_peft_model(model, PeftConfig(target_modules=["q_proj"], modules_to_save=["embed_tokens", "lm_head"]))
    model.save_pretrained(case.lora)
    assert "shape [64, 32] expected from the base model, [66, 32] found" in refusal(case)


@pytest.mark.parametrize("drop", ["lm_head", "embed_tokens"])
def test_weights_that_the_config_promises_must_be_there(tmp_path: Path, drop: str) -> None:
    case = Case(tmp_path, llama()).train(target_modules=["q_proj"], modules_to_save=["lm_head", "embed_tokens"])
    path = case.lora / "adapter_model.safetensors"
    save_file({name: tensor for name, tensor in load_file(path).items() if drop not in name}, path)
    assert f"modules_to_save names '{drop}', and the file lacks " in refusal(case)


def test_nothing_that_is_read_is_ever_replaced(case: Case, tmp_path: Path) -> None:
    before = {path: path.read_bytes() for folder in (case.base, case.lora) for path in folder.iterdir()}

    def refused(out: Path, words: str) -> None:
        case.out = out
        assert words in refusal(case)
        assert {path: path.read_bytes() for folder in (case.base, case.lora) for path in folder.iterdir()} == before

    refused(case.base, "is or holds")
    refused(case.lora, "is or holds")
    refused(tmp_path, "is or holds")
    refused(case.base / "..", "is or holds")
    (tmp_path / "link").symlink_to(case.base, target_is_directory=True)
    refused(tmp_path / "link", "is or holds")
    for make in (os.link, os.symlink):
        shutil.rmtree(tmp_path / "linked", ignore_errors=True)
        (tmp_path / "linked").mkdir()
        make(case.base / "model.safetensors", tmp_path / "linked/model.safetensors")
        refused(tmp_path / "linked", "by another name")
    # the other way round: the base is a folder of links, as the Hub's cache is
    real = tmp_path / "real"
    case.base.rename(real)
    case.base.mkdir()
    for path in real.iterdir():
        (case.base / path.name).symlink_to(path)
    refused(real, "by another name")


def test_an_earlier_merge_is_replaced_and_foreign_files_are_not(case: Case, tmp_path: Path) -> None:
    case.merge()
    (case.out / "model.safetensors").write_bytes(b"older")
    case.merge()
    assert tensors_of(case.out)
    (case.out / "notes.txt").write_text("mine")
    assert "holds files that are not part of this save and would be lost: notes.txt" in refusal(case)
    case.out = tmp_path / "file"
    case.out.write_text("mine")
    assert "a folder expected, a file found" in refusal(case)
    # through a link the folder behind it is replaced, and the link stays
    case.out = tmp_path / "link"
    case.out.symlink_to(tmp_path / "behind")
    case.merge()
    case.merge()
    assert case.out.is_symlink() and tensors_of(tmp_path / "behind")


def test_a_full_disk_is_seen_before_anything_is_written(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(10**9, 10**9 - 1000, 1000))
    needed = sum(tensor.nbytes for tensor in tensors_of(case.base).values())
    message = refusal(case)
    assert " bytes needed, 1000 bytes free" in message
    assert needed <= int(message.split(" bytes needed")[0].rpartition(" ")[2]) <= needed + 1_100_000
    assert not case.out.exists()


def scale_lora(case: Case, part: str, factor: float) -> None:
    path = case.lora / "adapter_model.safetensors"
    tensors = load_file(path)
    save_file({name: t * factor if part in name else t for name, t in tensors.items()}, path)


def test_numbers_that_fp16_cannot_hold_are_refused_by_tensor(case: Case, tmp_path: Path) -> None:
    scale_lora(case, "layers.1.self_attn.q_proj.lora_B", 1e7)
    message = refusal(case)
    assert "tensor 'model.layers.1.self_attn.q_proj.weight': " in message
    assert "F16 holds at most 65504: store it as another type, merge_dtype=bfloat16" in message
    assert sorted(path.name for path in tmp_path.iterdir()) == ["base", "lora"]
    case.merge(torch.bfloat16)
    assert all(tensor.isfinite().all() for tensor in tensors_of(case.out).values())


def test_numbers_that_are_not_finite_are_refused(case: Case) -> None:
    scale_lora(case, "layers.1.self_attn.q_proj.lora_A", float("nan"))
    assert (
        "infinite or NaN when merged: the base or what is merged into it holds values that are not finite"
        in refusal(case)
    )
    assert not case.out.exists()


def test_whatever_stops_it_leaves_the_earlier_folder(case: Case) -> None:
    case.merge()
    before: Mapping[Path, bytes] = {path: path.read_bytes() for path in case.out.iterdir()}

    half = sum(4 * tensor.numel() for tensor in tensors_of(case.out).values()) // 2
    told: list[int] = []

    def stop(nbytes: int) -> None:
        told.append(nbytes)
        if sum(told) > half:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        case.merge(torch.float32, advance=stop)
    assert {path: path.read_bytes() for path in case.out.iterdir()} == before
    assert sorted(path.name for path in case.out.parent.iterdir()) == ["base", "lora", "out"]


def test_rows_of_a_tensor_that_a_part_is(tmp_path: Path) -> None:
    """A model adapter may bind a weight to a run of rows of what lies in the file."""
    from lema_core.checkpoint import Segment
    from lema_train.merge_places import Places

    save_file({"a": torch.zeros(3), "fused": torch.zeros(4, 3, 5).half()}, tmp_path / "model.safetensors")
    manifest = read_manifest(tmp_path)
    whole = manifest.tensors["fused"]
    third = Segment(whole.segment.path, whole.segment.offset + 2 * 30, 30)
    assert Places(manifest).of(TensorInfo("experts.2", torch.float16, (3, 5), third)) == ("fused", 6)
    assert Places(manifest).of(whole) == ("fused", 0)
