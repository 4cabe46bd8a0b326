"""The report of what quantizing cost, against plain torch, and that an outlier column is reported."""

from __future__ import annotations

import json

import pytest
import torch

from lema_core.quantization import report as report_module
from lema_core.quantization.formats import Int8Rows
from lema_core.quantization.report import ErrorMeter, QuantizationReport, TensorReport
from lema_core.testing.comparing import relative

FORMAT = Int8Rows()


@pytest.fixture(autouse=True, params=["native", "torch"])
def _kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the installed kernel, if there is one, and without."""
    if request.param == "torch":
        monkeypatch.setattr(report_module, "native_quantize", lambda: None)


def int8(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    scale = weight.abs().amax(1) / 127
    return (weight / scale[:, None]).round().to(torch.int8), scale


def measured(weight: torch.Tensor, cut: int = 1000) -> ErrorMeter:
    meter = ErrorMeter(weight.shape[1])
    for rows in weight.split(cut):
        meter.add(FORMAT, rows, int8(rows))
    return meter


def report(weight: torch.Tensor) -> TensorReport:
    shape = tuple(weight.shape)
    return TensorReport.quantized("layer.weight", shape, 4 * weight.numel(), FORMAT, "custom", measured(weight))


def normal(rows: int = 80, columns: int = 96) -> torch.Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(columns))


def test_errors_are_those_of_the_whole_weight() -> None:
    weight = normal()
    codes, scale = int8(weight)
    back = codes.float() * scale[:, None]
    meter = measured(weight)
    assert meter.error == pytest.approx(relative(back, weight), rel=1e-6)
    column, error = meter.worst_column()
    usual = weight.double().norm(dim=0).median()
    errors = (back - weight).double().norm(dim=0) / weight.double().norm(dim=0).clamp(min=usual)
    assert (column, error) == (int(errors.argmax()), pytest.approx(errors.max().item(), rel=1e-6))


def test_blocks_add_up() -> None:
    whole, cut = measured(normal()), measured(normal(), cut=7)
    assert cut.error == pytest.approx(whole.error, rel=1e-6)
    assert cut.worst_column()[0] == whole.worst_column()[0]


@pytest.mark.parametrize("size", [1e-30, 1e36])
def test_squares_of_tiny_and_huge_numbers(size: float) -> None:
    assert measured(normal() * size).error == pytest.approx(measured(normal()).error, rel=1e-3)


def test_an_outlier_column_is_reported_though_the_whole_looks_well() -> None:
    weight = normal()
    usual = report(weight)
    weight[:, 17] = 200
    found = report(weight)
    assert usual.warning is None
    assert found.error < 0.03, "by the norm of the whole little is lost"
    assert found.worst_column != 17 and found.worst_column_error > 0.4
    assert "layer.weight: int8 changes column" in found.warning and "smaller groups or more bits" in found.warning


def test_a_column_that_nobody_misses_is_not_reported() -> None:
    weight = normal()
    weight[:, 3] *= 1e-4
    weight[:, 4] = 0
    assert report(weight).warning is None


def test_a_weight_that_came_back_as_another_is_reported() -> None:
    weight = normal()
    meter = ErrorMeter(96)
    codes, scale = int8(weight)
    meter.add(FORMAT, weight, (codes.flip(0), scale))
    found = TensorReport.quantized("layer.weight", (80, 96), 4 * weight.numel(), FORMAT, "custom", meter)
    assert found.error > 1 and "changes it by" in found.warning


def test_zeros_have_no_error() -> None:
    meter = ErrorMeter(8)
    meter.add(FORMAT, torch.zeros(4, 8), (torch.zeros(4, 8, dtype=torch.int8), torch.zeros(4)))
    assert meter.error == 0 and meter.worst_column()[1] == 0


def test_what_is_written_down() -> None:
    stays = TensorReport("norm.weight", (96,), 192, 192, reason="a norm")
    whole = QuantizationReport.of([report(normal()), stays])
    assert whole.bytes_before == 4 * 80 * 96 + 192 and whole.bytes_after == 80 * 96 + 4 * 80 + 192
    assert whole.tensors[0].bits == pytest.approx(8 + 32 / 96) and stays.bits == 16
    written = json.loads(json.dumps(whole.to_json(), allow_nan=False))
    assert [each["format"] for each in written["tensors"]] == ["int8", None] and written["warnings"] == []
    assert "80x96, 30720 -> 8000 bytes: 8.33 bits, int8 by custom, error 0.00" in str(whole.tensors[0])
    assert str(stays) == "norm.weight: 96, 192 -> 192 bytes: 16.00 bits, stays as it is: a norm"
