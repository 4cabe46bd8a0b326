"""What the benchmarks reckon with: halving, slopes, the models that they make, the groups' disk."""

from __future__ import annotations

import json
import sys
import warnings
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest
import torch

from lema_core.checkpoint import bind_tensors, read_manifest, read_tensor
from lema_models.llama import LlamaAdapter

BENCH = Path(__file__).parent.parent / "tools/bench"


@pytest.fixture
def tool(monkeypatch: pytest.MonkeyPatch):
    """Imports a module of tools/bench by name."""
    monkeypatch.syspath_prepend(str(BENCH))

    def load(name: str) -> ModuleType:
        before = set(sys.modules)
        module = import_module(name)
        for added in set(sys.modules) - before:  # their names are common: leave none behind
            if getattr(sys.modules[added], "__file__", None) and Path(sys.modules[added].__file__).parent == BENCH:
                monkeypatch.delitem(sys.modules, added)
        return module

    return load


@pytest.mark.parametrize("resolution", [1, 7, 100])
def test_smallest_is_within_the_resolution_of_what_a_scan_finds(tool, resolution: int) -> None:
    smallest = tool("smallest").smallest
    for threshold in (11, 12, 500, 999, 1000):
        found = smallest(lambda value, least=threshold: value >= least, 10, 1000, resolution)
        assert threshold <= found < threshold + resolution


def test_the_slope_is_that_of_polyfit(tool) -> None:
    slope = tool("bench_steady").slope
    assert slope([5.0, 8.0, 11.0]) == pytest.approx(3.0)
    values = torch.randn(50, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    line = torch.stack([torch.arange(50.0, dtype=torch.float64), torch.ones(50, dtype=torch.float64)], dim=1)
    expected = torch.linalg.lstsq(line, values[:, None]).solution[0].item()
    assert slope(values.tolist()) == pytest.approx(expected)


def test_fewer_layers_of_a_model_are_its_first_ones(tool, tmp_path: Path) -> None:
    maker, shapes = tool("make_model"), tool("shapes")
    shape = shapes.Shape(32, 48, 3, 4, 2, 40)
    whole = maker.make_model(tmp_path / "whole", maker.llama_config(**shape._asdict(), dtype="bfloat16"), "bfloat16")
    part = maker.first_layers(whole, 2, tmp_path / "part")
    tensors = {}
    for folder in (whole, part):
        adapter = LlamaAdapter.from_hf_config(json.loads((folder / "config.json").read_text()))
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            tensors[folder] = bind_tensors(read_manifest(folder), adapter)
    assert {name for name in tensors[whole] if ".layers.2." not in name} == set(tensors[part])
    for name, info in tensors[part].items():
        assert torch.equal(read_tensor(info), read_tensor(tensors[whole][name]))
    assert sum(read_tensor(info).numel() for info in tensors[whole].values()) == shape.parameters
    assert sum(read_tensor(info).numel() for info in tensors[part].values()) == shape._replace(layers=2).parameters
    with pytest.raises(SystemExit, match="has 3 layers, 4 were asked for"):
        maker.first_layers(whole, 4, tmp_path / "more")


def test_a_folder_on_no_disk_cannot_be_slowed_down(tool) -> None:
    if not Path("/proc/self").exists():
        pytest.skip("no /proc here")
    with pytest.raises(OSError, match="no block device"):
        tool("cgroup").disk_number(Path("/proc"))
