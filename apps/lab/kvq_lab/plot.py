"""Draws decode time against context, every line named at its end. Times nothing.

    kvq bench qwen3 --json > speed.json && python -m kvq_lab.plot speed.json speed.png

matplotlib is needed only for a plot.
"""

import importlib.util
import itertools
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from kvq.errors import BackendError, UsageError, argument
from kvq_apps.bench.engines import KVQ
from kvq_apps.bench.report import setting_text

COLOURS = {KVQ: "#c2410c", "transformers": "#15803d"}
OTHER_COLOUR = "#4b5563"
STYLES = ("-", "--", ":")
# Labels closer than this share of the axis are moved apart.
LABEL_GAP = 0.055
LEAST_TICKS = 3
# Steps within a power of ten; the last are Renard's R20, three of which lie in any factor of 1.5.
TICK_STEPS = (
    (1,),
    (1, 2, 5),
    (1, 1.5, 2, 3, 5, 7),
    (1, 1.12, 1.25, 1.4, 1.6, 1.8, 2, 2.24, 2.5, 2.8, 3.15, 3.55, 4, 4.5, 5, 5.6, 6.3, 7.1, 8, 9),
)


def check_plot(path: Path) -> None:
    """Raises before any measurement when the plot could not be drawn or written."""
    if importlib.util.find_spec("matplotlib") is None:
        raise BackendError(f"{argument('--plot')} needs matplotlib; pip install matplotlib")
    if not path.parent.is_dir():
        raise UsageError(f"{argument('--plot')} {path}: there is no folder {path.parent}")
    if path.suffix.lower() not in (".png", ".svg", ".pdf"):
        raise UsageError(f"{argument('--plot')} {path}: the name must end in .png, .svg or .pdf")


def draw(path: Path, data: Mapping[str, Any]) -> None:
    """Writes the plot of a report: one panel per thread count. Raises `UsageError`."""
    threads = data["threads"]
    figure = new_figure(7.0 * len(threads), 4.6)
    panels = figure.subplots(1, len(threads), sharey=True, squeeze=False)[0]
    _scale_axes(panels[0], data["rows"])
    for panel, count in zip(panels, threads, strict=True):
        rows = [row for row in data["rows"] if row["threads"] == count]
        _draw_panel(panel, rows, f"{data['model']}, {count} thread{'s'[: count > 1]}")
    write_figure(figure, path)


def new_figure(width: float, height: float) -> Any:
    """Makes an empty figure; sizes are in inches.

    Any: matplotlib has no types for what its methods take by keyword.
    """
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def write_figure(figure: Any, path: Path) -> None:
    """Writes the figure to `path`. Raises `UsageError`."""
    try:
        figure.savefig(path, dpi=150)
    except OSError as error:
        raise UsageError(
            f"{argument('--plot')} {path} cannot be written: {error.strerror}"
        ) from error


def open_panel(panel: Any, title: str) -> None:
    """Sets the looks that all panels share."""
    panel.set_title(title, fontsize=10, loc="left")
    panel.spines[["top", "right"]].set_visible(False)
    panel.grid(visible=True, axis="y", color="#e5e7eb", linewidth=0.6)


def _scale_axes(panel: Any, rows: Sequence[Mapping[str, Any]]) -> None:
    """Scales the time axis, which all panels share with this one."""
    low = min(row["decode_ms"] for row in rows) * 0.8
    high = max(row["decode_ms"] for row in rows) * 1.25
    ticks = log_ticks(low, high)
    panel.set_yscale("log")
    panel.set_ylim(low, high)
    panel.set_yticks(ticks, [f"{tick:g}" for tick in ticks])
    panel.set_ylabel("decode, ms per token")


def _draw_panel(panel: Any, rows: Sequence[Mapping[str, Any]], title: str) -> None:
    contexts = sorted({row["context"] for row in rows})
    panel.set_xscale("log", base=2)
    ticks = contexts if len(contexts) > 2 else [contexts[0] // 2, *contexts, contexts[-1] * 2]
    panel.set_xticks(ticks, [f"{tick:,}" for tick in ticks])
    panel.minorticks_off()
    panel.set_xlabel("context, tokens")
    open_panel(panel, title)
    series: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows:
        series.setdefault(f"{row['engine']} {setting_text(row)}", []).append(row)
    lines = [_draw_line(panel, points, rows) for points in series.values()]
    places = _apart([end for _, end, _ in lines], panel.get_ylim())
    for (name, _, colour), place in zip(lines, places, strict=True):
        panel.annotate(
            name, (1.01, place), xycoords="axes fraction", color=colour, va="center", fontsize=9
        )


def _draw_line(
    panel: Any, series: Sequence[Mapping[str, Any]], rows: Sequence[Mapping[str, Any]]
) -> tuple[str, float, str]:
    """Draws one setting; returns its name, the height it ends at and its colour."""
    engine, setting = series[0]["engine"], setting_text(series[0])
    colour = COLOURS.get(engine, OTHER_COLOUR)
    settings = list(dict.fromkeys(setting_text(row) for row in rows if row["engine"] == engine))
    panel.plot(
        [row["context"] for row in series],
        [row["decode_ms"] for row in series],
        STYLES[settings.index(setting) % len(STYLES)],
        color=colour,
        marker="o",
        markersize=3,
        linewidth=2.4 if engine == KVQ else 1.3,
    )
    return f"{engine} {setting}", series[-1]["decode_ms"], colour


def log_ticks(low: float, high: float) -> list[float]:
    """Returns three or more round numbers between `low` and `high`, at least 1.5 times `low`."""
    powers = range(int(np.floor(np.log10(low))), int(np.ceil(np.log10(high))) + 1)
    inside = list[float]()
    for steps in TICK_STEPS:
        ticks = [float(f"{step}e{power}") for power in powers for step in steps]
        inside = [tick for tick in ticks if low <= tick <= high]
        if len(inside) >= LEAST_TICKS:
            break
    return inside


def _apart(ends: Sequence[float], limits: tuple[float, float]) -> list[float]:
    """Returns label places on the axis (0 to 1) at `ends`, moved up until none overlap."""
    low, high = np.log(limits)
    places = [(float(np.log(end)) - low) / (high - low) for end in ends]
    order = sorted(range(len(places)), key=places.__getitem__)
    for below, above in itertools.pairwise(order):
        places[above] = max(places[above], places[below] + LABEL_GAP)
    return places


if __name__ == "__main__":
    draw(Path(sys.argv[2]), json.loads(Path(sys.argv[1]).read_text("utf-8")))
