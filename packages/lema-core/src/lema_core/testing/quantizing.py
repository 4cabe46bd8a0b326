"""Quantized model folders for tests, encoded in a few lines of torch: the plainest codec of each format."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from lema_core.checkpoint import quantization_metadata, read_manifest, read_tensor
from lema_core.checkpoint.quantized import QUANT_METHOD, QUANT_VERSION
from lema_core.quantization.formats import NF4_BLOCK, NF4_VALUES, Int4Groups, WireFormat, wire_formats


def encoded(weight_RK: Tensor, form: str) -> tuple[Tensor, ...]:
    """The parts of a weight in one of the formats that kernels know, each number the nearest that its scale allows."""
    weight_RK = weight_RK.float()
    if form == "int8":
        scale_R = weight_RK.abs().amax(1) / 127
        return (weight_RK / scale_R.clamp(min=1e-30)[:, None]).round().to(torch.int8), scale_R
    if form == "nf4":
        groups = weight_RK.unflatten(1, (-1, NF4_BLOCK))
        absmax_RG = groups.abs().amax(2)
        relative = groups / absmax_RG.clamp(min=1e-30)[:, :, None]
        codes = (relative[..., None] - torch.tensor(NF4_VALUES)).abs().argmin(-1).flatten(1).to(torch.uint8)
        return codes[:, ::2] << 4 | codes[:, 1::2], absmax_RG
    wire = wire_formats()[form]
    assert isinstance(wire, Int4Groups)
    rows, columns = weight_RK.shape
    scales = [group.abs().amax(1) / 7 for group in weight_RK.split(wire.group, dim=1)]
    scale_RG = torch.stack(scales, dim=1).bfloat16()
    spread = scale_RG.float().repeat_interleave(wire.group, dim=1)[:, :columns]
    codes = ((weight_RK / spread.clamp(min=1e-30)).round().clamp(-8, 7) + 8).to(torch.uint8)
    codes = torch.cat((codes, codes.new_zeros(rows, columns % 2)), dim=1)
    return codes[:, ::2] | codes[:, 1::2] << 4, scale_RG


def decoded(parts: tuple[Tensor, ...], wire: WireFormat, shape: tuple[int, int]) -> Tensor:
    """fp32 [R, K]."""
    out = torch.empty(shape)
    wire.decode(parts, out)
    return out


def quantize_folder(
    source: Path, target: Path, form: str, takes: Callable[[str], bool] = lambda name: True, plain: bool = False
) -> Path:
    """``source`` with every matrix that ``takes`` and the format want in ``form``, in one file; by int8 where the
    format cannot. ``plain``: the same numbers, decoded, in fp32 instead."""
    target.mkdir()
    for path in source.iterdir():
        if path.suffix == ".json" and not path.name.endswith(".index.json"):
            shutil.copy(path, target)
    tensors: dict[str, Tensor] = {}
    entries: dict[str, tuple[WireFormat, tuple[int, int]]] = {}
    for name, info in read_manifest(source).tensors.items():
        value, wire = read_tensor(info), wire_formats()[form]
        if wire.refuses(info.shape) is not None:
            wire = wire_formats()["int8"]
        if wire.refuses(info.shape) is not None or not takes(name):
            tensors[name] = value
            continue
        parts = encoded(value, wire.name)
        if plain:
            tensors[name] = decoded(parts, wire, info.shape)
            continue
        entries[name] = wire, info.shape
        for part, expected in zip(parts, wire.parts(info.shape), strict=True):
            tensors[name + expected.suffix] = part.contiguous()
    save_file(tensors, target / "model.safetensors", {"format": "pt", **quantization_metadata(entries)})
    config = target / "config.json"
    if config.exists() and entries:
        said = {"quant_method": QUANT_METHOD, "version": QUANT_VERSION, "format": form}
        config.write_text(json.dumps({**json.loads(config.read_text()), "quantization_config": said}))
    return target
