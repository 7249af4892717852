"""What a model takes in memory, told from its files alone: weights, and the cache of one session.

The backends' own sizing is asked, so a session opened with the same settings gets these bytes.
"""

from typing import Any

from kvq.config import FLOAT_WIDTH, Budget, KvPlan, parse_budget, parse_weights
from kvq.formats import format_bytes
from kvq_apps import output
from kvq_runtime import backends, device, tuning
from kvq_runtime.backends import ModelFiles
from kvq_runtime.config import SessionRequest
from kvq_runtime.engine import warn_beyond_training

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
    """The object of `kvq inspect --estimate --json`; takes what `Engine.session` does.

    Without a budget the session gives up none of its tokens, by default the model's context. Of
    weights whose experts have a budget no more of them counts. Raises what `Engine.open` and
    `Engine.session` would.
    """
    budget = Budget() if kv_budget is None else parse_budget(kv_budget)
    threads = tuning.default_threads() if threads is None else threads
    asked = SessionRequest(kv_budget=budget, **request)
    held = backends.estimate(files, asked, threads=threads)
    warn_beyond_training(held.context_tokens, files.context_length)
    weight_bytes = files.weights_json()["bytes"]
    if weights_budget is not None:
        budget_bytes = parse_weights(weights_budget)
        stored = backends.bounded_experts(files, budget_bytes).stored
        weight_bytes -= max(0, stored - budget_bytes)
    free_bytes = device.probe().memory_free_bytes
    at = {
        output.kv_text(k_bits, v_bits): held.bytes_per_token(KvPlan(k_bits=k_bits, v_bits=v_bits))
        for k_bits, v_bits in WIDTHS
    }
    return {
        "kv": output.kv_text(held.plan.k_bits, held.plan.v_bits),
        "context": held.context_tokens,
        "weight_bytes": weight_bytes,
        "kv_bytes_per_1024_tokens": _unit(held.bytes_per_token(held.plan)),
        "kv_bytes": held.kv_bytes,
        "total_bytes": weight_bytes + held.kv_bytes,
        "memory_free_bytes": free_bytes,
        "fits": weight_bytes + held.kv_bytes <= free_bytes if free_bytes else None,
        "kv_bytes_per_1024_tokens_at": {
            kv: _unit(num_bytes) for kv, num_bytes in at.items() if num_bytes is not None
        },
    }


def rows(found: dict[str, Any]) -> list[tuple[str, str]]:
    """The estimate as table rows."""
    unit = format_bytes(found["kv_bytes_per_1024_tokens"])
    others = (
        f"{kv} {format_bytes(num_bytes)}"
        for kv, num_bytes in found["kv_bytes_per_1024_tokens_at"].items()
    )
    return [
        ("memory, weights", format_bytes(found["weight_bytes"])),
        ("memory, KV", f"{format_bytes(found['kv_bytes'])} for {found['context']} tokens at "
                       f"{found['kv']}"),
        ("memory, together", format_bytes(found["total_bytes"])),
        ("fits", _verdict(found)),
        ("KV per 1024 tokens", f"{unit} ({', '.join(others)})"),
    ]  # fmt: skip


def _verdict(found: dict[str, Any]) -> str:
    if found["fits"] is None:
        return "unknown: this system does not say how much memory is free"
    free = f"{format_bytes(found['memory_free_bytes'])} are free"
    if found["fits"]:
        return f"yes, {free}"
    return f"no, {free}; a smaller --ctx-size or --kv-budget, or fewer bits (--kv), take less"


def _unit(num_bytes: float | None) -> int:
    return round((num_bytes or 0) * UNIT_TOKENS)
