"""Describes what an answer cost: a summary of two lines, and details."""

from collections.abc import Iterator, Mapping
from typing import Any

from kvq.config import FLOAT_WIDTH
from kvq.formats import format_bytes
from kvq_apps.terminal import cache_report, output

Report = Mapping[str, Any]


def summary(report: Report) -> str:
    """Says in two lines how fast the answer was and what the cache holds."""
    return f"{_speed(report)}\n{_cache(report)}"


def details(report: Report) -> list[tuple[str, str]]:
    """Returns every other number, as rows of a table."""
    return [(name, text) for name, text in _details(report) if text]


def _speed(report: Report) -> str:
    """Says `42 tokens in 1.2 s (35 a second), the first after 0.3 s; the prompt's 9 ...`."""
    count, rate = report["new_tokens"], report["decode_tok_s"]
    first_s = report["ttft_ms"] / 1000
    total_s = first_s + (max(0, count - 1) / rate if rate else 0)
    speed = f" ({rate:.0f} a second)" if rate else ""
    prompt = f"the prompt's {report['prompt_tokens']:,}"
    if report["prefill_tok_s"]:
        prompt += f" read at {report['prefill_tok_s']:,.0f} a second"
    return (
        f"{count:,} tokens in {output.duration(total_s)}{speed}, the first after "
        f"{output.duration(first_s)}; {prompt}."
    )


def _cache(report: Report) -> str:
    """Says what the cache uses of its budget, what that holds, and what was kept of the text."""
    outside = report["kv_offloaded_bytes"]
    tier = f" ({format_bytes(outside)} of it in the second tier)" if outside else ""
    return (
        f"Cache: {format_bytes(report['kv_bytes'])}{tier} of {format_bytes(report['kv_budget'])}, "
        f"which holds {cache_report.sentence(report)}. {_now(report)}"
    )


def _now(report: Report) -> str:
    """Says at how many bits the text is held now, and how much of it was given up."""
    bits = report["mean_k_bits"], report["mean_v_bits"]
    share = report["evicted_share"]
    lost = f"{output.share_text(share)} of the text given up" if share else "none given up"
    if bits == (FLOAT_WIDTH, FLOAT_WIDTH):
        return f"This text: still at 16 bits, {lost}."
    if not any(bits):
        return f"This text: {lost}."
    return f"This text: {_mean_bits(*bits)} on average, {lost}."


def _mean_bits(k_bits: float, v_bits: float) -> str:
    keys, values = f"{k_bits:.1f}", f"{v_bits:.1f}"
    return f"{keys} bits" if keys == values else f"{keys} bits for keys and {values} for values"


def _details(report: Report) -> Iterator[tuple[str, str]]:
    yield "cache per token", f"{report['bytes_per_token']:.0f} bytes"
    yield "memory read", f"{report['bandwidth_gb_s']:.1f} GB a second while writing"
    if report["drafted_tokens"]:
        yield (
            "guesses",
            f"{report['accepted_tokens']} of {report['drafted_tokens']} tokens guessed ahead were "
            f"right: {report['tokens_per_round']:.2f} tokens each time the model ran; guessing "
            f"took {report['draft_ms']:.1f} ms",
        )
    if report["kv_read_share"] < 1:
        yield "cache read", f"{report['kv_read_share']:.0%} of what could be"
    if report["predicted_tokens"]:
        yield "predicted", f"{report['predicted_tokens']} tokens of the prompt were not computed"
    if report["kv_offloaded_bytes"]:
        yield "cache in the second tier", format_bytes(report["kv_offloaded_bytes"])
    yield "experts", output.experts_text(report["experts"])
    if report["joules"] is not None:
        yield "energy", f"{report['joules']:.1f} J, other programs' work included"
