"""Quantizes checkpoints: a folder in, a folder of the same layout with weights in fewer bits out."""

from __future__ import annotations

from lema_quant.checkpoint.plan import QuantizationPlan, Recipe, base_files, plan_quantization
from lema_quant.checkpoint.result import REPORT_FILE, QuantizedCheckpoint, read_quantized
from lema_quant.checkpoint.write import finished, quantize_checkpoint, write_quantized

__all__ = [
    "REPORT_FILE",
    "QuantizationPlan",
    "QuantizedCheckpoint",
    "Recipe",
    "base_files",
    "finished",
    "plan_quantization",
    "quantize_checkpoint",
    "read_quantized",
    "write_quantized",
]
