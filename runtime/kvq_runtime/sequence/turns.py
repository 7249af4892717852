"""The ends of a chat's turns, which are places to go back to."""

from collections.abc import Callable, Collection, Sequence
from itertools import islice

# The ends of so many of a chat's newest turns are marked, beside the end of the first turn.
MARKED_TURNS = 3


def end_of_piece(
    tokens: Sequence[int],
    start: int,
    stop: int,
    ends: Collection[int],
    mark: Callable[[int], None],
) -> int:
    """Returns where a piece of tokens `start` to `stop` ends, so that a cache can go back there.

    These places are the end of a chat's first turn, often a system prompt that other chats share,
    and the ends of its newest turns: an answer may be written again or shortened, and messages may
    be changed. A turn ends where an answer would, with one of `ends`. `mark` is that of a cache
    which keeps places, see `SequenceCache`.
    """
    last = len(tokens) - 1
    if stop - start < 2 or not ends:
        return stop
    first = next((at + 1 for at in range(last) if tokens[at] in ends), None)
    if first is None:
        return stop
    backwards = (at + 1 for at in range(last - 1, -1, -1) if tokens[at] in ends)
    places = [place for place in islice(backwards, MARKED_TURNS) if place > start]
    # The place that is marked last is kept longest. That is the end of the first turn.
    for place in (*reversed(places), first):
        mark(place)
    return min(place for place in (first, *places, stop) if place > start)
