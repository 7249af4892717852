"""What a pass costs by its rows, learned from the passes themselves. Knows seconds, no tokens."""

from bisect import bisect_left, insort
from dataclasses import dataclass

# Least weight of the newest measurement of a row count, and passes after which an old one has none.
_NEWEST = 0.2
_STALE_PASSES = 200
# A pass disturbed by others counts as this many times what was known, at most.
_MOST_JUMP = 2.0
# What a row more than any measured is thought to cost, as a share of the pass: little, to try it.
_ROW_SHARE = 0.02
# With every pass what more rows cost more is doubted by this share, so that it is tried again;
# less often the more often it was measured, up to so often.
_DOUBT = 0.01
_MOST_TRIALS = 32
# More rows are a prompt's piece.
_MOST_ROWS = 64


@dataclass(slots=True)
class _Measured:
    """A moving average of passes of one row count, how many there were, and when the last was."""

    seconds: float
    trials: int
    last: int


class PassCosts:
    """Seconds of a pass by its number of rows: a moving average of each, a line between two."""

    def __init__(self) -> None:
        self._measured: dict[int, _Measured] = {}
        self._known: list[int] = []
        self._passes = 0

    @property
    def most_rows(self) -> int:
        """Rows that may be tried now: twice what was, as nothing is known of many more."""
        return 2 * self._known[-1] if self._known else 0

    def record(self, rows: int, seconds: float) -> None:
        """A pass of `rows` rows took so long."""
        if rows > _MOST_ROWS:
            return
        self._passes += 1
        own = self._measured.get(rows)
        if own is None:
            if self._known:
                seconds = min(seconds, _MOST_JUMP * self.seconds(rows, doubted=False))
            insort(self._known, rows)
            self._measured[rows] = _Measured(seconds, 1, self._passes)
            return
        aged = (self._passes - own.last) / _STALE_PASSES
        weight = min(1.0, max(_NEWEST, 1 / (1 + own.trials), aged))
        own.seconds += weight * (min(seconds, _MOST_JUMP * own.seconds) - own.seconds)
        own.trials = min(_MOST_TRIALS, own.trials + 1)
        own.last = self._passes

    def seconds(self, rows: int, *, doubted: bool = True) -> float:
        """What a pass of `rows` rows will take; 0 as long as no pass was measured.

        `doubted`: the less the longer ago such a pass was measured.
        """
        if not self._known:
            return 0.0
        place = bisect_left(self._known, rows)
        if place == len(self._known):
            last = self._known[-1]
            return self._at(last, doubted) * (1 + _ROW_SHARE * (rows - last))
        above = self._known[place]
        if place == 0 or above == rows:
            return self._at(above, doubted)
        below = self._known[place - 1]
        share = (rows - below) / (above - below)
        low, high = self._at(below, doubted), self._at(above, doubted)
        return low + share * (high - low)

    def _at(self, rows: int, doubted: bool) -> float:
        own = self._measured[rows]
        if not doubted:
            return own.seconds
        fewest = self._measured[self._known[0]].seconds
        doubt = min(1.0, _DOUBT * (self._passes - own.last) / own.trials)
        return own.seconds - doubt * max(0.0, own.seconds - fewest)
