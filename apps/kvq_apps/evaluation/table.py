"""One model at several KV widths: the cost of each in bytes and in quality."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from kvq.formats import format_bytes
from kvq_apps.evaluation.cache_setting import UNQUANTIZED, CacheSetting
from kvq_apps.evaluation.measurement import Measurement
from kvq_apps.evaluation.tasks import Material
from kvq_apps.terminal import output
from kvq_apps.terminal.output import ShowProgress
from kvq_runtime.session.session import Session

SETTINGS = ("fp", "8:8", "8:4", "6:6", "6:4", "4:4", "4:2", "2:4", "2:2")
TASKS = ("kld", "passkey", "retrieval")


def measure_table(
    open_session: Callable[..., Session[Any]],
    material: Material,
    settings: Sequence[CacheSetting],
    context_tokens: int,
    progress: ShowProgress,
) -> list[dict[str, Any]]:
    """Measures one row per setting, each with room for the whole context. Raises `BudgetError`."""
    rows: list[dict[str, Any]] = [{"kv": setting.kv} for setting in settings]
    sessions = [setting.opener(open_session, context_tokens) for setting in settings]
    exact = UNQUANTIZED.opener(open_session, context_tokens)
    for number, task in enumerate(TASKS):

        def shown(done: int, total: int, task: str = task, before: int = number) -> None:
            progress(before + done / total, len(TASKS), task)

        outcomes = material.measure_all(task, sessions, exact, shown)
        for row, measured in zip(rows, outcomes, strict=True):
            if not isinstance(measured, Measurement):
                raise measured
            row.update(_columns(task, measured))
    return rows


def _columns(task: str, measured: Measurement) -> dict[str, Any]:
    details = measured.details
    if task != "kld":
        return {
            task: measured.value,
            f"{task}_nats": details["answer_nats"],
            f"{task}_rows": details["rows"],
        }
    return {
        "bytes_per_token": measured.bytes_per_token,
        "kv_bytes": measured.kv_bytes,
        "kld": measured.value,
        "kld_99": details["kld_99"],
        "same_top_1": details["same_top_1"],
        "perplexity": details["perplexity"],
    }


def print_table(report: Mapping[str, Any]) -> None:
    """Prints what was measured on, then one line per setting."""
    output.print_table(
        (name, report[name]) for name in ("model", "backend", "context", "windows", "questions")
    )
    output.print_data("")
    header = (
        "kv", "bytes/token", "held", "KLD", "KLD 99 %", "top 1", "perplexity",
        "passkey", "nats", "retrieval", "nats",
    )  # fmt: skip
    output.print_table(map(_cells, report["rows"]), header=header)


def _cells(row: Mapping[str, Any]) -> tuple[str, ...]:
    return (
        row["kv"],
        f"{row['bytes_per_token']:.0f}",
        format_bytes(row["kv_bytes"]),
        f"{row['kld']:.5f}",
        f"{row['kld_99']:.5f}",
        f"{row['same_top_1']:.2%}",
        f"{row['perplexity']:.4g}",
        f"{row['passkey']:.1%}",
        f"{row['passkey_nats']:.3f}",
        f"{row['retrieval']:.1%}",
        f"{row['retrieval_nats']:.3f}",
    )
