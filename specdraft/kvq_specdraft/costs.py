"""What a pass costs by its rows, learned from the passes themselves. Knows seconds, no tokens."""

from bisect import bisect_left, insort

# Weight of the newest measurement of a row count.
_NEWEST = 0.2
# A pass disturbed by others counts as this many times what was known, at most.
_MOST_JUMP = 2.0
# What a row more than any measured is thought to cost, as a share of the pass: little, to try it.
_ROW_SHARE = 0.02
# With every pass what more rows cost more is forgotten by this share, so that it is tried again;
# less often the more often it was measured, up to so often.
_FORGET = 0.01
_MOST_TRIALS = 32
# More rows are a prompt's piece.
_MOST_ROWS = 64


class PassCosts:
    """Seconds of a pass by its number of rows: a moving average of each, a line between two."""

    def __init__(self) -> None:
        self._seconds: dict[int, float] = {}
        self._trials: dict[int, int] = {}
        self._known: list[int] = []

    def record(self, rows: int, seconds: float) -> None:
        """A pass of `rows` rows took so long."""
        if rows > _MOST_ROWS:
            return
        before = self._seconds.get(rows)
        if before is None:
            insort(self._known, rows)
            self._seconds[rows] = seconds
        else:
            self._seconds[rows] += _NEWEST * (min(seconds, _MOST_JUMP * before) - before)
        self._trials[rows] = min(_MOST_TRIALS, self._trials.get(rows, 0) + 1)
        own = self._seconds[rows]
        for more in self._known[bisect_left(self._known, rows) + 1 :]:
            share = _FORGET / self._trials[more]
            self._seconds[more] -= share * max(0.0, self._seconds[more] - own)

    def seconds(self, rows: int) -> float:
        """What a pass of `rows` rows will take; 0 as long as no pass was measured."""
        if not self._known:
            return 0.0
        place = bisect_left(self._known, rows)
        if place == len(self._known):
            last = self._known[-1]
            return self._seconds[last] * (1 + _ROW_SHARE * (rows - last))
        above = self._known[place]
        if place == 0:
            return self._seconds[above]
        below = self._known[place - 1]
        share = (rows - below) / (above - below)
        return self._seconds[below] + share * (self._seconds[above] - self._seconds[below])
