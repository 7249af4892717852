"""Learns from the passes what a pass costs by its number of rows. It sees seconds, no tokens."""

from bisect import bisect_left, insort
from dataclasses import dataclass

# A draft must promise this many times the speed of plain decoding, since estimates are noisy.
MARGIN = 1.02
# Weight of the newest measurement in a moving average of seconds.
NEWEST_WEIGHT = 0.2
# A measurement counts at most as this many times the average: other programs disturb some.
MOST_JUMP = 2.0
# The next measurement replaces an average that is this many passes old.
_STALE_PASSES = 200
# A row more than were ever measured is assumed to cost this share of a pass: little, to try it.
_ROW_SHARE = 0.02
# Every pass, this share of the extra cost of more rows is doubted, so that they are tried again.
_DOUBT = 0.01
# Doubt is divided by the number of measurements, up to this many.
_MOST_TRIALS = 32
# A pass of more rows than these reads a prompt, and is not measured.
_MOST_ROWS = 64


def moving_average(
    average: float, seconds: float, *, weight: float = NEWEST_WEIGHT, most_jump: float = MOST_JUMP
) -> float:
    """Returns the average after one more measurement, which counts `most_jump` averages at most."""
    return average + weight * (min(seconds, most_jump * average) - average)


@dataclass(slots=True)
class _Measured:
    """Holds the average of passes of one row count, how many there were and the last one."""

    seconds: float
    trials: int
    last: int


class PassCosts:
    """Estimates the seconds of a pass by its rows: a moving average each, a line between two."""

    def __init__(self) -> None:
        self._measured: dict[int, _Measured] = {}
        self._row_counts: list[int] = []  # those measured, in order
        self._passes = 0

    @property
    def most_rows(self) -> int:
        """Returns how many rows may be tried now: twice the most so far."""
        return 2 * self._row_counts[-1] if self._row_counts else 0

    def record(self, rows: int, seconds: float) -> None:
        """Notes that a pass of `rows` rows took `seconds`."""
        if rows > _MOST_ROWS:
            return
        self._passes += 1
        measured = self._measured.get(rows)
        if measured is None:
            if self._row_counts:
                seconds = min(seconds, MOST_JUMP * self.seconds(rows, doubted=False))
            insort(self._row_counts, rows)
            self._measured[rows] = _Measured(seconds, 1, self._passes)
            return
        aged = (self._passes - measured.last) / _STALE_PASSES
        weight = min(1.0, max(NEWEST_WEIGHT, 1 / (1 + measured.trials), aged))
        measured.seconds = moving_average(measured.seconds, seconds, weight=weight)
        measured.trials = min(_MOST_TRIALS, measured.trials + 1)
        measured.last = self._passes

    def seconds(self, rows: int, *, doubted: bool = True) -> float:
        """Returns what a pass of `rows` rows is expected to take; 0 before the first pass.

        If `doubted`, it is less the longer ago such a pass was measured.
        """
        if not self._row_counts:
            return 0.0
        place = bisect_left(self._row_counts, rows)
        if place == len(self._row_counts):
            last = self._row_counts[-1]
            return self._at(last, doubted) * (1 + _ROW_SHARE * (rows - last))
        above = self._row_counts[place]
        if place == 0 or above == rows:
            return self._at(above, doubted)
        below = self._row_counts[place - 1]
        share = (rows - below) / (above - below)
        low, high = self._at(below, doubted), self._at(above, doubted)
        return low + share * (high - low)

    def _at(self, rows: int, doubted: bool) -> float:
        measured = self._measured[rows]
        if not doubted:
            return measured.seconds
        fewest = self._measured[self._row_counts[0]].seconds
        doubt = min(1.0, _DOUBT * (self._passes - measured.last) / measured.trials)
        return measured.seconds - doubt * max(0.0, measured.seconds - fewest)
