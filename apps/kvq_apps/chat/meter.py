"""The line below the prompt: the engine's activity, its speed, the context and the KV cache."""

from kvq.formats import format_bytes
from kvq_apps.chat.client import Facts
from kvq_apps.chat.messages import ReplyStats
from kvq_apps.terminal import output

WARN_SHARE = 0.9


def meter_line(
    facts: Facts | None, stats: ReplyStats, activity: str, width: int, detail: str = "full"
) -> str:
    """Returns what fits into `width` cells, the most important first.

    `detail` is full, short or off. The share of the text that was given up is always shown.
    """
    parts = [activity]
    if stats.evicted_share:
        parts.append(f"! {output.share_text(stats.evicted_share)} given up")
    if facts is not None and detail != "off":
        predicted = f"predicted {stats.predicted_tokens}" if stats.predicted_tokens else ""
        context = context_part(facts, stats)
        parts += [kv_part(facts, stats), predicted]
        parts += [context] if detail == "short" else [
            f"{stats.decode_tok_s:.1f} tok/s" if stats.decode_tok_s else "",
            _drafts_part(stats),
            context,
            _bits_part(stats),
            f"first {stats.ttft_ms:.0f} ms" if stats.ttft_ms else "",
            f"cached {stats.cached_tokens} encoded {stats.encoded_tokens}"
            if stats.prompt_tokens else "",
            facts.model,
        ]  # fmt: skip
    line = ""
    for part in filter(None, parts):
        longer = f"{line}  {part}" if line else part
        if len(longer) <= width:
            line = longer
    return line or activity[:width]


def kv_part(facts: Facts, stats: ReplyStats) -> str:
    """Shows bytes, budget and widths: `KV 1.2 MiB/64.0 MiB K4V2 + 3.0 MiB auxiliary`."""
    widths = ""
    if facts.k_bits:
        text = output.kv_text(facts.k_bits, facts.v_bits)
        widths = " fp16" if text == "fp" else f" K{facts.k_bits}V{facts.v_bits}"
    if stats.auxiliary_bytes:
        widths += f" + {format_bytes(stats.auxiliary_bytes)} auxiliary"
    if not facts.kv_budget:
        return f"KV {format_bytes(stats.kv_bytes)}{widths}" if stats.kv_bytes else ""
    return f"KV {format_bytes(stats.kv_bytes)}/{format_bytes(facts.kv_budget)}{widths}"


def _bits_part(stats: ReplyStats) -> str:
    """Shows the mean widths of the cache, where the newest tokens have 16 bits: `bits 6.1:4.5`."""
    if stats.mean_k_bits == stats.mean_v_bits == 16:
        return "all in fp16"
    return f"bits {stats.mean_k_bits:.1f}:{stats.mean_v_bits:.1f}" if stats.mean_k_bits else ""


def _drafts_part(stats: ReplyStats) -> str:
    """Shows right and all guesses, and tokens per pass: `drafts 12/15, 3.4 a pass`."""
    right, guessed = stats.accepted_tokens, stats.drafted_tokens
    return f"drafts {right}/{guessed}, {stats.tokens_per_pass:.1f} a pass" if guessed else ""


def context_part(facts: Facts, stats: ReplyStats) -> str:
    """Shows how full the context is: `context 1234/8192 15%, 2100 held at 4:2`.

    The last part is what the budget holds at these widths; it is left out where all fits.
    """
    if not facts.context_tokens:
        return f"context {stats.context_tokens}"
    share = context_share(facts, stats)
    text = f"context {stats.context_tokens}/{facts.context_tokens} {share:.0%}"
    if not 0 < facts.budget_tokens < facts.context_tokens:
        return text
    return f"{text}, {facts.budget_tokens} held at {output.kv_text(facts.k_bits, facts.v_bits)}"


def context_share(facts: Facts, stats: ReplyStats) -> float:
    """Returns the used share of the context; 0 when its size is not known."""
    return stats.context_tokens / facts.context_tokens if facts.context_tokens else 0.0


def why_cut(facts: Facts, stats: ReplyStats, max_tokens: int | None) -> str:
    """Says why a reply of at most `max_tokens` ended before its own end."""
    if max_tokens is None or context_share(facts, stats) >= 1:
        return "the context is full"
    return f"the reply was cut at its limit of {max_tokens} tokens"
