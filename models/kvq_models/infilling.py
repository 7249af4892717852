"""The prompt that asks a model for what stands between two texts. Knows no file and no cursor."""

from collections.abc import Callable

from kvq.errors import ModelError
from kvq_models.control import FimTokens
from kvq_models.tokenizer import Tokenizer

# Of a prompt that does not fit, what comes after the gap keeps this share at most.
SUFFIX_SHARE = 0.25
# For a text that is being typed the beginning of the prefix goes in so many steps of the room.
FRONT_STEPS = 8
# A token of source text is 3 to 4 characters: what lies farther from the gap is not even encoded.
CHARACTERS_PER_TOKEN = 16


def infill_tokens(tokenizer: Tokenizer) -> FimTokens:
    """The model's fill-in-the-middle tokens. Raises `ModelError` for a model without them."""
    if tokenizer.fim is None:
        raise ModelError(
            "this model has no fill-in-the-middle tokens (such as <|fim_prefix|>), so it can only "
            "continue a text; choose a code model that has them"
        )
    return tokenizer.fim


def fixed_tokens(tokenizer: Tokenizer) -> int:
    """How many tokens every prompt of `infill_prompt` begins with, whatever the texts are.

    A cache should have no more sinks: an edit that touches one computes all that follows again.
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
    """At most `max_tokens` ids of `prefix` and `suffix` in the model's order, the middle to follow.

    Prefix, suffix, middle; or suffix, middle, prefix, which the middle then simply goes on from.
    What is too long loses the beginning of the prefix and the end of the suffix: the text near
    the gap stays. The prefix loses a multiple of `step` tokens, so that its beginning stays where
    it is while somebody types. `encode` encodes a text as the tokenizer does, which is the default;
    `suffix_first` chooses an order other than the model's own. Source: Bavarian et al., arXiv
    2207.14255. Raises `ModelError` for a model without fill-in-the-middle tokens, or when
    `max_tokens` leaves no room for text.
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
