"""``task=merge``: a folder that transformers serves, from a base model and what was trained on it."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import torch

from lema._utils._conversion import adapter_of, plan_delta
from lema.config import LemaConfig
from lema.display import byte_progress
from lema.interrupts import StopRequest
from lema.random_model import random_model
from lema_core.checkpoint import read_manifest
from lema_core.errors import ConfigError
from lema_core.memory import peak_rss_bytes
from lema_core.plugins import get_plugin_manager
from lema_train.delta import read_delta, refuse_delta
from lema_train.merge_lora import lora_changes
from lema_train.merge_plan import MergePlan, plan_merge
from lema_train.merge_write import write_merged
from lema_train.peft_format import CONFIG_FILE as LORA_FILE
from lema_train.peft_format import base_model, read_peft_config


def merge(config: LemaConfig) -> dict[str, Any]:
    """Write the base with ``lora_path`` or ``delta_path`` in its weights to ``output_dir``.

    The base is ``model_name_or_path``, or what the trained weights' files name. Raises CheckpointError for a base that
    they were not made for, an ``output_dir`` that may not be replaced, or too little room on its disk.
    """
    started = time.perf_counter()
    dtype = None if config.merge_dtype == "keep" else getattr(torch, config.merge_dtype)
    plan_from = _plan_lora if config.delta_path is None else _plan_delta
    plan, trained = plan_from(config, dtype)
    base, output_dir = plan.folder, Path(config.output_dir).absolute()
    with (
        StopRequest("nothing is left of the merge"),
        byte_progress(f"merging {base} and {trained} into {output_dir}", plan.nbytes, sys.stdout) as advance,
    ):
        folder = trained if trained.is_dir() else trained.parent
        report = write_merged(plan, output_dir, [folder], advance)
    lost = report.describe_lost("merge_dtype=float32")
    if lost is not None:
        print(lost)
    return {
        "task": "merge",
        "model": str(base),
        "lora" if config.delta_path is None else "delta": str(trained),
        "merged": str(report.path),
        "tensors": report.tensors,
        "tensors_changed": report.changed,
        "numbers_updated": report.updated or None,
        "numbers_lost": report.lost if report.updated else None,
        "written_bytes": report.written_bytes,
        "seconds_s": time.perf_counter() - started,
        "rss_peak_bytes": peak_rss_bytes(),
    }


def _plan_lora(config: LemaConfig, dtype: torch.dtype | None) -> tuple[MergePlan, Path]:
    """What will be written, and the folder of the LoRA weights."""
    lora = Path(config.lora_path).expanduser()
    refuse_delta(lora)
    named = config.model_name_or_path or base_model(read_peft_config(lora))
    base = read_manifest(base_folder(config, named, lora / LORA_FILE))
    changes = lora_changes(lora, adapter_of(base), base)
    return plan_merge(base, changes, dtype, config.max_shard_size), lora


def _plan_delta(config: LemaConfig, dtype: torch.dtype | None) -> tuple[MergePlan, Path]:
    """What will be written, and the delta's file."""
    delta = read_delta(Path(config.delta_path).expanduser())
    base = read_manifest(base_folder(config, config.model_name_or_path or delta.identity.name, delta.path))
    return plan_delta(delta, base, dtype, config.max_shard_size), delta.path


def base_folder(config: LemaConfig, named: str | None, source: Path) -> Path:
    """The folder of the base model. Raises ConfigError when neither the config nor the file ``source`` names one."""
    if config.init == "random":
        return random_model(config)
    if not named:
        raise ConfigError(f"{source} names no base model; give model_name_or_path")
    return get_plugin_manager().locate_checkpoint(named)
