"""States of a sequence's newest cached tokens, until a drafter takes them. Knows no model.

A state is what a model makes of a token behind its final norm; a draft head reads it together with
the token that follows.
"""

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]


class States:
    """Those of one run of tokens, at most the newest `most`.

    Who does not take them in time finds a gap: the run then begins later than he went on from.
    """

    def __init__(self, most: int) -> None:
        self.first = 0
        self._most = most
        self._rows: Floats = np.zeros((0, 0), np.float32)

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def stop(self) -> int:
        """The token after the last whose state is here."""
        return self.first + len(self._rows)

    def add(self, first: int, states: Floats) -> None:
        """The tokens from `first` on were computed, with these float32 [T, hidden]."""
        self.cut(first)
        if not len(self._rows) or self.stop != first:
            self.first, self._rows = first, states
        else:
            self._rows = np.concatenate([self._rows, states])
        self.drop(self.stop - self._most)

    def cut(self, tokens: int) -> None:
        """Those of the first `tokens` tokens stay."""
        self._rows = self._rows[: max(0, tokens - self.first)]

    def drop(self, tokens: int) -> None:
        """Those of the first `tokens` tokens were taken."""
        count = min(max(0, tokens - self.first), len(self._rows))
        self.first, self._rows = self.first + count, self._rows[count:]

    def of(self, start: int, stop: int) -> Floats:
        """Those of tokens `start` to `stop`, float32 [stop - start, hidden]."""
        assert self.first <= start <= stop <= self.stop
        return self._rows[start - self.first : stop - self.first]
