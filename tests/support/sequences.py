"""A sequence that is driven by hand, piece by piece."""

from typing import Any

from kvq_runtime.sequence.passes import run
from kvq_runtime.sequence.sequence import TokenSequence


def advance(sequence: TokenSequence[Any], max_tokens: int | None = None) -> int:
    """Runs one piece of what is due alone; how many tokens are due after it."""
    run(sequence.advancing(max_tokens))
    return len(sequence.due())
