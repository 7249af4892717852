"""Answers that were written, kept for others to look up: a bounded store, and only if asked for."""

from collections.abc import Sequence
from functools import cache
from threading import Lock

from kvq_specdraft.repeats import Repeats

# Stands between two answers.
_BETWEEN = -1


class Finished:
    """The newest finished answers, `most_tokens` in all, and where they say what a text ends with.

    Any thread may ask; an answer found may be gone when its tokens are asked for, which then are
    another one's: a guess that is wrong.
    """

    def __init__(self, most_tokens: int, least: int) -> None:
        self._most = most_tokens
        self._repeats = Repeats(least)
        self._lock = Lock()

    def __len__(self) -> int:
        return len(self._repeats)

    def add(self, answer: Sequence[int]) -> None:
        """Keeps `answer`; the older half of all goes where there are too many."""
        if not answer:
            return
        with self._lock:
            self._repeats.follow(len(self._repeats), [*answer[-self._most // 2 :], _BETWEEN])
            if len(self._repeats) > self._most:
                newest = self._repeats.tail(self._most // 2)
                self._repeats.follow(0, newest)

    def find(self, tail: Sequence[int], longest: int, most: int) -> list[tuple[int, int]]:
        """Ends of runs like the end of `tail`, newest first, and how long each is."""
        with self._lock:
            length = len(self._repeats)
            self._repeats.follow(length, tail)
            found = list(self._repeats.find(longest, most))
            self._repeats.follow(length, ())
        return [(end, own) for end, own in found if end < length]

    def after(self, end: int, place: int) -> int:
        """The token `place` tokens after `end`; one below 0 where the answer is over."""
        with self._lock:
            return self._repeats.at(end + place, otherwise=_BETWEEN)


@cache
def of_this_process(most_tokens: int, least: int) -> Finished:
    """The one store of this size, shared by all drafters that ask for it."""
    return Finished(most_tokens, least)
