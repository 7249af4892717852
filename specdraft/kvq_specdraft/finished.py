"""A bounded store of finished answers in which drafters look; it exists only if asked for."""

from collections.abc import Sequence
from functools import cache
from threading import Lock

from kvq_specdraft.repeats import Repeats

# Separates two answers.
_SEPARATOR = -1


class FinishedAnswers:
    """Stores the newest finished answers, and finds places in them that match the end of a text.

    Any thread may use it. An answer that was found may be gone when its tokens are read; then
    others come, which is a wrong guess.

    Args:
        most_tokens: The most tokens of all answers together.
        least: The fewest tokens of a match.
    """

    def __init__(self, most_tokens: int, least: int) -> None:
        self._most = most_tokens
        self._repeats = Repeats(least)
        self._lock = Lock()

    def __len__(self) -> int:
        return len(self._repeats)

    def add(self, answer: Sequence[int]) -> None:
        """Stores `answer`, and removes the older half of all tokens if there are too many."""
        if not answer:
            return
        with self._lock:
            self._repeats.follow(len(self._repeats), [*answer[-self._most // 2 :], _SEPARATOR])
            if len(self._repeats) > self._most:
                newest = self._repeats.tail(self._most // 2)
                self._repeats.follow(0, newest)

    def find(self, tail: Sequence[int], longest: int, most: int) -> list[tuple[int, int]]:
        """Returns ends of matches with the end of `tail`, newest first, and the length of each."""
        with self._lock:
            length = len(self._repeats)
            self._repeats.follow(length, tail)
            matches = list(self._repeats.find(longest, most))
            self._repeats.follow(length, ())
        return [(end, match_length) for end, match_length in matches if end < length]

    def after(self, end: int, place: int) -> int:
        """Returns the token `place` tokens after `end`; one below 0 where the answer is over."""
        with self._lock:
            return self._repeats.at(end + place, otherwise=_SEPARATOR)


@cache
def of_this_process(most_tokens: int, least: int) -> FinishedAnswers:
    """Returns the one store of this size, which all drafters of the process share."""
    return FinishedAnswers(most_tokens, least)
