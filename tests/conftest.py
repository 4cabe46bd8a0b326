"""Tiny Llamas in Hugging Face layout, opened with lema, transformers and PEFT alike."""

from __future__ import annotations

import functools
import json
import re
import types
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
from safetensors.torch import load_file, save_file
from tokenizers import decoders, models, pre_tokenizers
from torch import Tensor

import lema.model
from lema import LemaConfig, LemaModel
from lema_core.checkpoint import bind_tensors, read_manifest
from lema_core.device import Device
from lema_core.store.model import StreamedModel, cut_model
from lema_core.testing.quick_figures import quick_figures
from lema_cuda.library import refusals
from lema_cuda.testing import held_to, levels

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
#: what differs from an untied fp32 Llama in one file
VARIANTS: dict[str, dict[str, Any]] = {
    "untied": {},
    "tied": {"tie_word_embeddings": True},
    "biased": {"attention_bias": True, "mlp_bias": True},
    "wide_heads": {"head_dim": 32},
    "sharded": {"shards": 3},
    "tied_sharded": {"tie_word_embeddings": True, "shards": 3},
    "bf16": {"dtype": torch.bfloat16},
    "fp16": {"dtype": torch.float16},
    "llama3": {"rope_parameters": LLAMA3, "max_position_embeddings": 512},
    "llama3_old": {"rope_parameters": LLAMA3, "max_position_embeddings": 512, "old_rope_spelling": True},
}
WORDS = [chr(code) for code in range(33, 127)] + ["Ġ", "Ċ"]


class Llamas:
    """Builds model folders, one per set of options, and opens what is in them."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._made: dict[str, Path] = {}
        self._opened: list[LemaModel] = []

    # -- folders

    def folder(self, variant: str = "untied", **changes: Any) -> Path:
        """A folder that tests only read: hidden 64, 4 layers, 4 heads, 2 key/value heads, 128 ids, unless changed."""
        options = {**VARIANTS[variant], **changes}
        key = repr(sorted(options.items()))
        if key not in self._made:
            path = self._root / f"llama{len(self._made)}-{variant}"
            write_llama(path, **options)
            self._made[key] = path
        return self._made[key]

    def copy(self, path: Path, variant: str = "untied", **changes: Any) -> Path:
        """A folder of the test's own, to be spoilt."""
        write_llama(path, **VARIANTS[variant], **changes)
        return path

    # -- lema

    def open(self, folder: Path, device: Device | None = None, **options: Any) -> LemaModel:
        """Closed when the test is over. LoRA rank 4 on all linear layers unless ``options`` say otherwise."""
        model = LemaModel(
            LemaConfig(model_name_or_path=str(folder), device="cpu", **{"lora_rank": 4, **options}), device
        )
        self._opened.append(model)
        return model

    def with_lora(self, folder: Path, device: Device | None = None, seed: int = 0, **options: Any) -> LemaModel:
        """As :meth:`open`, with LoRA weights that are all random, B too."""
        model = self.open(folder, device, **options)
        model.initialize_lora()
        randomize(model, seed)
        return model

    def cut(self, model: LemaModel, max_granule_bytes: int | None = None) -> StreamedModel:
        """The granules of ``model``'s weights, for budgets that count them."""
        bound = bind_tensors(read_manifest(model.folder), model.adapter)
        return cut_model(model.adapter, bound, *([max_granule_bytes] if max_granule_bytes else []))

    def close(self) -> None:
        while self._opened:
            self._opened.pop().close()

    # -- the oracles

    def hf(self, folder: Path, attention: str = "eager", dtype: torch.dtype = torch.float32) -> Any:
        """transformers' model in eval mode."""
        from transformers import AutoModelForCausalLM

        return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation=attention).eval()

    def peft(self, folder: Path, lora_folder: Path, attention: str = "eager", trainable: bool = True) -> Any:
        """transformers' model with the LoRA weights of ``lora_folder``, in eval mode: no dropout."""
        from peft import PeftModel

        return PeftModel.from_pretrained(self.hf(folder, attention), lora_folder, is_trainable=trainable).eval()


