"""Quantizes checkpoints: a folder in, a folder of the same layout with weights in fewer bits out."""

from __future__ import annotations

from lema_quant.checkpoint.plan import QuantizationPlan, Recipe, plan_quantization
from lema_quant.checkpoint.report import REPORT_FILE, QuantizationReport, TensorReport
from lema_quant.checkpoint.write import finished, quantize_checkpoint, write_quantized

__all__ = [
    "REPORT_FILE",
    "QuantizationPlan",
    "QuantizationReport",
    "Recipe",
    "TensorReport",
    "finished",
    "plan_quantization",
    "quantize_checkpoint",
    "write_quantized",
]
