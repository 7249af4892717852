"""Makes the prompt that asks a model for what stands between two texts."""

from collections.abc import Callable

from kvq.errors import ModelError
from kvq_models.control import FimTokens
from kvq_models.tokenizer import Tokenizer

# The most that the suffix keeps of a prompt that does not fit.
SUFFIX_SHARE = 0.25
# While a text is typed, the beginning of the prefix is cut in this many steps of the room.
FRONT_STEPS = 8
# Text farther from the gap than this is not encoded; a token of source text has 3 to 4 characters.
CHARACTERS_PER_TOKEN = 16


def infill_tokens(tokenizer: Tokenizer) -> FimTokens:
    """Returns the model's fill-in-the-middle tokens. Raises `ModelError` if it has none."""
    if tokenizer.fim is None:
        raise ModelError(
            "this model has no fill-in-the-middle tokens (such as <|fim_prefix|>), so it can only "
            "continue a text; choose a code model that has them"
        )
    return tokenizer.fim


def fixed_tokens(tokenizer: Tokenizer) -> int:
    """Returns how many first tokens all prompts of `infill_prompt` share.

    A cache should not have more sinks, since an edit that touches one recomputes all that follows.
    """
    return len(tokenizer.control.start) + 1 + infill_tokens(tokenizer).suffix_first


def infill_prompt(
    tokenizer: Tokenizer,
    prefix: str,
    suffix: str,
    max_tokens: int,
    encode: Callable[[str], list[int]] | None = None,
    *,
    step: int = 1,
    suffix_first: bool | None = None,
) -> list[int]:
    """Returns ids of `prefix` and `suffix` in the model's order, after which the middle follows.

    The order is prefix, suffix, middle; or suffix, middle, prefix, which the middle then continues.
    Source: Bavarian et al., arXiv 2207.14255.

    Args:
        tokenizer: The model's tokenizer.
        prefix: The text before the gap.
        suffix: The text after the gap.
        max_tokens: The most ids. A longer prompt loses the beginning of the prefix and the end of
            the suffix, so that the text near the gap stays.
        encode: Encodes a text as the tokenizer does; None: the tokenizer.
        step: The prefix loses a multiple of this many tokens, so that its beginning stays the same
            while somebody types.
        suffix_first: The order; None: the model's own.

    Raises:
        ModelError: The model has no fill-in-the-middle tokens, or `max_tokens` leaves no room for
            text.
    """
    fim = infill_tokens(tokenizer)
    start = tokenizer.control.start
    room = max_tokens - len(start) - 3
    if room < 1:
        raise ModelError(
            f"an infilling prompt of {max_tokens} tokens has no room for text; "
            f"give it {len(start) + 4} or more"
        )
    near = room * CHARACTERS_PER_TOKEN
    encode = tokenizer.encode if encode is None else encode
    before, after = encode(prefix[-near:]), encode(suffix[:near])
    after = after[: max(int(room * SUFFIX_SHARE), room - len(before))]
    too_many = max(0, len(before) - (room - len(after)))
    before = before[-(-too_many // step) * step :]
    if fim.suffix_first if suffix_first is None else suffix_first:
        return [*start, fim.prefix, fim.suffix, *after, fim.middle, *before]
    return [*start, fim.prefix, *before, fim.suffix, *after, fim.middle]
