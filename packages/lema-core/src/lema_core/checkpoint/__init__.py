"""Reading and writing checkpoints: headers checked once, at the edge; data read by plain file reads, never mapped."""

from __future__ import annotations

from lema_core.checkpoint.bind import bind_tensors
from lema_core.checkpoint.header import SafetensorsHeader, read_header
from lema_core.checkpoint.manifest import (
    Manifest,
    read_file_manifest,
    read_generation_config,
    read_hf_config,
    read_manifest,
)
from lema_core.checkpoint.quantized import quantization_metadata
from lema_core.checkpoint.reading import read_elements, read_tensor
from lema_core.checkpoint.segments import Quantized, Segment, TensorInfo
from lema_core.checkpoint.writer import TensorToWrite, write_safetensors

__all__ = [
    "Manifest",
    "Quantized",
    "SafetensorsHeader",
    "Segment",
    "TensorInfo",
    "TensorToWrite",
    "bind_tensors",
    "quantization_metadata",
    "read_elements",
    "read_file_manifest",
    "read_generation_config",
    "read_header",
    "read_hf_config",
    "read_manifest",
    "read_tensor",
    "write_safetensors",
]
