"""The line that is always there: what the engine does, how fast, in how much context and KV."""

from kvq.formats import format_bytes
from kvq_apps import output
from kvq_apps.chat.client import Facts
from kvq_apps.chat.messages import ReplyStats

WARN_SHARE = 0.9
_SEPARATOR = "  "


def meter_line(
    facts: Facts | None, stats: ReplyStats, activity: str, width: int, detail: str = "full"
) -> str:
    """As much as `width` cells hold, the most telling first; `detail` is full, short or off.

    That text was given up is told whatever the detail.
    """
    parts = [activity, evicted_part(stats)]
    if facts is not None and detail == "short":
        parts += [kv_part(facts, stats), predicted_part(stats), context_part(facts, stats)]
    elif facts is not None and detail == "full":
        parts += [
            kv_part(facts, stats),
            predicted_part(stats),
            f"{stats.decode_tok_s:.1f} tok/s" if stats.decode_tok_s else "",
            drafts_part(stats),
            context_part(facts, stats),
            bits_part(stats),
            f"first {stats.ttft_ms:.0f} ms" if stats.ttft_ms else "",
            cached_part(stats),
            facts.model,
        ]
    line = ""
    for part in filter(None, parts):
        longer = f"{line}{_SEPARATOR}{part}" if line else part
        if len(longer) <= width:
            line = longer
    return line or activity[:width]


def kv_part(facts: Facts, stats: ReplyStats) -> str:
    """Bytes held now against the budget, the plan's widths: `KV 1.2 MiB/64.0 MiB K4V2`.

    What a model that reads prompts holds beside the budget follows: `+ 3.0 MiB auxiliary`.
    """
    widths = ""
    if facts.k_bits:
        text = output.kv_text(facts.k_bits, facts.v_bits)
        widths = " fp16" if text == "fp" else f" K{facts.k_bits}V{facts.v_bits}"
    if stats.auxiliary_bytes:
        widths += f" + {format_bytes(stats.auxiliary_bytes)} auxiliary"
    if not facts.kv_budget:
        return f"KV {format_bytes(stats.kv_bytes)}{widths}" if stats.kv_bytes else ""
    return f"KV {format_bytes(stats.kv_bytes)}/{format_bytes(facts.kv_budget)}{widths}"


def evicted_part(stats: ReplyStats) -> str:
    """The mark of a text that the budget no longer holds whole: `! 12 % given up`."""
    return f"! {output.share_text(stats.evicted_share)} given up" if stats.evicted_share else ""


def predicted_part(stats: ReplyStats) -> str:
    """What was not computed, if anything: `predicted 480`."""
    return f"predicted {stats.predicted_tokens}" if stats.predicted_tokens else ""


def bits_part(stats: ReplyStats) -> str:
    """Mean widths of what is held, the newest tokens at 16: `bits 6.1:4.5`."""
    if stats.mean_k_bits == stats.mean_v_bits == 16:
        return "all in fp16"
    return f"bits {stats.mean_k_bits:.1f}:{stats.mean_v_bits:.1f}" if stats.mean_k_bits else ""


def drafts_part(stats: ReplyStats) -> str:
    """Guesses that were right of all, and tokens a pass: `drafts 12/15, 3.4 a pass`."""
    right, guessed = stats.accepted_tokens, stats.drafted_tokens
    return f"drafts {right}/{guessed}, {stats.tokens_per_pass:.1f} a pass" if guessed else ""


def cached_part(stats: ReplyStats) -> str:
    """Of the last prompt what the cache held and what it did not: `cached 40 encoded 12`."""
    cached, encoded = stats.cached_tokens, stats.encoded_tokens
    return f"cached {cached} encoded {encoded}" if stats.prompt_tokens else ""


def context_part(facts: Facts, stats: ReplyStats) -> str:
    """Tokens in the context, of how many: `context 1234/8192 15%, 2100 held at 4:2`.

    The budget holds so many at the plan's widths; that is left out where it holds all.
    """
    if not facts.context_tokens:
        return f"context {stats.context_tokens}"
    share = stats.context_tokens / facts.context_tokens
    text = f"context {stats.context_tokens}/{facts.context_tokens} {share:.0%}"
    if not 0 < facts.budget_tokens < facts.context_tokens:
        return text
    return f"{text}, {facts.budget_tokens} held at {output.kv_text(facts.k_bits, facts.v_bits)}"


def context_share(facts: Facts, stats: ReplyStats) -> float:
    """How full the context is; 0 when its size is not known."""
    return stats.context_tokens / facts.context_tokens if facts.context_tokens else 0.0


def why_cut(facts: Facts, stats: ReplyStats, max_tokens: int | None) -> str:
    """Why a reply of at most `max_tokens` ended before its own end."""
    if max_tokens is None or context_share(facts, stats) >= 1:
        return "the context is full"
    return f"the reply was cut at its limit of {max_tokens} tokens"
