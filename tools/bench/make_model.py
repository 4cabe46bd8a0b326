"""Write a Llama of any shape with random weights, a tensor at a time and a shard per layer.

    python tools/bench/make_model.py OUT [--shape 1b|7b|tiny] [--layers 22 --hidden 2048 ...] [--dtype bfloat16]

The default is the 1.1 B shape (22 layers, hidden 2048, ffn 5632, 32/4 heads, vocabulary 32000) in bf16, 2.2 GB on disk.
Because every layer has a shard of its own, the same shape with fewer layers is a folder of links
(``--first-layers 8 --of FOLDER``): 8, 16 and 32 layers take the disk of 32.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path

from shapes import SHAPES, Shape

INDEX = "model.safetensors.index.json"


def llama_config(hidden: int, ffn: int, layers: int, heads: int, kv_heads: int, vocab: int, dtype: str) -> dict:
    """The config.json of a Llama."""
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


def make_model(out: Path, hf_config: dict, dtype_name: str, seed: int = 0) -> Path:
    """Weights ~ N(0, 1 / sqrt(inputs)), norms 1; the memory of one tensor. ``config.json`` is written last: a folder
    that has one is complete."""
    import torch

    from lema_core.checkpoint import write_safetensors
    from lema_models.llama import LlamaAdapter

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
    layers: list[int | None] = [None, *range(adapter.n_layers)]
    weight_map: dict[str, str] = {}
    for number, layer in enumerate(layers, start=1):
        shard = f"model-{number:05}-of-{len(layers):05}.safetensors"
        of_layer = [spec for spec in specs if spec.layer == layer]
        write_safetensors(out / shard, ((s.name, dtype, s.shape, make(s.shape, s.role)) for s in of_layer))
        weight_map |= {spec.name: shard for spec in of_layer}
    _finish(out, weight_map, hf_config)
    return out


def first_layers(model: Path, layers: int, out: Path) -> Path:
    """A folder with links to the shards of the first ``layers`` layers of a model that :func:`make_model` wrote."""
    config = json.loads((model / "config.json").read_text())
    if layers > config["num_hidden_layers"]:
        raise SystemExit(f"{model} has {config['num_hidden_layers']} layers, {layers} were asked for")
    weight_map = json.loads((model / INDEX).read_text())["weight_map"]
    kept = {
        name: shard
        for name, shard in weight_map.items()
        if not name.startswith("model.layers.") or int(name.split(".")[2]) < layers
    }
    out.mkdir(parents=True, exist_ok=True)
    for shard in sorted(set(kept.values())):
        (out / shard).unlink(missing_ok=True)
        (out / shard).symlink_to((model / shard).resolve())
    _finish(out, kept, config | {"num_hidden_layers": layers})
    return out


def _finish(out: Path, weight_map: dict[str, str], hf_config: dict) -> None:
    total = sum(os.path.getsize(out / shard) for shard in set(weight_map.values()))
    (out / INDEX).write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}))
    (out / "config.json").write_text(json.dumps(hf_config, indent=2))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="1b", help="what the options below start from")
    for name in ("hidden", "ffn", "layers", "heads", "kv-heads", "vocab"):
        parser.add_argument(f"--{name}", type=int)
    parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first-layers", type=int, help="link to so many layers of the model --of instead")
    parser.add_argument("--of", type=Path)
    a = parser.parse_args()
    if (a.first_layers is None) != (a.of is None):
        parser.error("--first-layers and --of go together")
    if a.of is not None:
        print(first_layers(a.of, a.first_layers, a.out))
        return
    given = {name: getattr(a, name) for name in Shape._fields if getattr(a, name) is not None}
    shape = SHAPES[a.shape]._replace(**given)
    print(make_model(a.out, llama_config(**shape._asdict(), dtype=a.dtype), a.dtype, a.seed))


if __name__ == "__main__":
    main()