class GradientRecorder(torch.optim.SGD):
    """An optimizer of the caller's that changes nothing and keeps the gradients of every step."""

    def __init__(self, parameters: list[torch.nn.Parameter]) -> None:
        super().__init__(parameters, lr=0.0)
        self.steps: list[list[Tensor]] = []

    def step(self, closure: object = None) -> None:
        self.steps.append([p.grad.clone() for p in self.param_groups[0]["params"]])


class Oracle:
    """The same quantities from lema and from PEFT, under lema's names (``model.layers.0.mlp.up_proj.lora_A``)."""

    @staticmethod
    def step(
        model: LemaModel, ids: Tensor, labels: Tensor | None = None, mask: Tensor | None = None, logits: bool = False
    ) -> tuple[float, dict[str, Tensor], Tensor | None]:
        """Loss, unclipped gradients, and logits if asked for, of one step of ``model``; set max_grad_norm=None."""
        assert model.config.max_grad_norm is None
        recorder = GradientRecorder(model.get_trainable_parameters())
        out, loss = model.get_trainer(recorder).train_step(ids, labels, mask, return_logits=logits)
        gradients = recorder.steps[0] if recorder.steps else []
        return loss, dict(zip(model.lora.parameters(), gradients, strict=False)), out

    @staticmethod
    def peft_step(
        peft_model: Any, ids: Tensor, labels: Tensor | None = None, mask: Tensor | None = None, exact_loss: bool = False
    ) -> tuple[float, dict[str, Tensor], Tensor]:
        """Loss (mean over supervised tokens of all rows), gradients and logits of transformers + PEFT.

        ``exact_loss`` computes cross-entropy in fp64 on the model's logits.
        """
        peft_model.zero_grad()
        logits = peft_model(input_ids=ids, attention_mask=mask).logits
        loss = token_mean_loss(logits.double() if exact_loss else logits, ids if labels is None else labels)
        loss.backward()
        gradients = {lema_name(n): p.grad.clone() for n, p in peft_model.named_parameters() if p.requires_grad}
        return loss.item(), gradients, logits.detach()

    @staticmethod
    def in_fp64(peft_model: Any) -> Any:
        """The judge: everything in fp64, RMSNorm too, which transformers computes in fp32; use SDPA, as transformers'
        eager softmax is fp32."""
        peft_model = peft_model.double()
        for module in peft_model.modules():
            if type(module).__name__ == "LlamaRMSNorm":
                module.forward = types.MethodType(_rms_norm, module)
        return peft_model

    @staticmethod
    def errors(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> dict[str, float]:
        """Per tensor, norm of the difference over norm of ``expected``; the names must be the same."""
        assert set(found) == set(expected)
        return {name: relative(found[name], expected[name]) for name in expected}

    @staticmethod
    def relative(found: Tensor, expected: Tensor) -> float:
        return relative(found, expected)

    @staticmethod
    def token_mean_loss(logits: Tensor, labels: Tensor) -> Tensor:
        return token_mean_loss(logits, labels)

    @staticmethod
    def lema_name(peft_name: str) -> str:
        return lema_name(peft_name)

    @staticmethod
    def randomize(model: LemaModel, seed: int = 0) -> None:
        randomize(model, seed)


def relative(found: Tensor, expected: Tensor) -> float:
    found, expected = found.double(), expected.double()
    return ((found - expected).norm() / expected.norm()).item()


def token_mean_loss(logits_BTV: Tensor, labels_BT: Tensor) -> Tensor:
    return torch.nn.functional.cross_entropy(logits_BTV[:, :-1].flatten(0, 1), labels_BT[:, 1:].flatten())


def lema_name(peft_name: str) -> str:
    return re.sub(r"^base_model\.model\.|(\.default)?\.weight$", "", peft_name)


def _rms_norm(self: Any, x: Tensor) -> Tensor:
    return self.weight * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.variance_epsilon)


@pytest.fixture
def oracle() -> type[Oracle]:
    return Oracle


@pytest.fixture(scope="session")
def _llamas_of_session(tmp_path_factory: pytest.TempPathFactory) -> Llamas:
    return Llamas(tmp_path_factory.mktemp("llamas"))


@pytest.fixture
def llamas(_llamas_of_session: Llamas) -> Iterator[Llamas]:
    yield _llamas_of_session
    _llamas_of_session.close()


