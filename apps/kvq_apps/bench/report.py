"""What `kvq bench` says: one object with every number, and the same as tables. Times nothing."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any, cast

from kvq.config import PAGE_TOKENS
from kvq.formats import format_bytes
from kvq_apps import output
from kvq_apps.bench.engines import OURS_ON_ORT, Setting, is_own
from kvq_apps.bench.measure import SpeedJob
from kvq_runtime.backends import ModelFiles
from kvq_runtime.bundle import Bundle

Row = Mapping[str, Any]
# Stands where nothing was measured.
NOTHING = "-"


def report(
    files: ModelFiles, job: SpeedJob, threads: Sequence[int], machine: Row, rows: Sequence[Row]
) -> dict[str, Any]:
    """The object of `--json`. `medians` holds decode_ms by setting and depth."""
    return {
        "machine": dict(machine),
        "model": files.name,
        "weights": files.weights_json(),
        "threads": list(threads),
        **_settings(job),
        "rows": [dict(row) for row in rows],
        "medians": {
            label: {str(row["context"]): row["decode_ms"] for row in series}
            for label, series in by_setting(rows).items()
        },
        "comparisons": list(comparisons(rows)),
        "passes": list(passes(rows)),
        "attention": list(attentions(rows, _layers(files))),
        "pressures": list(pressures(rows)),
    }


def _layers(files: ModelFiles) -> int:
    """Of a bundle; no other model's attention runs alone."""
    return cast(Bundle, files).config.num_layers if files.has_onnx else 1


def _settings(job: SpeedJob) -> dict[str, Any]:
    """The job's own fields; `rows` is the name of the results."""
    settings = asdict(job)
    settings["pass_rows"] = settings.pop("rows")
    return settings


def by_setting(rows: Iterable[Row]) -> dict[str, list[Row]]:
    """Rows of one engine, cache setting and thread count, under `kvq 4:2 h2o, 2 threads`."""
    series: dict[str, list[Row]] = {}
    for row in rows:
        label = f"{row['engine']} {setting_text(row)}, {_threads(row['threads'])}"
        series.setdefault(label, []).append(row)
    return series


def setting_text(row: Row) -> str:
    """`4:2`, or under pressure `4:2 h2o`."""
    return Setting(kv=row["kv"], policy=row["kv_policy"]).text


def comparisons(rows: Sequence[Row]) -> Iterator[dict[str, Any]]:
    """Each of our rows against the fastest row of any peer, and against our own shallowest.

    Rows under pressure are compared in `pressures`.
    """
    for row in rows:
        if not is_own(row["engine"]) or row["kv_policy"] is not None:
            continue
        beside = [other for other in rows if _same(other, row, "context", "threads")]
        peers = [other for other in beside if not is_own(other["engine"])]
        own = [other for other in rows if _same(other, row, "engine", "kv", "kv_policy", "threads")]
        shallow = min(own, key=lambda other: other["context"])
        decode = min(peers, key=lambda other: other["decode_ms"], default=None)
        fastest = min((other["decode_min_ms"] for other in peers), default=None)
        prefilled = [other for other in peers if other["prefill_tok_s"]]
        prefill = max(prefilled, key=lambda other: other["prefill_tok_s"], default=None)
        yield {
            "engine": row["engine"],
            "kv": row["kv"],
            "context": row["context"],
            "threads": row["threads"],
            "decode_ms": row["decode_ms"],
            "decode_peer": decode and f"{decode['engine']} {decode['kv']}",
            "decode_speedup": decode and decode["decode_ms"] / row["decode_ms"],
            "decode_min_speedup": fastest and fastest / row["decode_min_ms"],
            "prefill_peer": prefill and f"{prefill['engine']} {prefill['kv']}",
            "prefill_speedup": prefill and _ratio(row["prefill_tok_s"], prefill["prefill_tok_s"]),
            "growth": row["decode_ms"] / shallow["decode_ms"],
            "growth_from": shallow["context"],
        }


def passes(rows: Sequence[Row]) -> Iterator[dict[str, Any]]:
    """Each pass of each row: whole, its attention alone, and what is left, as the sum of the rest.

    `ratio` and `rest_ratio` are to the same engine's pass of one row, `ort_ratio` and
    `rest_ort_ratio` to the same pass of ours over MatMulNBits; None where that was not measured.
    """
    twins = {_place(row): row for row in rows if row["engine"] == OURS_ON_ORT}
    for row in rows:
        twin = twins.get(_place(row)) if is_own(row["engine"]) else None
        for count, whole in row["pass_ms"].items():
            rest = _rest(row, count)
            yield {
                **{key: row[key] for key in ("engine", "kv", "kv_policy", "context", "threads")},
                "rows": int(count),
                "pass_ms": whole,
                "attention_ms": row["attention_ms"].get(count),
                "rest_ms": rest,
                "ratio": _ratio(whole, row["pass_ms"].get("1")),
                "rest_ratio": _ratio(rest, _rest(row, "1")),
                "ort_ratio": twin and _ratio(whole, twin["pass_ms"].get(count)),
                "rest_ort_ratio": twin and _ratio(rest, _rest(twin, count)),
            }


