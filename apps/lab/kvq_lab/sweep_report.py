"""A sweep's JSON as a table and as a plot: quality against the bytes really held. Runs nothing."""

from collections.abc import Iterable, Mapping, Sequence
from math import exp, inf, log, sqrt
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from kvq.formats import format_bytes
from kvq_apps.terminal import output
from kvq_lab.plot import LEAST_TICKS, log_ticks, new_figure, open_panel, write_figure
from kvq_lab.sweep import EXACT

Cell = Mapping[str, Any]

# What a table's column and a plot's panel show of a task: key of the cell, words, kind of axis.
MEASURES = {
    "kld": (("value", "KL divergence, nats", "log"), ("perplexity", "perplexity", "")),
    "passkey": (("value", "pass keys found", "share"), ("answer_nats", "pass key, nats", "")),
    "retrieval": (("value", "values found", "share"), ("answer_nats", "value, nats", "")),
}
# Divergences below it are rounding.
LEAST_NATS = 1e-9
STYLES = ("-", "--", ":")


def line_name(cell: Cell) -> str:
    """Names a line by what its points share: `budget 8:8`."""
    return cell["policy"] if cell["policy"] == EXACT else f"{cell['policy']} {cell['kv']}"


def print_sweep(data: Mapping[str, Any]) -> None:
    """Prints a line per cache and budget, a column per measure; what was refused on stderr."""
    tasks = [task for task in MEASURES if task in data["tasks"]]
    by_place: dict[tuple[str, str | None], dict[str, Cell]] = {}
    for cell in data["cells"]:
        by_place.setdefault((line_name(cell), cell["budget"]), {})[cell["task"]] = cell
    header = ["cache", "budget", "held"]
    header += [words for task in tasks for _, words, _ in MEASURES[task]]
    against = against_best(data["cells"])
    header += ["to the best"] * bool(against)
    rows = [
        [name, budget or "-", _bytes_held(cells.values()), *_values(cells, tasks)]
        + [against.get((name, budget), "-")] * bool(against)
        for (name, budget), cells in by_place.items()
    ]
    output.print_table(
        (name, data[name]) for name in ("model", "backend", "context_tokens", "seed")
    )
    output.print_data("")
    output.print_table(rows, header=header)
    refusals = {
        f"{line_name(cell)} at {cell['budget']}: {cell['refused']}": None
        for cell in data["cells"]
        if "refused" in cell
    }
    for text in refusals:
        output.print_note(f"refused: {text}")


def against_best(cells: Sequence[Cell]) -> dict[tuple[str, str | None], str]:
    """Compares every cache of a budget with the best, window by window, as `ratio_text` does."""
    said: dict[tuple[str, str | None], str] = {}
    measured = [cell for cell in cells if cell["task"] == "kld" and "window_nats" in cell]
    for budget in {cell["budget"] for cell in measured} - {None}:
        beside = [cell for cell in measured if cell["budget"] == budget]
        best = min(beside, key=lambda cell: cell["value"])
        for cell in beside:
            text = ratio_text(cell["window_nats"], best["window_nats"])
            said[line_name(cell), budget] = "best" if cell is best else text
    return said


def ratio_text(window_nats: Sequence[float], base_nats: Sequence[float]) -> str:
    """Says how many times the divergence `base_nats` this is, over the same windows.

    `1.31 x/ 1.05`: the geometric mean of the ratios and its standard error as a factor; with
    `, tie` where it is within two of these of 1.
    """
    logs = [
        log(max(nats, LEAST_NATS) / max(base, LEAST_NATS))
        for nats, base in zip(window_nats, base_nats, strict=True)
    ]
    error = standard_error(logs)
    text = f"{exp(mean(logs)):.2f} x/ {exp(min(error, 9)):.2f}"
    return f"{text}, tie" if abs(mean(logs)) <= 2 * error else text


def standard_error(values: Sequence[float]) -> float:
    """Returns the standard error of the mean of `values`; infinite where there is one alone."""
    return stdev(values) / sqrt(len(values)) if len(values) > 1 else inf


def draw_sweep(path: Path, data: Mapping[str, Any]) -> None:
    """Writes the plot: a panel per measure, a line per cache. Raises `UsageError`."""
    from matplotlib import colormaps

    tasks = [task for task in MEASURES if task in data["tasks"]]
    measured = [cell for cell in data["cells"] if "refused" not in cell]
    names = [name for name in dict.fromkeys(map(line_name, measured)) if name != EXACT]
    palette = [colormaps["tab10"](i) for i in range(10)]
    looks = {name: (palette[i % 10], STYLES[i // 10 % len(STYLES)]) for i, name in enumerate(names)}
    figure = new_figure(4.4 * len(tasks) + 2.2, 7.0)
    panels = figure.subplots(2, len(tasks), squeeze=False)
    for column, task in enumerate(tasks):
        cells = [cell for cell in measured if cell["task"] == task]
        for row, measure in enumerate(MEASURES[task]):
            _draw_panel(panels[row][column], cells, measure, looks)
    handles, labels = panels[1][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside right upper", fontsize=8, frameon=False)
    figure.suptitle(
        f"{data['model']}, {data['context_tokens']} tokens of context", x=0.01, ha="left"
    )
    write_figure(figure, path)


def _draw_panel(
    panel: Any,
    cells: Sequence[Cell],
    measure: tuple[str, str, str],
    looks: Mapping[str, tuple[tuple[float, ...], str]],
) -> None:
    key, words, axis = measure
    for name, (colour, style) in looks.items():
        points = sorted((c["kv_bytes"], c[key]) for c in cells if line_name(c) == name)
        sizes, values = [x for x, _ in points], [y for _, y in points]
        panel.plot(sizes, values, style, color=colour, label=name, marker="o", markersize=3)
    exact = [cell[key] for cell in cells if line_name(cell) == EXACT]
    if exact and axis != "log":
        panel.axhline(exact[0], color="#6b7280", linestyle="--", linewidth=1, label=EXACT)
    panel.set_xscale("log", base=2)
    ticks = _byte_ticks(*panel.get_xlim())
    panel.set_xticks(ticks, [format_bytes(tick) for tick in ticks])
    panel.minorticks_off()
    positive = [cell[key] for cell in cells if cell[key] > 0]
    if axis == "log" and positive:
        panel.set_yscale("log")
        low, high = min(positive) * 0.8, max(positive) * 1.25
        panel.set_ylim(low, high)
        panel.set_yticks(values := log_ticks(low, high), [f"{value:g}" for value in values])
    if axis == "share":
        panel.set_ylim(-0.03, 1.03)
    panel.set_xlabel("KV bytes held")
    open_panel(panel, words)


def _byte_ticks(low: float, high: float) -> list[float]:
    """Returns powers of two from `low` to `high`, or of a root of two where those are too few."""
    for root in (1, 2, 4, 8):
        ticks = [2.0 ** (power / root) for power in range(8 * root, 50 * root)]
        shown = [tick for tick in ticks if low <= tick <= high]
        if len(shown) >= LEAST_TICKS:
            break
    return shown


def _bytes_held(cells: Iterable[Cell]) -> str:
    sizes = [cell["kv_bytes"] for cell in cells if "refused" not in cell]
    return format_bytes(max(sizes)) if sizes else "refused"


def _values(cells: Mapping[str, Cell], tasks: Sequence[str]) -> list[str]:
    """Returns cells of a table; `-` where nothing was measured."""
    values = [cells.get(task, {}).get(key) for task in tasks for key, _, _ in MEASURES[task]]
    return ["-" if value is None else f"{value:.4g}" for value in values]
