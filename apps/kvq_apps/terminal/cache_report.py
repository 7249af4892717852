"""Describes what the cache of a session holds, in one sentence that all commands use.

The facts are fields of every report: `kv` and `full_kv` are widths as `--kv` writes them. Tokens
begin at `kv`, and old ones go down to `full_kv` when the budget is full. `budget_tokens` and
`full_tokens` are how many tokens of the `context` fit at each.
"""

from collections.abc import Mapping
from typing import Any

from kvq.config import parse_kv
from kvq_apps.terminal.output import kv_text
from kvq_runtime.config import SessionConfig


def facts(config: SessionConfig) -> dict[str, Any]:
    """Returns the facts of a session."""
    return {
        "kv": kv_text(config.plan.k_bits, config.plan.v_bits),
        "context": config.context_tokens,
        "budget_tokens": config.budget_tokens,
        "full_kv": kv_text(*config.full_bits),
        "full_tokens": config.full_tokens,
    }


def sentence(report: Mapping[str, Any]) -> str:
    """Says how many tokens fit at which bits, now and with a full budget; follows "holds"."""
    context, kv, full_kv = report["context"], report["kv"], report["full_kv"]
    if report["budget_tokens"] >= context:
        return f"all {context:,} tokens of its context at {bits_text(kv)}"
    holds = f"{report['budget_tokens']:,} of {context:,} tokens at {bits_text(kv)}"
    fit = report["full_tokens"]
    if full_kv == kv or fit <= report["budget_tokens"]:
        return f"{holds}; when it is full, older ones are given up"
    last = "all fit" if fit >= context else f"{fit:,} fit; of longer texts some are given up"
    return f"{holds}; when it is full, older ones go down to {bits_text(full_kv)}, at which {last}"


def bits_text(kv: str) -> str:
    """Returns widths in words: `4 bits`, or `4 bits for keys and 2 for values`."""
    k_bits, v_bits = parse_kv(kv)
    return (
        f"{k_bits} bits" if k_bits == v_bits else f"{k_bits} bits for keys and {v_bits} for values"
    )