def attentions(rows: Sequence[Row], layers: int) -> Iterator[dict[str, Any]]:
    """Each measurement of attention alone: `batch` sequences, of each `rows` new tokens.

    `memory_share`: its bytes of the cache, in that time, of what memory gives. `speedups` are over
    peers by their names, where the same was measured of them.
    """
    measured = [one for row in rows for one in _attentions(row, layers)]
    for one in measured:
        same = ("context", "threads", "batch", "rows")
        peers = [other for other in measured if _same(one, other, *same)]
        one["speedups"] = {
            f"{other['engine']} {other['kv']}": other["attention_ms"] / one["attention_ms"]
            for other in peers
            if is_own(one["engine"]) and not is_own(other["engine"])
        }
        yield one


def _attentions(row: Row, layers: int) -> Iterator[dict[str, Any]]:
    alone = [(1, int(rows), ms) for rows, ms in row["attention_ms"].items()]
    together = [(int(batch), 1, ms) for batch, ms in row["batch_attention_ms"].items()]
    for batch, count, ms in (*alone, *together):
        read = batch * row["kv_bytes_read"]
        yield {
            **{key: row[key] for key in ("engine", "kv", "kv_policy", "context", "threads")},
            "batch": batch,
            "rows": count,
            "attention_ms": ms,
            "layer_us": ms * 1e3 / layers,
            "bytes_read": read,
            "memory_share": read / (ms * 1e-3) / row["memory_bytes_s"],
        }


def _place(row: Row) -> tuple[Any, ...]:
    """What two rows share that differ in their engine alone."""
    return tuple(row[key] for key in ("kv", "kv_policy", "context", "threads"))


def _rest(row: Row, count: str) -> float | None:
    """Milliseconds of a pass without its attention, None where either was not measured."""
    whole, attention = row["pass_ms"].get(count), row["attention_ms"].get(count)
    return whole - attention if whole and attention else None


def pressures(rows: Sequence[Row]) -> Iterator[dict[str, Any]]:
    """Each row of a policy at work against the same cache with room for everything.

    `relief_share` of decode goes into making room, `relief_ms` at once, for a page of tokens; the
    attention of a pressed cache reads fewer bytes, so that `decode_ratio` may be below 1.
    """
    free = {
        (row["engine"], row["kv"], row["context"], row["threads"]): row
        for row in rows
        if row["kv_policy"] is None
    }
    for row in rows:
        if row["kv_policy"] is None:
            continue
        beside = free[row["engine"], row["kv"], row["context"], row["threads"]]
        yield {
            "engine": row["engine"],
            "kv": row["kv"],
            "kv_policy": row["kv_policy"],
            "context": row["context"],
            "threads": row["threads"],
            "decode_ms": row["decode_ms"],
            "free_decode_ms": beside["decode_ms"],
            "decode_ratio": row["decode_ms"] / beside["decode_ms"],
            "relief_share": row["relief_share"],
            "relief_ms": row["relief_share"] * row["decode_ms"] * PAGE_TOKENS,
            "kv_bytes": row["kv_bytes"],
            "free_kv_bytes": beside["kv_bytes"],
        }


def print_report(data: Mapping[str, Any]) -> None:
    """The tables: what was measured on, every row, and ours against the best peer."""
    machine = data["machine"]
    versions = ", ".join(f"{name} {text}" for name, text in machine["versions"].items())
    features = " ".join(machine["features"][-3:])
    memory = format_bytes(round(data["rows"][0]["memory_bytes_s"]))
    device = machine.get("device_name")
    output.print_table(
        [
            ("model", f"{data['model']}, {format_bytes(data['weights']['bytes'])} of weights"),
            ("machine", f"{machine['processor']}, {machine['cores']} cores ({features})"),
            *([("device", device)] if device else []),
            ("memory", f"{memory}/s, {'copied on the device' if device else 'read'}"),
            ("versions", f"{versions}; kernels {machine['kernels']}"),
            (
                "load",
                "unknown" if machine["load"] is None else f"{machine['load']:.1f} at the start",
            ),
        ]
    )
    output.print_data("")
    prefill = f"prefill {data['prefill_tokens']}, tok/s"
    header = ("engine", "kv", "threads", "context", "decode ms", "(min)", prefill, "ttft ms", "KV",
        "a step reads", "of memory")  # fmt: skip
    _print_table(map(_cells, data["rows"]), header)
    for row in data["rows"]:
        if row["prefill_skipped"]:
            where = f"{row['engine']} {setting_text(row)} at {row['context']}"
            output.print_note(f"no prefill of {where}: {row['prefill_skipped']}")
    _print_comparisons(data)
    _print_passes(data)
    _print_attentions(data)
    _print_pressures(data)


