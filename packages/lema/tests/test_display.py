"""Progress on a terminal and in a pipe, summaries, and metrics.jsonl across interrupted and repeated runs."""

from __future__ import annotations

import io
import json
import threading
from pathlib import Path
from typing import Any

import pytest

from lema.display import TrainingDisplay, byte_progress, print_summary
from lema.metrics import MetricsWriter, refuse_earlier_run
from lema_core.errors import ConfigError, DataError


def _metrics(step: int, **changes: Any) -> dict[str, Any]:
    return {
        "step": step,
        "loss": 1.5,
        "lr": 1e-4,
        "grad_norm": 0.5,
        "tokens": 256,
        "step_s": 2.0,
        "wait_s": 0.25,
        "read_bytes": 538_000_000,
        "written_bytes": 0,
        "device_peak_bytes": 0,
        "ram_peak_bytes": 120_000_000,
        "rss_peak_bytes": 800_000_000,
    } | changes


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_long_transfer_is_a_live_line_on_a_terminal_and_one_line_in_a_pipe() -> None:
    for out, expected in (Terminal(), "downloading [a]"), (io.StringIO(), "lema: downloading [a], 1.50 MB\n"):
        with byte_progress("downloading [a]", 1_500_000, out) as advance:
            advance(1_500_000)
        assert expected in out.getvalue()
    assert out.getvalue() == expected


def test_piped_output_is_one_line_per_step() -> None:
    out = io.StringIO()
    display = TrainingDisplay(out)
    display.start(total_steps=40, start_step=10, budgets={"ram": 150_000_000})
    display.step(_metrics(11))
    display.message("saved checkpoint-11")
    display.step(_metrics(12, loss=None, step_s=4.0, ram_peak_bytes=130_000_000, device_peak_bytes=5_000_000))
    display.stop()
    assert out.getvalue().splitlines() == [
        "step 11/40  loss 1.5000  lr 0.0001  128 tok/s  eta 0:58  ram 120 MB of 150 MB  process 800 MB  waited 0.25 s",
        "saved checkpoint-11",
        "step 12/40  loss -  lr 0.0001  64 tok/s  eta 1:24  device 5.00 MB  ram 130 MB of 150 MB  process 800 MB  "
        "waited 0.50 s",
    ]


def test_a_terminal_has_a_live_line_and_no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "200")
    out, threads = Terminal(), threading.active_count()
    display = TrainingDisplay(out)
    display.start(total_steps=2, start_step=0, budgets={})
    display.step(_metrics(1))
    assert threading.active_count() == threads
    display.message("a [note] with brackets")
    display.step(_metrics(2, loss=float("nan")))
    display.stop()
    display.stop()
    shown = out.getvalue()
    assert "1/2" in shown and "loss 1.5000" in shown and "a [note] with brackets" in shown
    assert "loss nan" in shown and "eta 0:00" in shown and "\x1b[?25h" in shown  # the cursor is back


def test_summary_prints_absolute_paths_and_units() -> None:
    out = io.StringIO()
    summary = {"text": "Once upon", "checkpoint": Path("out/c"), "rss_peak_bytes": 1_500_000, "total_s": 2.0, "x": None}
    print_summary(summary, out)
    assert out.getvalue().splitlines() == [
        "Once upon",
        f"checkpoint      {Path('out/c').absolute()}",
        "rss_peak_bytes  1.50 MB",
        "total_s         2 s",
    ]


def test_figures_that_belong_together_are_shown_one_by_one() -> None:
    out = io.StringIO()
    print_summary(
        {"prediction": {"step_s": 1.5, "read_bytes": 2_000_000}, "measured": None, "example": {"a": "b"}}, out
    )
    assert out.getvalue().splitlines() == [
        "prediction.step_s      1.5 s",
        "prediction.read_bytes  2.00 MB",
        "example                {'a': 'b'}",
    ]


def _steps(path: Path) -> list[int]:
    return [json.loads(line)["step"] for line in path.read_text().splitlines()]


def test_a_line_is_in_the_file_when_write_returns(tmp_path: Path) -> None:
    writer = MetricsWriter(tmp_path / "out")
    writer.write(_metrics(1, loss=float("nan")))
    assert json.loads(writer.path.read_text()) == _metrics(1, loss=None)
    writer.close()


def test_resume_leaves_one_object_per_step(tmp_path: Path) -> None:
    writer = MetricsWriter(tmp_path)
    for step in range(1, 8):
        writer.write(_metrics(step))
    writer.close()
    with writer.path.open("a") as file:
        file.write('{"step": 8, "lo')  # the process died here
    said: list[str] = []
    writer = MetricsWriter(tmp_path, start_step=5, say=said.append)
    assert _steps(writer.path) == [1, 2, 3, 4, 5] and "3 line(s) after step 5" in said[0]
    writer.write(_metrics(6))
    writer.close()
    assert _steps(writer.path) == [1, 2, 3, 4, 5, 6] and [each.name for each in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_a_last_line_without_newline_stays_a_line(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n{"step": 2}')
    writer = MetricsWriter(tmp_path, start_step=2)
    writer.write({"step": 3})
    writer.close()
    assert _steps(writer.path) == [1, 2, 3]


def test_a_fresh_run_sets_an_earlier_file_aside_and_says_so(tmp_path: Path) -> None:
    said: list[str] = []
    for number in range(3):
        writer = MetricsWriter(tmp_path, say=said.append)
        writer.write(_metrics(number + 1))
        writer.close()
    assert [_steps(tmp_path / f"metrics{part}.jsonl") for part in (".1", ".2", "")] == [[1], [2], [3]]
    assert len(said) == 2 and "metrics.1.jsonl" in said[0]


def test_a_file_that_is_not_metrics_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text("my notes\nof the day\n")
    with pytest.raises(DataError, match=r"metrics\.jsonl:1"):
        MetricsWriter(tmp_path, start_step=3)
    assert (tmp_path / "metrics.jsonl").read_text() == "my notes\nof the day\n"


def test_a_second_run_does_not_start_among_earlier_checkpoints(tmp_path: Path) -> None:
    refuse_earlier_run(tmp_path / "new", "none")
    (tmp_path / "checkpoint-20").mkdir()
    (tmp_path / "checkpoint-3").mkdir()
    with pytest.raises(
        ConfigError, match=r"steps 3, 20\); go on from there with resume=auto, or give another output_dir"
    ):
        refuse_earlier_run(tmp_path, "none")
    refuse_earlier_run(tmp_path, "auto")
