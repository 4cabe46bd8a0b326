"""Backends against the libraries themselves, and what is said where a library is missing, broken or a stub."""

from __future__ import annotations

import ast
import builtins
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lema_core.errors import ConfigError
from lema_core.plugins import PluginManager
from lema_core.quantization.backends import WeightQuantizer
from lema_core.quantization.codec import WeightCodec
from lema_core.quantization.formats import NF4, NF4_VALUES
from lema_quant import plugin
from lema_quant.backends import bitsandbytes, quanto, torchao
from lema_quant.custom.int8 import Int8Codec
from lema_quant.custom.nf4 import NF4Codec

LIBRARIES = ("torchao", "optimum", "bitsandbytes")


@pytest.fixture(scope="module")
def manager() -> PluginManager:
    found = PluginManager()
    assert found.admit("lema-quant", "quant", lambda: plugin), found.problems
    return found


@pytest.fixture
def nothing_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """No library can be imported, as where none is installed."""
    real = builtins.__import__

    def without(name: str, *arguments: Any, **options: Any) -> Any:
        if name.partition(".")[0] in LIBRARIES:
            raise ModuleNotFoundError(f"No module named {name.partition('.')[0]!r}", name=name)
        return real(name, *arguments, **options)

    monkeypatch.setattr(builtins, "__import__", without)


def encode(codec: WeightCodec, weight: Tensor) -> tuple[Tensor, ...]:
    parts = tuple(torch.zeros(part.shape, dtype=part.dtype) for part in codec.format.parts(tuple(weight.shape)))
    codec.encode(weight, parts)
    return parts


def weights() -> dict[str, Tensor]:
    """Like a model's: normal, with heavy tails, in bf16, with ties, with rows of zeros."""
    random = torch.Generator().manual_seed(7)
    normal = torch.randn(96, 320, generator=random) * 0.02
    heavy = normal / torch.rand(96, 320, generator=random).clamp(min=0.05)
    with_zeros = normal.clone()
    with_zeros[::7] = 0
    ties = torch.randint(-254, 255, (96, 320), generator=random) / 2
    ties[:, 0] = 127
    return {"normal": normal, "heavy": heavy, "bf16": heavy.bfloat16(), "zeros": with_zeros, "ties": ties}


# -- agreement


@pytest.mark.parametrize("name", ["torchao", "quanto", "bitsandbytes"])
def test_int8_agrees_with_custom_to_rounding(name: str, manager: PluginManager) -> None:
    pytest.importorskip({"quanto": "optimum.quanto"}.get(name, name))
    lines: list[str] = []
    codec = WeightQuantizer(manager, name, warn=lines.append).codec((96, 320), bits=8)
    assert codec.backend == name and codec.version.startswith(name)
    for what, weight in weights().items():
        codes, scale = encode(codec, weight)
        own_codes, own_scale = encode(Int8Codec(), weight)
        torch.testing.assert_close(scale, own_scale, rtol=1e-6, atol=0)
        differs = codes != own_codes
        assert (codes.int() - own_codes.int()).abs().max() <= 1, what
        assert codes.abs().max() <= 127, what
        # Only where a number lies between two codes: how the library multiplies then decides.
        fraction = (weight.double() / own_scale.double()[:, None].where(own_scale[:, None] > 0, 1)).abs() % 1
        assert ((fraction[differs] - 0.5).abs() < 1e-4).all(), what
        assert what == "ties" or differs.float().mean() < 1e-3, what
    assert not lines, "a library failed"


def test_torchao_alone_encodes_the_same(manager: PluginManager) -> None:
    """Its tensor, dequantized by itself, holds the numbers that the wire format stands for."""
    quantization = pytest.importorskip("torchao.quantization")
    weight = weights()["heavy"]
    codec = WeightQuantizer(manager, "torchao").codec((96, 320), bits=8)
    codes, scale = encode(codec, weight)
    theirs = quantization.Int8Tensor.from_hp(weight, quantization.PerRow(), scale=weight.abs().amax(1)[:, None] / 127)
    assert theirs.qdata.equal(codes)
    out = torch.empty(96, 320)
    codec.format.decode((codes, scale), out)
    torch.testing.assert_close(theirs.dequantize(), out, rtol=1e-6, atol=0)


