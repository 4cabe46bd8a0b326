"""What transformers and PEFT make of a model: the oracles of :class:`lema_core.testing.adapter_suite.AdapterSuite`.

Both are imported by name inside the functions that need them, so that neither is needed to run or train anything.
Shapes: B rows, T tokens, V vocabulary, r rank.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor

from lema_core.runtime.batch import IGNORE_INDEX, TokenBatch

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"


def oracle(name: str) -> Any:
    """The package ``name``. Raises ImportError saying what is missing for what."""
    try:
        return import_module(name)
    except ImportError as error:
        raise ImportError(
            f"AdapterSuite compares with {name}, which cannot be imported here ({error}); "
            "add transformers and peft to what your tests need"
        ) from error


def write_model(folder: Path, hf_config: Mapping[str, Any], seed: int = 0) -> None:
    """Save transformers' model of ``hf_config`` (with ``model_type``), every tensor random so that it matters: norms
    away from 1, biases away from 0, attention neither flat nor sharp."""
    transformers = oracle("transformers")
    fields = dict(hf_config)
    config = transformers.AutoConfig.for_model(fields.pop("model_type"), **fields)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    generator = torch.Generator().manual_seed(seed)
    for name, tensor in model.state_dict().items():
        if tensor.is_floating_point():
            spread = 0.1 if tensor.ndim == 1 else 0.8 / tensor.shape[-1] ** 0.5
            noise = torch.randn(tensor.shape, generator=generator) * spread
            tensor.copy_(1 + noise if tensor.ndim == 1 and name.endswith("weight") else noise)
    model.save_pretrained(folder)


def load_config(folder: Path) -> Any:
    """transformers' config of ``folder``."""
    return oracle("transformers").AutoConfig.from_pretrained(folder)


def load_model(folder: Path) -> Any:
    """transformers' model of ``folder`` in fp32 and eval mode, attention written out."""
    auto = oracle("transformers").AutoModelForCausalLM
    return auto.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()


def write_lora(folder: Path, config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    """LoRA weights as PEFT has them."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / CONFIG_FILE).write_text(json.dumps(config))
    contiguous = {key: tensor.detach().contiguous() for key, tensor in tensors.items()}
    save_file(contiguous, folder / WEIGHTS_FILE, metadata={"format": "pt"})


def read_lora(folder: Path) -> dict[str, Tensor]:
    """The tensors that PEFT saved."""
    return load_file(folder / WEIGHTS_FILE)


def load_lora(model: Any, folder: Path) -> Any:
    """``model`` with the LoRA weights of ``folder``, trainable, in eval mode: no dropout."""
    return oracle("peft").PeftModel.from_pretrained(model, folder, is_trainable=True).eval()


def trained(model: Any) -> dict[str, Tensor]:
    """PEFT's trainable parameters by the keys that its files have."""
    return {n.replace(".default", ""): p for n, p in model.named_parameters() if p.requires_grad}


def gradients(model: Any) -> dict[str, Tensor]:
    """Of transformers' ``model``, by the names of its parameters; zeros where there is none."""
    return {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in model.named_parameters()}


def logits(model: Any, batch: TokenBatch) -> Tensor:
    """[B, T, V] of transformers' ``model``. Positions count real tokens, as ``generate`` does it."""
    mask = batch.attention_mask.long()
    positions = (mask.cumsum(dim=1) - 1).clamp(min=0)
    return model(input_ids=batch.input_ids, attention_mask=mask, position_ids=positions, use_cache=False).logits


def targets(batch: TokenBatch) -> Tensor:
    """[B, T - 1]: what each token but the last is to predict, -100 for nothing. Padding neither is predicted nor
    predicts."""
    real = batch.attention_mask
    return batch.labels[:, 1:].masked_fill(~(real[:, 1:] & real[:, :-1]), IGNORE_INDEX)


def mean_loss(logits_BTV: Sequence[Tensor], batches: Sequence[TokenBatch]) -> Tensor:
    """Cross-entropy over all targets of all ``batches``, each token of the same weight, in fp64: torch's own in fp32
    rounds once a row, which every gradient would inherit."""
    total = torch.zeros((), dtype=torch.float64)
    n_targets = 0
    for logits_of_one, batch in zip(logits_BTV, batches, strict=True):
        wanted = targets(batch).flatten()
        n_targets += int((wanted != IGNORE_INDEX).sum())
        scores = logits_of_one[:, :-1].flatten(0, 1).double()
        total = total + F.cross_entropy(scores, wanted, ignore_index=IGNORE_INDEX, reduction="sum")
    return total / n_targets


def generate(model: Any, prompts: Sequence[Sequence[int]], max_new_tokens: int) -> list[list[int]]:
    """New ids of each prompt by transformers' own greedy ``generate``, padded on the left, nothing stops it."""
    longest = max(map(len, prompts))
    ids = torch.tensor([[0] * (longest - len(prompt)) + list(prompt) for prompt in prompts])
    mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    model.generation_config.eos_token_id = None
    # transformers 5 fails in the auxiliary loss of cached tokens, which nobody asked for
    model.config.output_router_logits = False
    found = model.generate(
        ids, attention_mask=mask, do_sample=False, max_new_tokens=max_new_tokens, pad_token_id=0, use_cache=True
    )
    return found[:, longest:].tolist()
