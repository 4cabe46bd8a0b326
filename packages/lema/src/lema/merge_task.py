"""``task=merge``: a folder that transformers serves, from a base model and LoRA weights."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import torch

from lema.config import LemaConfig
from lema.display import byte_progress
from lema.interrupts import StopRequest
from lema.random_model import random_model
from lema_core.checkpoint import read_hf_config, read_manifest
from lema_core.errors import ConfigError
from lema_core.memory import peak_rss_bytes
from lema_core.plugins import get_plugin_manager
from lema_core.records import load_object
from lema_train.merge_lora import lora_changes
from lema_train.merge_plan import plan_merge
from lema_train.merge_write import MergeReport, write_merged
from lema_train.peft_format import base_model, read_peft_config


def merge(config: LemaConfig) -> dict[str, Any]:
    """Write the base with ``lora_path`` in its weights to ``output_dir``.

    The base is ``model_name_or_path``, or what adapter_config.json names. Raises CheckpointError for a base that the
    LoRA weights were not made for, an ``output_dir`` that may not be replaced, or too little room on its disk.
    """
    started = time.perf_counter()
    lora = Path(config.lora_path).expanduser()
    base = base_folder(config, lora)
    hf_config = read_hf_config(base)
    plugins = get_plugin_manager()
    adapter = load_object(plugins.match_architecture(hf_config).adapter).from_hf_config(hf_config)
    manifest = read_manifest(base)
    dtype = None if config.merge_dtype == "keep" else getattr(torch, config.merge_dtype)
    plan = plan_merge(manifest, lora_changes(lora, adapter, manifest), dtype, config.max_shard_size)
    output_dir = Path(config.output_dir).absolute()
    with (
        StopRequest("nothing is left of the merge"),
        byte_progress(f"merging {base} and {lora} into {output_dir}", plan.nbytes, sys.stdout) as advance,
    ):
        done_bytes = 0

        def written(now_bytes: int, total_bytes: int) -> None:
            nonlocal done_bytes
            advance(now_bytes - done_bytes)
            done_bytes = now_bytes

        report = write_merged(plan, output_dir, [lora], written)
    if report.lost:
        print(_lost(report))
    return {
        "task": "merge",
        "model": str(base),
        "lora": str(lora),
        "merged": str(report.folder),
        "tensors": report.tensors,
        "tensors_changed": report.changed,
        "numbers_updated": report.updated or None,
        "numbers_lost": report.lost if report.updated else None,
        "written_bytes": report.written_bytes,
        "seconds_s": time.perf_counter() - started,
        "rss_peak_bytes": peak_rss_bytes(),
    }


def base_folder(config: LemaConfig, lora: Path) -> Path:
    """The folder of the base model. Raises ConfigError when neither the config nor the adapter names one."""
    if config.init == "random":
        return random_model(config)
    named = config.model_name_or_path or base_model(read_peft_config(lora))
    if not named:
        raise ConfigError(f"{lora}/adapter_config.json names no base model; give model_name_or_path")
    return get_plugin_manager().locate_checkpoint(named)


def _lost(report: MergeReport) -> str:
    share = 100 * report.lost / report.updated
    return (
        f"{report.lost:,} of {report.updated:,} numbers ({share:.3g} %) changed by less than their type can tell apart "
        "and are the base's again; merge_dtype=float32 keeps such changes"
    )
