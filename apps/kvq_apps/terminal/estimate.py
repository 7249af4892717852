"""Estimates the memory of a model's weights and one session's cache, as backends compute it."""

from typing import Any

from kvq.config import FLOAT_WIDTH, Budget, KvPlan, parse_budget, parse_weights
from kvq.formats import format_bytes
from kvq_apps.terminal import output
from kvq_runtime import backends
from kvq_runtime.backends import ModelFiles
from kvq_runtime.config import SessionRequest
from kvq_runtime.engine import warn_beyond_training
from kvq_runtime.machine import device, tuning

WIDTHS = ((FLOAT_WIDTH, FLOAT_WIDTH), (8, 8), (8, 4), (6, 6), (6, 4), (4, 4), (4, 2), (2, 2))
UNIT_TOKENS = 1024


def estimate(
    files: ModelFiles,
    *,
    kv_budget: str | None = None,
    threads: int | None = None,
    weights_budget: str | None = None,
    **request: Any,
) -> dict[str, Any]:
    """Returns the object of `kvq inspect --estimate --json`; takes what `Engine.session` takes.

    Without a budget the cache is as large as the whole context needs. A budget of experts bounds
    the bytes of the weights. Raises what `Engine.open` and `Engine.session` would raise.
    """
    budget = Budget() if kv_budget is None else parse_budget(kv_budget)
    threads = tuning.default_threads() if threads is None else threads
    session_request = SessionRequest(kv_budget=budget, **request)
    sizes = backends.estimate(files, session_request, threads=threads)
    warn_beyond_training(sizes.context_tokens, files.context_length)
    weight_bytes = files.weights_json()["bytes"]
    if weights_budget is not None:
        budget_bytes = parse_weights(weights_budget)
        stored = backends.bounded_experts(files, budget_bytes).stored
        weight_bytes -= max(0, stored - budget_bytes)
    free_bytes = device.probe().memory_free_bytes
    bytes_at = {
        output.kv_text(k_bits, v_bits): sizes.bytes_per_token(KvPlan(k_bits=k_bits, v_bits=v_bits))
        for k_bits, v_bits in WIDTHS
    }
    return {
        "kv": output.kv_text(sizes.plan.k_bits, sizes.plan.v_bits),
        "context": sizes.context_tokens,
        "session": output.cache_facts(sizes.session) | {"kv_budget": sizes.session.budget_bytes},
        "weight_bytes": weight_bytes,
        "kv_bytes_per_1024_tokens": _unit(sizes.bytes_per_token(sizes.plan)),
        "kv_bytes": sizes.kv_bytes,
        "total_bytes": weight_bytes + sizes.kv_bytes,
        "memory_free_bytes": free_bytes,
        "fits": weight_bytes + sizes.kv_bytes <= free_bytes if free_bytes else None,
        "kv_bytes_per_1024_tokens_at": {
            kv: _unit(num_bytes) for kv, num_bytes in bytes_at.items() if num_bytes is not None
        },
    }


def summary(report: dict[str, Any]) -> str:
    """Returns the estimate as one line: the memory it takes, and whether that fits."""
    return (
        f"It takes {format_bytes(report['total_bytes'])} of memory: "
        f"{format_bytes(report['weight_bytes'])} of weights, and a cache of "
        f"{format_bytes(report['kv_bytes'])} for {report['context']:,} tokens at "
        f"{output.bits_text(report['kv'])}. Does that fit: {_verdict(report)}."
    )


def rows(report: dict[str, Any]) -> list[tuple[str, str]]:
    """Returns the estimate as rows of a table."""
    unit = format_bytes(report["kv_bytes_per_1024_tokens"])
    other_widths = (
        f"{kv} {format_bytes(num_bytes)}"
        for kv, num_bytes in report["kv_bytes_per_1024_tokens_at"].items()
    )
    return [
        ("memory, weights", format_bytes(report["weight_bytes"])),
        ("memory, KV", f"{format_bytes(report['kv_bytes'])} for {report['context']} tokens at "
                       f"{report['kv']}"),
        ("memory, together", format_bytes(report["total_bytes"])),
        ("fits", _verdict(report)),
        ("KV per 1024 tokens", f"{unit} ({', '.join(other_widths)})"),
    ]  # fmt: skip


def _verdict(report: dict[str, Any]) -> str:
    if report["fits"] is None:
        return "unknown: this system does not say how much memory is free"
    free = f"{format_bytes(report['memory_free_bytes'])} are free"
    if report["fits"]:
        return f"yes, {free}"
    return f"no, {free}; a smaller --ctx-size or --kv-budget, or fewer bits (--kv), take less"


def _unit(num_bytes: float | None) -> int:
    return round((num_bytes or 0) * UNIT_TOKENS)
