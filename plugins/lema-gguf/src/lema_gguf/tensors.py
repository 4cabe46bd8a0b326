"""GGUF tensors as Hugging Face tensors: names, row order of q and k, and exact values.

llama.cpp turns rotary pairs that lie half a head apart (Hugging Face) into neighbours, by permuting the rows of q and
k; this undoes it. Quantized tensors become float32, in which ``gguf`` computes their values: nothing is rounded.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from gguf import GGMLQuantizationType, dequantize
from torch import Tensor

from lema_core.errors import CheckpointError
from lema_gguf.metadata import GGUFMetadata

_OUTSIDE = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_IN_BLOCK = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_BLOCK_NAME = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")

#: not a weight: the factors of a scaled rotary embedding, which go into config.json
ROPE_FREQS = "rope_freqs.weight"

_PIECE_ELEMENTS = 1 << 22

_KEPT = {
    GGMLQuantizationType.F32: torch.float32,
    GGMLQuantizationType.F16: torch.float16,
    GGMLQuantizationType.BF16: torch.bfloat16,
}


@dataclass(frozen=True)
class ConvertedTensor:
    """One tensor of the converted model; ``read`` computes it from the file, each time anew."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    read: Callable[[], Tensor]


def converted_tensors(metadata: GGUFMetadata, n_heads: int, n_kv_heads: int) -> list[ConvertedTensor]:
    """All weights in file order. Raises CheckpointError naming a tensor that a Llama model does not have."""
    return [
        _convert(metadata, tensor, n_heads, n_kv_heads)
        for tensor in metadata.reader.tensors
        if tensor.name != ROPE_FREQS
    ]


def hf_name(gguf_name: str) -> str | None:
    """``blk.3.attn_q.weight`` -> ``model.layers.3.self_attn.q_proj.weight``; None for what no Llama model has."""
    match = _BLOCK_NAME.fullmatch(gguf_name)
    if match is None:
        return _OUTSIDE.get(gguf_name)
    layer, module, suffix = match.groups()
    return f"model.layers.{layer}.{_IN_BLOCK[module]}.{suffix}" if module in _IN_BLOCK else None


def unpermute(rows: Tensor, n_heads: int) -> Tensor:
    """Undo llama.cpp's order of a head's rows, (0, h, 1, h+1, ...) for a half head of h rows."""
    return rows.reshape(n_heads, -1, 2, *rows.shape[1:]).transpose(1, 2).reshape(rows.shape)


def _convert(metadata: GGUFMetadata, tensor: object, n_heads: int, n_kv_heads: int) -> ConvertedTensor:
    name = hf_name(tensor.name)
    if name is None:
        raise CheckpointError(f"{metadata.path}: tensor {tensor.name!r} is not part of a Llama model")
    shape = tuple(int(size) for size in reversed(tensor.shape))  # GGUF lists the fastest dimension first
    heads = {"attn_q": n_heads, "attn_k": n_kv_heads}.get(tensor.name.split(".")[-2])
    if heads is not None and shape[0] % (2 * heads):
        raise CheckpointError(
            f"{metadata.path}: tensor {tensor.name!r} has {shape[0]} rows, not whole pairs for {heads} heads"
        )

    def read() -> Tensor:
        values = _values(metadata, tensor).reshape(shape)
        return values if heads is None else unpermute(values, heads)

    return ConvertedTensor(name, _KEPT.get(tensor.tensor_type, torch.float32), shape, read)


def _values(metadata: GGUFMetadata, tensor: object) -> Tensor:
    kind = tensor.tensor_type
    if kind is GGMLQuantizationType.BF16:
        return torch.from_numpy(tensor.data.view(np.int16).copy()).view(torch.bfloat16)
    if kind in _KEPT:
        return torch.from_numpy(np.array(tensor.data))
    try:
        values = torch.empty(int(tensor.n_elements))
        piece = max(
            1, _PIECE_ELEMENTS // int(tensor.shape[0])
        )  # rows; gguf holds several copies of what it dequantizes
        rows = tensor.data.reshape(-1, tensor.data.shape[-1])
        for start, out in zip(range(0, len(rows), piece), values.split(piece * int(tensor.shape[0])), strict=True):
            out.copy_(torch.from_numpy(dequantize(rows[start : start + piece], kind)).flatten())
        return values
    except NotImplementedError as error:
        raise CheckpointError(
            f"{metadata.path}: tensor {tensor.name!r}: the installed gguf cannot dequantize {kind.name}; "
            "use a file of another quantization"
        ) from error