def test_quanto_alone_encodes_the_same(manager: PluginManager) -> None:
    library = pytest.importorskip("optimum.quanto")
    weight = weights()["heavy"]
    codec = WeightQuantizer(manager, "quanto").codec((96, 320), bits=8)
    codes, scale = encode(codec, weight)
    own_scale = library.AbsmaxOptimizer()(weight, library.qint8, 0)
    theirs = library.quantize_weight(weight, library.qint8, axis=0, scale=own_scale)
    assert type(theirs).__name__ == "WeightQBytesTensor"
    assert theirs._data.equal(codes) and own_scale[:, 0].equal(scale)
    out = torch.empty(96, 320)
    codec.format.decode((codes, scale), out)
    assert theirs.dequantize().equal(out)


def nf4_weights() -> dict[str, Tensor]:
    """Every midpoint of two values, exactly and one step beside it, and blocks of which absmax is next to nothing."""
    values = torch.tensor(NF4_VALUES)
    midpoints = (values[1:] + values[:-1]) / 2
    ties = torch.cat([midpoints, midpoints.nextafter(torch.tensor(9.0)), midpoints.nextafter(torch.tensor(-9.0))])
    block = torch.zeros(64)
    block[: len(ties)], block[-1] = ties, 1.0
    sizes = torch.tensor([1.0, 3.7, 1e-3, 0.1234567, 1e-37, 1e-39, 1e-44, 3e38])
    return {**weights(), "midpoints": block * sizes[:, None], "zeros": torch.zeros(4, 128)}


def test_nf4_is_bitsandbytes_bit_for_bit(manager: PluginManager) -> None:
    functional = pytest.importorskip("bitsandbytes.functional")
    for what, weight in nf4_weights().items():
        codec = WeightQuantizer(manager, "bitsandbytes").codec(tuple(weight.shape), bits=4)
        assert (codec.backend, codec.format.name) == ("bitsandbytes", "nf4")
        packed, absmax = encode(codec, weight)
        theirs, state = functional.quantize_4bit(weight, blocksize=64, quant_type="nf4", compress_statistics=False)
        assert theirs.flatten().equal(packed.flatten()) and state.absmax.equal(absmax.flatten()), what
        own_packed, own_absmax = encode(NF4Codec(), weight)
        assert own_packed.equal(packed) and own_absmax.equal(absmax), f"custom encodes {what} otherwise"
        out = torch.empty(weight.shape)
        NF4().decode((packed, absmax), out)
        state.dtype = torch.float32
        assert functional.dequantize_4bit(theirs, state).equal(out), f"{what} is decoded otherwise"


# -- who serves


def test_the_order_of_preference(manager: PluginManager) -> None:
    names = list(dict.fromkeys(each.name for each in manager.quant_backends()))
    assert names == ["torchao", "quanto", "bitsandbytes", "custom"]


def test_auto_with_none_installed_says_what_to_install(manager: PluginManager, nothing_installed: None) -> None:
    assert manager.choose_quant_backend("auto", 8).sentences == (
        "torchao: No module named 'torchao' (pip install torchao)",
        "quanto: No module named 'optimum' (pip install optimum-quanto)",
        "bitsandbytes: No module named 'bitsandbytes' (pip install bitsandbytes)",
        "custom (int8): chosen",
    )
    assert manager.choose_quant_backend("auto", 4).backend.format == "int4-32"


def test_a_missing_library_is_named_once_and_custom_encodes(manager: PluginManager, nothing_installed: None) -> None:
    lines: list[str] = []
    quantizer = WeightQuantizer(manager, "bitsandbytes", warn=lines.append)
    for columns in (64, 128, 64):
        codec = quantizer.codec((4, columns), bits=4)
        assert (codec.backend, codec.format.name) == ("custom", "nf4")
    assert quantizer.codec((4, 33), bits=4).format.name == "int4-32"
    reason = "No module named 'bitsandbytes' (pip install bitsandbytes)"
    assert lines == [
        f"quant_backend=bitsandbytes: {reason}; custom (nf4) takes its place",
        "custom (nf4) does not take a weight of [4, 33]: its 33 columns are no multiple of 64; custom (int4-32) takes "
        "such ones",
    ]


