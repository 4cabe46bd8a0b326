"""Write a Llama of any shape with random weights, tensor by tensor: ``python tools/bench/make_model.py OUT --layers 22
...``.

The defaults are the 1.1 B shape (hidden 2048, ffn 5632, 32/4 heads, vocabulary 32000) in bf16, 2.2 GB on disk.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch

from lema_core.checkpoint import write_safetensors
from lema_models.llama import LlamaAdapter


def make_model(out: Path, hf_config: dict, dtype_name: str, seed: int = 0) -> Path:
    """Weights ~ N(0, 1 / sqrt(inputs)), norms 1; the memory of one tensor."""
    adapter = LlamaAdapter.from_hf_config(hf_config)
    dtype = getattr(torch, dtype_name)
    generator = torch.Generator().manual_seed(seed)

    def make(shape: tuple[int, ...], role: str):
        def draw() -> torch.Tensor:
            if role == "norm":
                return torch.ones(shape, dtype=dtype)
            scale = 0.02 if role == "embedding" else shape[-1] ** -0.5
            return torch.empty(shape).normal_(0, scale, generator=generator).to(dtype)

        return draw

    out.mkdir(parents=True, exist_ok=True)
    specs = [spec for spec in adapter.tensors() if spec.tied_to is None]
    write_safetensors(out / "model.safetensors", ((s.name, dtype, s.shape, make(s.shape, s.role)) for s in specs))
    (out / "config.json").write_text(json.dumps(hf_config, indent=2))
    return out


def llama_config(hidden: int, ffn: int, layers: int, heads: int, kv_heads: int, vocab: int, dtype: str) -> dict:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": ffn,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "hidden_act": "silu",
        "torch_dtype": dtype,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--ffn", type=int, default=5632)
    parser.add_argument("--layers", type=int, default=22)
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--kv-heads", type=int, default=4)
    parser.add_argument("--vocab", type=int, default=32000)
    parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16")
    a = parser.parse_args()
    config = llama_config(a.hidden, a.ffn, a.layers, a.heads, a.kv_heads, a.vocab, a.dtype)
    print(make_model(a.out, config, a.dtype))


if __name__ == "__main__":
    main()
