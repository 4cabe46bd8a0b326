"""From a base model and what was trained on it to a model of its own."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from lema_core.adapter import ModelAdapter
from lema_core.checkpoint import Manifest, read_file_manifest, read_hf_config, read_manifest
from lema_core.checkpoint.manifest import INDEX_NAME
from lema_core.errors import ConfigError
from lema_core.plugins import get_plugin_manager
from lema_core.records import load_object
from lema_train.delta import Delta, read_delta
from lema_train.merge_delta import delta_changes
from lema_train.merge_plan import MergePlan, plan_merge
from lema_train.merge_write import MergeReport, write_merged, write_merged_file

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def merge_delta(
    base: str | Path,
    delta: str | Path,
    out: str | Path,
    dtype: torch.dtype | str | None = None,
    say: Callable[[str], None] = print,
) -> MergeReport:
    """Write ``base + delta``, summed in fp32 and rounded once, to ``out``, which appears when it is complete.

    ``base``: a model's folder, or its weights alone: a .safetensors file with its config.json beside it, of which
    ``out`` is then the counterpart if it is named so too; else ``out`` is a folder that transformers loads, whatever
    lies beside the base's weights included. ``delta``: a delta.safetensors, or a checkpoint that holds one. ``dtype``:
    float32, bfloat16 or float16, or their names; None: each tensor's own in the base. ``say`` hears how many updates
    the rounding lost, if any.

    Raises CheckpointError naming what differs for a base that the delta was not made from, for a delta that is damaged
    or not finite, and when ``out`` may not be written; ConfigError for another ``dtype``.
    """
    base, out = Path(base).expanduser(), Path(out).expanduser()
    stored = _dtype(dtype)
    trained = read_delta(Path(delta).expanduser())
    manifest = _file_manifest(base) if base.is_file() else read_manifest(base)
    plan = plan_delta(trained, manifest, stored, say=say)
    if base.is_file() and out.suffix == ".safetensors":
        # a single file is planned under the name that transformers looks for
        file = next(each for each in plan.files if len(plan.files) == 1 or each.name == base.name)
        report = write_merged_file(file, out, [base, trained.path])
    elif out.suffix == ".safetensors":
        raise ConfigError(f"out: a folder expected, as the base {base} is one; {out} found")
    else:
        report = write_merged(plan, out, [trained.path.parent])
    lost = report.describe_lost("dtype=torch.float32")
    if lost is not None:
        say(lost)
    return report


def plan_delta(
    delta: Delta,
    base: Manifest,
    dtype: torch.dtype | None = None,
    max_shard_bytes: int | None = None,
    say: Callable[[str], None] = print,
) -> MergePlan:
    """How ``base`` with ``delta`` is laid out in files, after checking that the two belong together."""
    changes = delta_changes(delta, adapter_of(base), base)
    delta.check_base(base, say)
    return plan_merge(base, changes, dtype, max_shard_bytes)


def adapter_of(base: Manifest) -> ModelAdapter:
    """The adapter that serves the model in ``base``'s folder. Raises ConfigError when none does."""
    hf_config = read_hf_config(base.folder)
    architecture = get_plugin_manager().match_architecture(hf_config)
    adapter: ModelAdapter = load_object(architecture.adapter).from_hf_config(hf_config)
    return adapter


def _file_manifest(path: Path) -> Manifest:
    """The model whose weights, or one shard of them, are in ``path``."""
    alone = read_file_manifest(path)
    if not (path.parent / INDEX_NAME).is_file():
        return alone
    whole = read_manifest(path.parent)
    return whole if path in whole.paths else alone


def _dtype(given: torch.dtype | str | None) -> torch.dtype | None:
    dtype = getattr(torch, given.removeprefix("torch."), given) if isinstance(given, str) else given
    if dtype is None or dtype in _DTYPES:
        return dtype
    allowed = ", ".join(str(each).removeprefix("torch.") for each in _DTYPES)
    raise ConfigError(f"dtype: {given!r} is not allowed; allowed: {allowed}, or None for each tensor's own")
