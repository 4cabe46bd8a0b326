"""``config.json`` and ``generation_config.json`` from a GGUF file's metadata, in the words of LlamaConfig."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from lema_core.errors import CheckpointError
from lema_gguf.metadata import GGUFMetadata
from lema_gguf.tensors import ROPE_FREQS

# Llama 3.1 and later: https://github.com/meta-llama/llama-models (apply_scaling); GGUF keeps only the resulting factors
_LLAMA3_LOW, _LLAMA3_HIGH, _LLAMA3_ORIGINAL = 1.0, 4.0, 8192


def llama_config(metadata: GGUFMetadata) -> dict[str, Any]:
    """The model's ``config.json``. Raises CheckpointError naming a key that is missing or cannot be said."""
    if metadata.get("llama.expert_count", int, 0):
        raise CheckpointError(
            f"{metadata.path}: a mixture of experts (llama.expert_count), expected a plain Llama model"
        )
    tensors = {tensor.name: tensor for tensor in metadata.reader.tensors}
    if "token_embd.weight" not in tensors:
        raise CheckpointError(f"{metadata.path}: no tensor 'token_embd.weight'; the file holds no complete model")
    hidden_size = metadata.need("llama.embedding_length", int)
    n_heads = metadata.need("llama.attention.head_count", int)
    rotary = metadata.get("llama.rope.dimension_count", int, hidden_size // n_heads)
    head_dim = metadata.get("llama.attention.key_length", int, rotary)
    if rotary != head_dim:
        raise CheckpointError(
            f"{metadata.path}: llama.rope.dimension_count {rotary}, the head size {head_dim} expected"
        )
    theta = _float(metadata, "llama.rope.freq_base", 10000.0)
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": int(tensors["token_embd.weight"].shape[1]),
        "hidden_size": hidden_size,
        "intermediate_size": metadata.need("llama.feed_forward_length", int),
        "num_hidden_layers": metadata.need("llama.block_count", int),
        "num_attention_heads": n_heads,
        "num_key_value_heads": metadata.get("llama.attention.head_count_kv", int, n_heads),
        "head_dim": head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": metadata.need("llama.context_length", int),
        "rms_norm_eps": _float(metadata, "llama.attention.layer_norm_rms_epsilon", None),
        "rope_theta": theta,
        "rope_scaling": _rope_scaling(metadata, tensors, theta, head_dim),
        "attention_bias": _has_bias(metadata, tensors, "attn_q", "attn_k", "attn_v", "attn_output"),
        "mlp_bias": _has_bias(metadata, tensors, "ffn_gate", "ffn_up", "ffn_down"),
        "tie_word_embeddings": "output.weight" not in tensors,
        **_special_ids(metadata),
    }


def generation_config(metadata: GGUFMetadata) -> dict[str, Any]:
    """The model's ``generation_config.json``: every id that ends a text, the end of a turn included."""
    ids = _special_ids(metadata)
    ends = [ids.get("eos_token_id"), metadata.get("tokenizer.ggml.eot_token_id", int)]
    unique = list(dict.fromkeys(end for end in ends if end is not None))
    if unique:
        ids["eos_token_id"] = unique[0] if len(unique) == 1 else unique
    return ids


def _special_ids(metadata: GGUFMetadata) -> dict[str, Any]:
    keys = {"bos_token_id": "bos_token_id", "eos_token_id": "eos_token_id", "pad_token_id": "padding_token_id"}
    found = {name: metadata.get(f"tokenizer.ggml.{key}", int) for name, key in keys.items()}
    return {name: value for name, value in found.items() if value is not None}


def _float(metadata: GGUFMetadata, key: str, default: float | None) -> float:
    """A float32 key as the shortest decimal that means it: 1e-05, not 9.999999747378752e-06."""
    value = metadata.need(key, float) if default is None else metadata.get(key, float, default)
    return float(str(np.float32(value)))


def _has_bias(metadata: GGUFMetadata, tensors: dict[str, Any], *modules: str) -> bool:
    """LlamaConfig's flags mean biases on all of ``modules``; a file with some has no counterpart."""
    names = [f"blk.0.{module}.bias" for module in modules]
    present = [name for name in names if name in tensors]
    if present and len(present) < len(names):
        missing = next(name for name in names if name not in tensors)
        raise CheckpointError(
            f"{metadata.path}: has {present[0]!r} but not {missing!r}; Llama models have all of them or none"
        )
    return bool(present)


def _rope_scaling(
    metadata: GGUFMetadata, tensors: dict[str, Any], theta: float, head_dim: int
) -> dict[str, Any] | None:
    if ROPE_FREQS in tensors:
        return _llama3_scaling(metadata, np.array(tensors[ROPE_FREQS].data, dtype=np.float32), theta, head_dim)
    kind = metadata.get("llama.rope.scaling.type", str, "none")
    if kind == "none":
        return None
    factor = _float(metadata, "llama.rope.scaling.factor", None)
    if kind == "linear":
        return {"rope_type": "linear", "factor": factor}
    if kind == "yarn":
        original = metadata.need("llama.rope.scaling.original_context_length", int)
        return {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original}
    raise CheckpointError(f"{metadata.path}: llama.rope.scaling.type {kind!r}, expected none, linear or yarn")


def _llama3_scaling(metadata: GGUFMetadata, factors: np.ndarray, theta: float, head_dim: int) -> dict[str, Any]:
    """The parameters behind the stored factors, one per rotary pair, checked by computing the factors again."""
    factor = float(factors.max())
    wavelengths = 2 * math.pi * theta ** (np.arange(0, head_dim, 2) / head_dim)
    smooth = np.clip((_LLAMA3_ORIGINAL / wavelengths - _LLAMA3_LOW) / (_LLAMA3_HIGH - _LLAMA3_LOW), 0, 1)
    expected = 1 / ((1 - smooth) / factor + smooth)
    if factors.shape != expected.shape or not np.allclose(factors, expected, rtol=1e-4):
        raise CheckpointError(
            f"{metadata.path}: tensor {ROPE_FREQS!r} is not Llama 3's scaling of the rotary embedding"
        )
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": _LLAMA3_LOW,
        "high_freq_factor": _LLAMA3_HIGH,
        "original_max_position_embeddings": _LLAMA3_ORIGINAL,
    }
