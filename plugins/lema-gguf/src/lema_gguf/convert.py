"""Writes the folder of a GGUF file: safetensors, config and tokenizer, as Hugging Face lays them out."""

from __future__ import annotations

import json
import shutil
import sys
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lema_core.checkpoint import write_safetensors
from lema_core.errors import CheckpointError
from lema_gguf.config import generation_config, llama_config
from lema_gguf.metadata import GGUFMetadata
from lema_gguf.tensors import ConvertedTensor, converted_tensors
from lema_gguf.tokenizer import build_tokenizer, tokenizer_config

#: what the folder holds and how its values are computed; a change makes cached folders stale
CONVERTER_VERSION = 1


def convert(gguf_path: Path, folder: Path) -> None:
    """Write the model of ``gguf_path`` into the existing, empty ``folder``, holding one tensor at a time.

    Raises CheckpointError for a file that is damaged, of another architecture, or of a tokenizer that is not known, and
    when the disk has too little room; all before any tensor is written.
    """
    metadata = GGUFMetadata(gguf_path)
    config = llama_config(metadata)
    tensors = converted_tensors(metadata, config["num_attention_heads"], config["num_key_value_heads"])
    tokenizer = build_tokenizer(metadata)
    nbytes = sum(prod(tensor.shape) * tensor.dtype.itemsize for tensor in tensors)
    free_bytes = shutil.disk_usage(folder).free
    if free_bytes < nbytes:
        raise CheckpointError(
            f"{folder}: {nbytes / 1e6:.0f} MB needed to convert {gguf_path.name}, {free_bytes / 1e6:.0f} MB free; "
            "point LEMA_CACHE at a larger disk"
        )
    config["torch_dtype"] = str(_matrix_dtype(tensors)).removeprefix("torch.")
    _write_json(folder / "config.json", config)
    _write_json(folder / "generation_config.json", generation_config(metadata))
    _write_json(folder / "tokenizer_config.json", tokenizer_config(metadata, tokenizer))
    tokenizer.save(str(folder / "tokenizer.json"), pretty=False)
    progress = _Progress(f"converting {gguf_path} ({nbytes / 1e6:.0f} MB of safetensors)", len(tensors))
    write_safetensors(
        folder / "model.safetensors",
        [(tensor.name, tensor.dtype, tensor.shape, progress.counting(tensor)) for tensor in tensors],
    )
    progress.finish()


def _matrix_dtype(tensors: list[ConvertedTensor]) -> torch.dtype:
    """The widest type among the matrices; norms are often kept in float32 beside half-precision matrices."""
    dtypes = {tensor.dtype for tensor in tensors if len(tensor.shape) == 2}
    return dtypes.pop() if len(dtypes) == 1 else torch.float32


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


class _Progress:
    """One line on stderr; on a terminal it counts along."""

    def __init__(self, what: str, total: int) -> None:
        self._what, self._total, self._done = what, total, 0
        self._moving = sys.stderr.isatty()
        self._show("" if self._moving else "\n")

    def counting(self, tensor: ConvertedTensor) -> Any:
        def read() -> Tensor:
            self._done += 1
            if self._moving:
                self._show("")
            return tensor.read()

        return read

    def finish(self) -> None:
        if self._moving:
            sys.stderr.write("\n")

    def _show(self, end: str) -> None:
        count = f" {self._done}/{self._total}" if self._moving else ""
        sys.stderr.write(f"{chr(13) if self._moving else ''}lema-gguf: {self._what}{count}{end}")
        sys.stderr.flush()
