"""Model folders to try an adapter on: as transformers writes them, spelled otherwise, in shards, spoilt, merged."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from lema_core.adapter import ModelAdapter
from lema_core.checkpoint import TensorInfo, read_manifest, read_tensor
from lema_core.checkpoint.manifest import INDEX_NAME
from lema_core.checkpoint.reading import tensor_bytes
from lema_core.ops.low_rank import LowRankUpdate


def read_tensors(folder: Path) -> dict[str, Tensor]:
    """Every tensor of the folder by the name its file gives it."""
    return {name: read_tensor(info) for name, info in read_manifest(folder).tensors.items()}


def write_tensors(source: Path, folder: Path, tensors: Mapping[str, Tensor], shards: int = 1) -> Path:
    """``tensors`` in ``folder``, dealt out over ``shards`` files out of order, beside the configs of ``source``."""
    folder.mkdir(parents=True)
    for path in source.glob("*.json"):
        if path.name != INDEX_NAME:
            shutil.copy(path, folder)
    names = sorted(tensors)
    if shards == 1:
        save_file({name: tensors[name].contiguous() for name in names}, folder / "model.safetensors")
        return folder
    weight_map = {name: f"model-{i % shards + 1:05}-of-{shards:05}.safetensors" for i, name in enumerate(names)}
    for file in sorted(set(weight_map.values())):
        held = {name: tensors[name].contiguous() for name in names if weight_map[name] == file}
        save_file(held, folder / file, metadata={"format": "pt"})
    (folder / INDEX_NAME).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder


def spelled(tensors: Mapping[str, Tensor], canonical: str, prefix: str) -> dict[str, Tensor]:
    """The same under another prefix; names that do not begin with the ``canonical`` one stay."""
    return {
        prefix + name[len(canonical) :] if name.startswith(canonical) else name: tensor
        for name, tensor in tensors.items()
    }


def merge(
    source: Path,
    folder: Path,
    adapter: ModelAdapter,
    bound: Mapping[str, TensorInfo],
    updates: Mapping[str, LowRankUpdate],
) -> Path:
    """A copy of ``source`` in which each ``W`` is ``W + scale B A``, written over its own bytes, whatever the file
    calls it and whatever it lies beside."""
    shutil.copytree(source, folder)
    for spec in adapter.linear_modules():
        update = updates.get(spec.module)
        if update is None:
            continue
        delta = update.scale * (update.lora_B.detach().double() @ update.lora_A.detach().double())
        if spec.expert is not None and spec.name.endswith("gate_up_proj.weight"):
            names = [spec.name.replace("gate_up_proj", part) for part in ("gate_proj", "up_proj")]
            targets = list(zip(names, delta.chunk(2), strict=True))
        else:
            targets = [(spec.name, delta.t() if spec.transposed else delta)]
        for name, added in targets:
            info = bound[name]
            merged = (read_tensor(info).double() + added).to(info.dtype).contiguous()
            with open(folder / info.segment.path.name, "r+b") as file:
                file.seek(info.segment.offset)
                file.write(tensor_bytes(merged))
    return folder


def one_row_less(tensor: Tensor) -> Tensor:
    return tensor[:-1].clone() if len(tensor) > 1 else torch.cat((tensor, tensor))
