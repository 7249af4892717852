"""Where a chat's turns end, which are places to go back to. Knows no cache."""

from collections.abc import Callable, Collection, Sequence
from itertools import islice

# Of so many of a chat's newest turns the ends are places to go back to, beside that of the first.
MARKED_TURNS = 3


def end_of_piece(
    tokens: Sequence[int],
    start: int,
    stop: int,
    ends: Collection[int],
    mark: Callable[[int], None],
) -> int:
    """Where a piece of tokens `start` to `stop` ends, so that it can be gone back there.

    Behind the first turn of a chat, often a system prompt, which other chats begin with too;
    and behind the newest, before an answer that is written again, or shortened when it is told,
    and before messages that are changed. A turn ends where an answer would, with one of `ends`.
    `mark` is that of a cache which keeps places, see `SequenceCache`.
    """
    last = len(tokens) - 1
    if stop - start < 2 or not ends:
        return stop
    first = next((at + 1 for at in range(last) if tokens[at] in ends), None)
    if first is None:
        return stop
    backwards = (at + 1 for at in range(last - 1, -1, -1) if tokens[at] in ends)
    places = [place for place in islice(backwards, MARKED_TURNS) if place > start]
    # The one that is marked last is kept longest: here it is used once more.
    for place in (*reversed(places), first):
        mark(place)
    return min(place for place in (first, *places, stop) if place > start)
