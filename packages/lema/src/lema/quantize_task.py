"""``task=quantize``: a model's folder with its weights in fewer bits."""

from __future__ import annotations

import sys
import time
import warnings
from pathlib import Path
from typing import Any, TextIO

from lema.config import LemaConfig
from lema.interrupts import StopRequest
from lema.quantized import recipe_of, say_to, write_with_progress
from lema.random_model import random_model
from lema.report import Row, print_sections
from lema_core.memory import format_bytes, peak_rss_bytes
from lema_core.plugins import get_plugin_manager
from lema_core.quantization.report import TensorReport
from lema_quant.checkpoint import REPORT_FILE, plan_quantization


def quantize(config: LemaConfig, out: TextIO | None = None) -> dict[str, Any]:
    """Write the model quantized to ``output_dir``, and what that made of every tensor to ``out`` (stdout) and to
    quantization_report.json there.

    Raises CheckpointError for a model that is quantized already or broken, an ``output_dir`` that may not be replaced,
    or too little room on its disk.
    """
    out = out or sys.stdout
    started = time.perf_counter()
    if config.init == "random":
        folder = random_model(config)
    else:
        folder = get_plugin_manager().locate_checkpoint(config.model_name_or_path)
    plan = plan_quantization(folder, recipe_of(config), say_to(sys.stderr))
    with StopRequest("finished files are kept, and the same command goes on after them"):
        made = write_with_progress(plan, Path(config.output_dir).absolute(), out)
    report = made.report
    print_sections({"Tensors": [Row(each.name, _outcome(each)) for each in report.tensors]}, out)
    for line in report.warnings:
        warnings.warn(f"{line}; or keep it as it is with quant_exclude", stacklevel=2)
    return {
        "task": "quantize",
        "model": str(folder),
        "quantized": str(made.path),
        "made": "now" if made.made else "there already, of the same model in the same way",
        "format": made.format,
        "backend": made.backend,
        "tensors": len(report.tensors),
        "tensors_quantized": sum(each.format is not None for each in report.tensors),
        "source_bytes": report.bytes_before,
        "written_bytes": report.bytes_after,
        "report": str(made.path / REPORT_FILE),
        "seconds_s": time.perf_counter() - started,
        "rss_peak_bytes": peak_rss_bytes(),
    }


def _outcome(tensor: TensorReport) -> str:
    size = f"{tensor.bits:>5.2f} bits {format_bytes(tensor.bytes_after):>9}"
    if tensor.format is None:
        return f"{size}  as it is: {tensor.reason}"
    worst = f"{tensor.worst_column_error:.1%} in column {tensor.worst_column}"
    return f"{size}  {tensor.format} by {tensor.backend}, error {tensor.error:.2%}, at most {worst}"