@pytest.fixture(autouse=True, scope="module")
def hardly_any_measuring() -> Iterator[None]:
    with quick_figures():
        yield


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Tiny products gain nothing from threads, and lose a lot where other work runs."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def small_granules(monkeypatch: pytest.MonkeyPatch) -> int:
    """LemaModel cuts tiny models into dozens of granules, so that matrices are computed in several row blocks."""
    most_bytes = 12_000
    monkeypatch.setattr(lema.model, "cut_model", functools.partial(cut_model, max_granule_bytes=most_bytes))
    return most_bytes


@pytest.fixture
def byte_tokenizer() -> Callable[..., None]:
    """``byte_tokenizer(folder, size=128)`` writes a byte-level tokenizer of so many ids beside a model; </s> is 1."""

    def write(folder: Path, size: int = 128) -> None:
        special = ["<s>", "</s>"]
        pieces = special + WORDS
        pieces += [f"{a}{b}" for a in "abcdefgh" for b in "abcdefgh"][: size - len(pieces)]
        merges = [(piece[0], piece[1]) for piece in pieces[len(special) + len(WORDS) :]]
        backend = tokenizers.Tokenizer(models.BPE({piece: i for i, piece in enumerate(pieces)}, merges))
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        backend.decoder = decoders.ByteLevel()
        backend.add_special_tokens(special)
        assert backend.get_vocab_size() == size
        backend.save(str(folder / "tokenizer.json"))
        settings = {"bos_token": "<s>", "eos_token": "</s>", "tokenizer_class": "PreTrainedTokenizerFast"}
        (folder / "tokenizer_config.json").write_text(json.dumps(settings))

    return write


def write_llama(
    path: Path,
    *,
    seed: int = 0,
    shards: int = 1,
    dtype: torch.dtype = torch.float32,
    old_rope_spelling: bool = False,
    **config: Any,
) -> None:
    """A Llama whose every tensor is random and matters: norms away from 1, biases away from 0."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {
        "vocab_size": 128,
        "hidden_size": 64,
        "intermediate_size": 112,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "bos_token_id": 0,
        "eos_token_id": None,
        "pad_token_id": None,
    }
    model = LlamaForCausalLM(LlamaConfig(**{**sizes, **config}))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            spread = 0.1 if parameter.ndim == 1 else 0.8 / parameter.shape[1] ** 0.5
            noise = torch.randn(parameter.shape, generator=generator) * spread
            parameter.copy_(1 + noise if name.endswith("norm.weight") else noise)
    model.to(dtype).save_pretrained(path, max_shard_size="75KB" if shards > 1 else "1GB")
    if shards > 1:
        merge_shards(path, shards)
    if old_rope_spelling:
        edit_config(path, lambda c: c | {"rope_scaling": c.pop("rope_parameters")})
        edit_config(path, lambda c: c | {"rope_theta": c["rope_scaling"].pop("rope_theta")})


def merge_shards(folder: Path, shards: int) -> None:
    """Deal all tensors out over ``shards`` files with an index, unevenly and out of order."""
    tensors: dict[str, Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        tensors |= load_file(file)
        file.unlink()
    names = sorted(tensors)
    weight_map = {
        name: f"model-{i * shards // len(names) + 1:05}-of-{shards:05}.safetensors" for i, name in enumerate(names)
    }
    for file in sorted(set(weight_map.values())):
        save_file({n: tensors[n] for n in names if weight_map[n] == file}, folder / file, metadata={"format": "pt"})
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def edit_config(folder: Path, change: Callable[[dict[str, Any]], Mapping[str, Any]]) -> None:
    """Replace ``config.json`` by ``change`` of it."""
    path = folder / "config.json"
    path.write_text(json.dumps(change(json.loads(path.read_text()))))


def randomize(model: LemaModel, seed: int = 0, scale: float = 0.04) -> None:
    """All LoRA weights from a generator, so that the low-rank update and every gradient of it matter."""
    generator = torch.Generator().manual_seed(1000 + seed)
    values = {n: torch.randn(p.shape, generator=generator) * scale for n, p in model.lora.parameters().items()}
    model.lora.copy_(values)


@pytest.fixture(params=levels())
def native_instructions(request: pytest.FixtureRequest) -> Iterator[str]:
    """Instructions that native kernels are held to for a test."""
    if reasons := refusals():
        pytest.skip("; ".join(reasons))
    with held_to(request.param):
        yield request.param
