"""Fill-in-the-middle prompts with other files in front. Knows texts and tokens, no request."""

from collections.abc import Sequence

from kvq.errors import ModelError
from kvq_apps.serve.errors import RequestError
from kvq_models.infilling import (
    CHARACTERS_PER_TOKEN,
    FRONT_STEPS,
    infill_prompt,
    infill_tokens,
)
from kvq_models.tokenizer import Tokenizer

_NO_LIMIT = 1 << 40


def whole_prompt(
    tokenizer: Tokenizer, model: str, prefix: str, suffix: str, most: int
) -> list[int]:
    """Ids of the whole of both texts; more than `most` if there are more, perhaps not all.

    Raises `RequestError` naming a model that cannot infill.
    """
    try:
        infill_tokens(tokenizer)
        for text in (prefix, suffix):
            if len(text) > CHARACTERS_PER_TOKEN * most:
                ids = tokenizer.encode(text, most=most)
                if len(ids) > most:
                    return ids
        return infill_prompt(tokenizer, prefix, suffix, _NO_LIMIT)
    except ModelError as error:
        raise RequestError(f"{model}: {error}", param="suffix", code="no_infilling") from error


def fitted_prompt(
    tokenizer: Tokenizer,
    model: str,
    prefix: str,
    suffix: str,
    extra: Sequence[tuple[str, str]],
    room: int,
) -> tuple[list[int], bool]:
    """Ids of at most `room` tokens, and whether something was left out for it.

    `extra` are (file name, text), the least useful first: these go first when room is short, then
    the far ends of prefix and suffix, the prefix in steps, so that its beginning stays where it is
    while somebody types. The newest extra stands next to the text around the gap.
    """
    ids = whole_prompt(tokenizer, model, prefix, suffix, room)
    if len(ids) > room:
        step = max(1, room // FRONT_STEPS)
        return infill_prompt(tokenizer, prefix, suffix, room, step=step), True
    room -= len(ids)
    chosen: list[list[int]] = []
    for name, text in reversed(extra):
        chunk = _headed(tokenizer, name, text, room)
        if len(chunk) > room:
            break
        room -= len(chunk)
        chosen.append(chunk)
    start = len(tokenizer.control.start)
    others = [token for chunk in reversed(chosen) for token in chunk]
    return [*ids[:start], *others, *ids[start:]], len(chosen) < len(extra)


def stop_ids(tokenizer: Tokenizer) -> frozenset[int]:
    """What ends an infilled text: the model's ends, and any infilling token."""
    return frozenset((*tokenizer.eos_ids, *infill_tokens(tokenizer).ids()))


def _headed(tokenizer: Tokenizer, name: str, text: str, most: int) -> list[int]:
    """One other file; after a separator token its name stands on a line of its own."""
    separator = infill_tokens(tokenizer).file
    if separator is None:
        return tokenizer.encode(f"{text}\n\n", most=most)
    return [separator, *tokenizer.encode(f"{name}\n{text}", most=most)]
