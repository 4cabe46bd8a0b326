"""A predicted step as a PNG: what each tier holds, and when disk, link and compute are busy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lema_core.errors import ConfigError
from lema_core.memory import format_bytes
from lema_core.planning.curves import StepPicture

#: pixels
WIDTH, HEIGHT = 1600, 900
_DPI = 100
#: colours that stay apart for colour-blind eyes (Okabe and Ito, 2008)
_COLORS = {"device": "#0072B2", "RAM": "#E69F00", "disk": "#56B4E9", "link": "#CC79A7", "compute": "#009E73"}
_WAIT = "#D55E00"


def draw_step(picture: StepPicture, path: Path, title: str) -> None:
    """Write a PNG of WIDTH x HEIGHT pixels; axes in seconds and GB. Raises ConfigError where matplotlib is missing or
    ``path`` cannot be written."""
    figure = _new_figure()
    memory, lanes = figure.subplots(2, 1, sharex=True, height_ratios=[2, 1])
    figure.suptitle(title)
    _draw_memory(memory, picture)
    _draw_lanes(lanes, picture)
    try:
        figure.savefig(path, format="png", dpi=_DPI)
    except OSError as error:
        raise ConfigError(f"plot: {path}: cannot be written: {error.strerror or error}") from error


def _new_figure() -> Any:
    # Without pyplot: no display is looked for, and nothing is kept behind the caller's back.
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError(
            f"plot=true needs matplotlib, which cannot be imported ({error}); pip install matplotlib, or leave plot out"
        ) from error
    figure = Figure(figsize=(WIDTH / _DPI, HEIGHT / _DPI), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def _draw_memory(axes: Any, picture: StepPicture) -> None:
    top = 0
    for name, curve in picture.tiers.items():
        gigabytes = [nbytes / 1e9 for nbytes in curve.nbytes]
        color = _COLORS[name]
        axes.step(curve.times_s, gigabytes, where="post", color=color, label=f"weights in {name}")
        label = f"window in {name}, {format_bytes(curve.capacity_bytes)}"
        axes.axhline(curve.capacity_bytes / 1e9, color=color, linestyle="--", linewidth=1, label=label)
        top = max(top, curve.capacity_bytes, *curve.nbytes)
    axes.set_ylim(0, 1.15 * top / 1e9)
    axes.set_ylabel("memory (GB)")
    axes.legend(loc="lower right")
    axes.grid(alpha=0.3)


def _draw_lanes(axes: Any, picture: StepPicture) -> None:
    names = [lane for lane in ("compute", "link", "disk") if lane in picture.lanes]
    for row, lane in enumerate(names):
        axes.broken_barh(picture.lanes[lane], (row - 0.4, 0.8), color=_COLORS[lane], label=lane)
        if lane == "compute" and "wait" in picture.lanes:
            axes.broken_barh(picture.lanes["wait"], (row - 0.4, 0.8), color=_WAIT, label="compute waits")
    axes.set_yticks(range(len(names)), names)
    axes.set_xlim(0, picture.step_s)
    axes.set_xlabel("time in the step (s)")
    axes.legend(loc="upper right")
