"""Hidden states of a sequence's newest cached tokens, until a drafter takes them.

A hidden state is the vector that the model has for a token after its final norm. A draft head reads
it together with the token that follows.
"""

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]


class HiddenStates:
    """Holds the hidden states of one run of tokens, at most the newest `most` ones.

    A reader that does not take them in time finds that the run begins later than it expects.
    """

    def __init__(self, most: int) -> None:
        self.first = 0
        self._most = most
        self._rows: Floats = np.zeros((0, 0), np.float32)

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def stop(self) -> int:
        """Returns the token after the last one whose hidden state is here."""
        return self.first + len(self._rows)

    def add(self, first: int, states: Floats) -> None:
        """Adds the hidden states float32 [T, hidden] of the tokens from `first` on."""
        self.cut(first)
        if not len(self._rows) or self.stop != first:
            self.first, self._rows = first, states
        else:
            self._rows = np.concatenate([self._rows, states])
        self.drop(self.stop - self._most)

    def cut(self, tokens: int) -> None:
        """Keeps only the hidden states of the text's first `tokens` tokens."""
        self._rows = self._rows[: max(0, tokens - self.first)]

    def drop(self, tokens: int) -> None:
        """Drops the hidden states of the text's first `tokens` tokens, which were taken."""
        count = min(max(0, tokens - self.first), len(self._rows))
        self.first, self._rows = self.first + count, self._rows[count:]

    def of(self, start: int, stop: int) -> Floats:
        """Returns the hidden states float32 [stop - start, hidden] of tokens `start` to `stop`."""
        assert self.first <= start <= stop <= self.stop
        return self._rows[start - self.first : stop - self.first]