@pytest.mark.parametrize("name", ["torchao", "quanto", "bitsandbytes"])
def test_a_stub_package_gives_its_real_reason(
    name: str, manager: PluginManager, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A package of the right name that holds nothing, and one that fails while it is imported."""
    package = {"quanto": "optimum"}.get(name, name)
    for module in [each for each in sys.modules if each.partition(".")[0] == package]:
        monkeypatch.delitem(sys.modules, module)
    (tmp_path / package).mkdir()
    (tmp_path / package / "__init__.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    missed = manager.choose_quant_backend(name, 8).missed
    assert missed.startswith(f"quant_backend={name}: No module named '{package}.") and "pip install" in missed
    (tmp_path / package / "__init__.py").write_text("raise OSError('libcudart.so: cannot open shared object file')")
    monkeypatch.delitem(sys.modules, package, raising=False)
    missed = manager.choose_quant_backend(name, 8).missed
    assert "it cannot be imported: OSError: libcudart.so: cannot open shared object file; custom (int8) takes" in missed
    monkeypatch.delitem(sys.modules, package, raising=False)


@pytest.mark.parametrize("name", ["torchao", "quanto"])
def test_four_bits_of_a_library_that_has_only_eight(name: str, manager: PluginManager) -> None:
    lines: list[str] = []
    quantizer = WeightQuantizer(manager, name, warn=lines.append)
    for _ in range(2):
        codec = quantizer.codec((4, 64), bits=4)
    assert (codec.backend, codec.format.name) == ("custom", "int4-32")
    assert len(lines) == 1 and f"quant_backend={name}: its weights of 4 bits" in lines[0]
    assert "custom (int4-32) takes its place" in lines[0]


def test_a_library_that_fails_is_said_with_its_text(manager: PluginManager, monkeypatch: pytest.MonkeyPatch) -> None:
    quantization = pytest.importorskip("torchao.quantization")

    def fails(*arguments: Any, **options: Any) -> None:
        raise NotImplementedError("Could not run 'aten::int8' on this CPU")

    monkeypatch.setattr(quantization.Int8Tensor, "from_hp", fails)
    lines: list[str] = []
    codec = WeightQuantizer(manager, "torchao", warn=lines.append).codec((96, 320), bits=8)
    weight = weights()["normal"]
    for _ in range(2):
        codes, _ = encode(codec, weight)
    assert codes.equal(encode(Int8Codec(), weight)[0])
    assert lines == [
        "torchao (int8) fails on [96, 320] torch.float32: NotImplementedError: Could not run 'aten::int8' on this CPU; "
        "custom (int8) takes its place"
    ]


def test_an_unknown_name_lists_the_known_ones(manager: PluginManager) -> None:
    with pytest.raises(ConfigError, match=r"known: auto, bitsandbytes, custom, quanto, torchao; did you mean 'quanto'"):
        manager.choose_quant_backend("quant0", 8)


def test_a_library_is_imported_inside_the_call_only() -> None:
    for module in (torchao, quanto, bitsandbytes):
        for node in ast.parse(Path(module.__file__).read_text()).body:
            names = (
                [each.name for each in node.names] if isinstance(node, ast.Import) else [getattr(node, "module", "")]
            )
            assert not {str(name).partition(".")[0] for name in names} & set(LIBRARIES), f"{module.__name__}: {names}"


def test_asking_for_a_library_prints_nothing_of_its_own() -> None:
    """bitsandbytes, on some CPUs, warns at import that a kernel of its own is missing."""
    pytest.importorskip("bitsandbytes")
    code = (
        "import logging; logging.basicConfig(); from lema_quant.backends import bitsandbytes as backend; "
        "assert backend.unavailable_here('cpu') is None"
    )
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert told.returncode == 0 and "bitsandbytes" not in told.stderr
