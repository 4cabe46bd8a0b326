"""What the plugin tells lema, and the models that it names."""

from __future__ import annotations

import re
from importlib.resources import files
from math import prod
from pathlib import Path

import pytest
import yaml

from lema_core.plugins import get_plugin_manager
from lema_core.records import load_object
from lema_qwen import conf
from lema_qwen.plugin import lema_architectures, lema_config_packages

PRESETS = sorted(Path(str(files(conf) / "model")).glob("*.yaml"))


def test_it_is_found_once_it_is_installed() -> None:
    manager = get_plugin_manager()
    assert [problem for problem in manager.problems if problem.package == "lema-qwen"] == []
    assert set(lema_config_packages()) <= set(manager.config_packages())
    for record in lema_architectures():
        (model_type,) = record.model_types
        assert manager.match_architecture({"model_type": model_type}) == record
        assert load_object(record.adapter).__module__ == f"lema_qwen.{record.name}"


@pytest.mark.parametrize("preset", PRESETS, ids=[path.stem for path in PRESETS])
def test_presets(preset) -> None:
    """Their fields make a model of as many bytes as the comment says."""
    text = preset.read_text()
    options = yaml.safe_load(text)
    assert options.keys() == {"model_name_or_path", "hf_config"} and text.startswith("# @package _global_\n")
    assert f"+model={preset.stem} " in text
    config = options["hf_config"]
    adapter = load_object(get_plugin_manager().match_architecture(config).adapter).from_hf_config(config)
    size_bytes = sum(2 * prod(spec.shape) for spec in adapter.tensors() if spec.tied_to is None)
    amount, unit = re.search(r"([\d.]+) (MB|GB) as bf16", text).groups()
    stated_bytes = float(amount) * {"MB": 1e6, "GB": 1e9}[unit]
    assert abs(size_bytes - stated_bytes) <= (0.5e6 if unit == "MB" else 0.05e9)
