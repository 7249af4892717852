"""The report of `kvq bench`: one object with every number, and a table for each depth.

Times nothing.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from kvq.formats import format_bytes
from kvq_apps.bench.engines import Setting
from kvq_apps.bench.measure import SpeedJob
from kvq_apps.terminal import output
from kvq_runtime.backends import ModelFiles

Row = Mapping[str, Any]
# Stands where nothing was measured.
NOTHING = "-"


def report(
    files: ModelFiles, job: SpeedJob, threads: Sequence[int], machine: Row, rows: Sequence[Row]
) -> dict[str, Any]:
    """Makes the object of `--json`. `medians` holds decode_ms by setting and depth."""
    settings = asdict(job)
    # `rows` are the results.
    settings["pass_rows"] = settings.pop("rows")
    medians: dict[str, dict[str, float]] = {}
    for row in rows:
        count = f"{row['threads']} thread{'s'[: row['threads'] > 1]}"
        label = f"{row['engine']} {setting_text(row)}, {count}"
        medians.setdefault(label, {})[str(row["context"])] = row["decode_ms"]
    return {
        "machine": dict(machine),
        "model": files.name,
        "weights": files.weights_json(),
        "threads": list(threads),
        **settings,
        "rows": [dict(row) for row in rows],
        "medians": medians,
    }


def print_head(files: ModelFiles, machine: Row) -> None:
    """Prints what is measured, and on which machine."""
    versions = ", ".join(f"{name} {text}" for name, text in machine["versions"].items())
    features = " ".join(machine["features"][-3:])
    load = "unknown" if machine["load"] is None else f"{machine['load']:.1f} at the start"
    device = machine["device_name"]
    output.print_table(
        [
            ("model", f"{files.name}, {format_bytes(files.weights_json()['bytes'])} of weights"),
            ("machine", f"{machine['processor']}, {machine['cores']} cores ({features})"),
            *([("device", device)] if device else []),
            ("versions", f"{versions}; kernels {machine['kernels']}"),
            ("load", load),
        ]
    )


def print_rows(rows: Sequence[Row], job: SpeedJob) -> None:
    """Prints the rows of one depth, then their passes of several tokens.

    `times kvq` compares with the first row, of kvq.
    """
    first = rows[0]
    output.print_data(
        f"\n{first['context']} tokens, threads: {first['threads']}; memory: "
        f"{format_bytes(round(first['memory_bytes_s']))}/s"
    )
    header = ("engine", "kv", "decode ms", "times kvq", "(min)",
        f"prefill {job.prefill_tokens}, tok/s", "times kvq", "ttft ms", "KV", "a step reads",
        "of memory", "making room", "at once, ms")  # fmt: skip
    _print_table((_cells(row, first) for row in rows), header)
    for row in rows:
        if row["prefill_skipped"]:
            where = f"{row['engine']} {setting_text(row)} at {row['context']}"
            output.print_note(f"no prefill of {where}: {row['prefill_skipped']}")
    header = ("rows of one sequence", "kv", "rows", "pass ms", "of 1 row", "attention ms")
    passes = (
        (
            row["engine"],
            setting_text(row),
            count,
            f"{whole:.2f}",
            _times(whole, row["pass_ms"].get("1")),
            cell_text(row["attention_ms"].get(count), "{:.2f}"),
        )
        for row in rows
        for count, whole in row["pass_ms"].items()
    )
    _print_table(passes, header)


def note_rows(rows: Sequence[Row]) -> None:
    """Says on stderr what a step takes: `--json` prints its object at the end alone."""
    for row in rows:
        output.print_note(
            f"{row['engine']} {setting_text(row)} at {row['context']}, threads: {row['threads']}: "
            f"{row['decode_ms']:.2f} ms a token"
        )


def _cells(row: Row, first: Row) -> tuple[str, ...]:
    base: Row = {} if row["engine"] == first["engine"] else first
    pressed = row["kv_policy"] is not None
    return (
        row["engine"],
        setting_text(row),
        f"{row['decode_ms']:.2f}",
        _times(row["decode_ms"], base.get("decode_ms")),
        f"{row['decode_min_ms']:.2f}",
        cell_text(row["prefill_tok_s"], "{:.1f}"),
        _times(row["prefill_tok_s"], base.get("prefill_tok_s")),
        cell_text(row["ttft_ms"], "{:.0f}"),
        format_bytes(row["kv_bytes"]),
        format_bytes(row["weight_bytes_read"] + row["kv_bytes_read"]),
        f"{row['bandwidth_share']:.0%}",
        cell_text(row["relief_share"] if pressed else None, "{:.1%}"),
        cell_text(row["relief_ms"] if pressed else None, "{:.1f}"),
    )


def _print_table(rows: Iterable[Sequence[str]], header: Sequence[str]) -> None:
    """Prints a table, if it has rows, without the columns in which nothing was measured."""
    columns = [column for column in zip(header, *rows, strict=True) if {*column[1:]} - {NOTHING}]
    if columns:
        title, *cells = zip(*columns, strict=True)
        output.print_data("")
        output.print_table(cells, header=title)


def setting_text(row: Row) -> str:
    """Returns a row's setting: `4:2`, or under pressure `4:2 h2o`."""
    return Setting(kv=row["kv"], policy=row["kv_policy"]).text


def _times(value: float | None, base: float | None) -> str:
    return f"{value / base:.2f} x" if value and base else NOTHING


def cell_text(value: float | None, form: str) -> str:
    """Returns a number as `form` has it, and `NOTHING` for None."""
    return NOTHING if value is None else form.format(value)