def _print_comparisons(data: Mapping[str, Any]) -> None:
    if not any(one["decode_peer"] for one in data["comparisons"]):
        return
    output.print_data("")
    header = (
        "ours",
        "threads",
        "context",
        "decode",
        "than",
        "(min)",
        "prefill",
        "than",
        "growth",
    )
    _print_table(map(_comparison_cells, data["comparisons"]), header)


def _print_passes(data: Mapping[str, Any]) -> None:
    """One line for each number of rows, all of one sequence."""
    if not data["passes"]:
        return
    output.print_data("")
    header = (
        "rows of one sequence", "kv", "threads", "context", "rows", "pass ms", "of 1 row",
        "attention ms", "rest ms", "of 1 row", "pass of MatMulNBits", "rest",
    )  # fmt: skip
    _print_table(map(_pass_cells, data["passes"]), header)


def _print_table(rows: Iterable[Sequence[str]], header: Sequence[str]) -> None:
    """A table without the columns that nothing was measured for."""
    columns = list(zip(header, *rows, strict=True))
    shown = [column for column in columns if set(column[1:]) != {NOTHING}]
    title, *cells = zip(*shown, strict=True)
    output.print_table(cells, header=title)


def _pass_cells(one: Row) -> tuple[str, ...]:
    return (
        one["engine"],
        setting_text(one),
        str(one["threads"]),
        str(one["context"]),
        str(one["rows"]),
        f"{one['pass_ms']:.2f}",
        _text(one["ratio"], "{:.2f} x"),
        _text(one["attention_ms"], "{:.2f}"),
        _text(one["rest_ms"], "{:.2f}"),
        _text(one["rest_ratio"], "{:.2f} x"),
        _text(one["ort_ratio"], "{:.2f} x"),
        _text(one["rest_ort_ratio"], "{:.2f} x"),
    )


def _print_attentions(data: Mapping[str, Any]) -> None:
    """One line for each number of rows, or of sequences of a row each."""
    if not data["attention"]:
        return
    output.print_data("")
    header = ("attention alone", "kv", "threads", "context", "sequences", "rows of each",
        "a layer, us", "reads", "of memory", "faster than")  # fmt: skip
    _print_table(map(_attention_cells, data["attention"]), header)


def _attention_cells(one: Row) -> tuple[str, ...]:
    speedups = (f"{name} {ratio:.2f} x" for name, ratio in one["speedups"].items())
    return (
        one["engine"],
        setting_text(one),
        str(one["threads"]),
        str(one["context"]),
        str(one["batch"]),
        str(one["rows"]),
        f"{one['layer_us']:.1f}",
        format_bytes(one["bytes_read"]),
        f"{one['memory_share']:.0%}",
        ", ".join(speedups) or NOTHING,
    )


def _print_pressures(data: Mapping[str, Any]) -> None:
    if not data["pressures"]:
        return
    output.print_data("")
    header = (
        f"in {data['kv_budget']}", "threads", "context", "decode ms", "with room", "relief",
        "at once, ms", "KV", "with room",
    )  # fmt: skip
    output.print_table(map(_pressure_cells, data["pressures"]), header=header)


def _pressure_cells(one: Row) -> tuple[str, ...]:
    return (
        setting_text(one),
        str(one["threads"]),
        str(one["context"]),
        f"{one['decode_ms']:.2f}",
        f"{one['free_decode_ms']:.2f}",
        f"{one['relief_share']:.1%}",
        f"{one['relief_ms']:.1f}",
        format_bytes(one["kv_bytes"]),
        format_bytes(one["free_kv_bytes"]),
    )


def _cells(row: Row) -> tuple[str, ...]:
    return (
        row["engine"],
        setting_text(row),
        str(row["threads"]),
        str(row["context"]),
        f"{row['decode_ms']:.2f}",
        f"{row['decode_min_ms']:.2f}",
        _text(row["prefill_tok_s"], "{:.1f}"),
        _text(row["ttft_ms"], "{:.0f}"),
        format_bytes(row["kv_bytes"]),
        format_bytes(row["weight_bytes_read"] + row["kv_bytes_read"]),
        f"{row['bandwidth_share']:.0%}",
    )


def _comparison_cells(one: Row) -> tuple[str, ...]:
    return (
        f"{one['engine']} {one['kv']}",
        str(one["threads"]),
        str(one["context"]),
        _text(one["decode_speedup"], "{:.2f} x"),
        one["decode_peer"] or NOTHING,
        _text(one["decode_min_speedup"], "{:.2f} x"),
        _text(one["prefill_speedup"], "{:.2f} x"),
        one["prefill_peer"] or NOTHING,
        f"{one['growth']:.2f} x {one['growth_from']}",
    )


def _same(one: Row, other: Row, *keys: str) -> bool:
    return all(one[key] == other[key] for key in keys)


def _ratio(above: float | None, below: float | None) -> float | None:
    return above / below if above and below else None


def _text(value: float | None, form: str) -> str:
    return NOTHING if value is None else form.format(value)


def _threads(count: int) -> str:
    return f"{count} thread" if count == 1 else f"{count} threads"
