"""The PNG of a predicted step."""

from __future__ import annotations

import struct
import sys
from pathlib import Path

import pytest

from lema.plotting import HEIGHT, WIDTH, draw_step
from lema_core.errors import ConfigError
from lema_core.planning.curves import Curve, StepPicture

PICTURE = StepPicture(
    tiers={
        "device": Curve((0.0, 1.0, 2.0), (3_000_000_000, 2_000_000_000, 3_000_000_000), 3_000_000_000),
        "RAM": Curve((0.0, 2.0), (9_000_000_000, 9_000_000_000), 10_000_000_000),
    },
    lanes={"link": ((0.0, 1.0),), "disk": ((0.5, 1.0),), "compute": ((0.2, 1.8),), "wait": ((0.0, 0.2),)},
    step_s=2.0,
)


def png_size(path: Path) -> tuple[int, int]:
    head = path.read_bytes()[:24]
    assert head[:8] == b"\x89PNG\r\n\x1a\n" and head[12:16] == b"IHDR"
    return struct.unpack(">II", head[16:24])


def test_a_png_of_the_announced_size_comes_out(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    draw_step(PICTURE, tmp_path / "step.png", "a step")
    assert png_size(tmp_path / "step.png") == (WIDTH, HEIGHT)
    assert "matplotlib.pyplot" not in sys.modules, "no display is looked for"


def test_everything_is_labelled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    figure_module = pytest.importorskip("matplotlib.figure")
    drawn: list = []
    monkeypatch.setattr(figure_module.Figure, "savefig", lambda self, *args, **kwargs: drawn.append(self))
    draw_step(PICTURE, tmp_path / "step.png", "a step")
    memory, lanes = drawn[0].axes
    assert drawn[0].get_suptitle() == "a step"
    assert (memory.get_ylabel(), lanes.get_xlabel()) == ("memory (GB)", "time in the step (s)")
    assert [text.get_text() for text in memory.get_legend().get_texts()] == [
        "weights in device",
        "window in device, 3.00 GB",
        "weights in RAM",
        "window in RAM, 10.0 GB",
    ]
    assert [label.get_text() for label in lanes.get_yticklabels()] == ["compute", "link", "disk"]
    assert "compute waits" in [text.get_text() for text in lanes.get_legend().get_texts()]
    assert memory.lines[0].get_ydata()[0] == pytest.approx(3.0)


def test_without_matplotlib_one_line_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [*(name for name in sys.modules if name.startswith("matplotlib")), "matplotlib"]:
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ConfigError, match=r"plot=true needs matplotlib.*pip install matplotlib") as failed:
        draw_step(PICTURE, tmp_path / "step.png", "a step")
    assert "\n" not in str(failed.value) and not (tmp_path / "step.png").exists()


def test_a_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    with pytest.raises(ConfigError, match=r"plot: .*/none/step.png: cannot be written: No such file or directory"):
        draw_step(PICTURE, tmp_path / "none/step.png", "a step")
