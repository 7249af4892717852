"""How old the encoding of each token of an edited text is.

An edit in the middle leaves the keys and values after it as they were (PIE, 2407.03157): their
positions are exact, but they never saw the new text. Such tokens are *stale*. So are tokens whose
keys and values were predicted, and all tokens that were computed from stale ones.
"""

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

Ages = NDArray[np.int32]

# Parts of an age: the token was predicted, computed from predicted tokens, computed from other
# stale tokens.
PREDICTED, FROM_PREDICTED, FROM_STALE = 1 << 30, 1 << 29, 1 << 28
# The token stood right after an edit.
AFTER_EDIT = 1 << 27
# What of an age says that text on the left of the token has changed.
_MOVED = FROM_STALE | (AFTER_EDIT - 1)

# The tokens right after an edit lose most by it: this many are encoded again before others.
NEXT_TOKENS = 16

# So many runs that edits moved apart may wait until idle time reaches them.
MOST_SEGMENTS = 16


@dataclass(frozen=True, kw_only=True, slots=True)
class EditCounts:
    """Counts the edits of a text so far, and the tokens that are stale now.

    `edits` in the middle brought `edited_tokens` new tokens. `recomputed_edits` of them could not
    keep what follows and computed it again. Keys and values of `taken_tokens` came from another
    text, see `passages`. `stale_tokens` are all stale tokens, of which
    `predicted_tokens` were predicted.
    """

    edits: int = 0
    edited_tokens: int = 0
    recomputed_edits: int = 0
    taken_tokens: int = 0
    stale_tokens: int = 0
    predicted_tokens: int = 0


def next_tokens(removed: int, added: int) -> int:
    """Returns how many tokens after an edit are encoded again with it.

    These are never more than the edit costs anyway.
    """
    return min(NEXT_TOKENS, max(removed, added))


class Staleness:
    """Holds the age of each token's encoding.

    An age is -1 for a token that is not encoded yet, else the number of edits on its left since it
    was encoded. `PREDICTED` is added for a predicted token, `FROM_PREDICTED` for one that was
    computed from such tokens, `FROM_STALE` for one that was computed from other stale tokens, and
    `AFTER_EDIT` for the first `NEXT_TOKENS` after an edit. `ages` int32 [n] are the ages of the
    first tokens; all later ones have age 0. A text that was never edited has none. `gaps` are the
    runs that are not encoded, (first token, token after the last), left to right; `missing` counts
    their tokens.
    """

    def __init__(self, ages: Ages | None = None) -> None:
        self.ages: Ages = np.zeros(0, np.int32) if ages is None else ages.astype(np.int32)
        self._find_gaps()

    @property
    def stale(self) -> int:
        """Returns how many tokens must be encoded again before the text is exact."""
        return int((self.ages > 0).sum())

    @property
    def first_stale(self) -> int | None:
        """Returns the first stale token, None if there is none."""
        stale_tokens = np.flatnonzero(self.ages > 0)
        return int(stale_tokens[0]) if len(stale_tokens) else None

    @property
    def moved(self) -> int:
        """Returns how many tokens were encoded before a change on their left, or from such ones."""
        return len(self._moved())

    @property
    def first_moved(self) -> int | None:
        """Returns the first of the tokens that `moved` counts, None if there is none."""
        moved = self._moved()
        return int(moved[0]) if len(moved) else None

    @property
    def predicted(self) -> int:
        """Returns how many tokens have predicted keys and values."""
        return int((self.ages >= PREDICTED).sum())

    @property
    def computed(self) -> int | None:
        """Returns the first token that was predicted, or computed from predicted ones, if any."""
        tokens = np.flatnonzero(self.ages >= FROM_PREDICTED)
        return int(tokens[0]) if len(tokens) else None

    def is_predicted(self, token: int) -> bool:
        """Decides whether the keys and values of `token` were predicted."""
        return 0 <= token < len(self.ages) and bool(self.ages[token] >= PREDICTED)

    def next_to_refresh(self) -> tuple[int, int]:
        """Returns the stale run that is to be encoded first; there must be one.

        - If a token was predicted, it is the leftmost run: what is computed from it would have to
          be computed again.
        - Else, if edits moved more than `MOST_SEGMENTS` runs apart, it is the smallest of these, as
          each costs queries a rotation of their own.
        - Else it is the run right after the last edit, which is nearest to where the text is used.
        - Else it is the leftmost run, so that the text becomes exact from the left.
        """
        if self.computed is None:
            moved = self._moved_runs()
            if len(moved) > MOST_SEGMENTS:
                return min(moved, key=lambda run: (run[1] - run[0], run[0]))
            following = _runs((self.ages > 0) & (self.ages & AFTER_EDIT > 0))
            if following:
                return following[-1]
        return _runs(self.ages > 0)[0]

    def _moved(self) -> NDArray[np.int64]:
        return np.flatnonzero((self.ages > 0) & (self.ages & _MOVED > 0))

    def _moved_runs(self) -> list[tuple[int, int]]:
        """Returns the runs that edits have moved, split where the number of moves changes."""
        moves = np.where(self.ages > 0, self.ages & (AFTER_EDIT - 1), 0)
        steps = np.flatnonzero(np.diff(moves, prepend=0, append=0)).tolist()
        return [(start, stop) for start, stop in pairwise(steps) if moves[start]]

    def mark_edited(self, start: int, stop: int, count: int, cached_tokens: int) -> None:
        """Notes that cached tokens `start` to `stop` gave way to a gap of `count` tokens."""
        ages = np.concatenate([self.ages, np.zeros(cached_tokens - len(self.ages), np.int32)])
        tail = ages[stop:]
        tail[tail >= 0] += 1
        tail[:NEXT_TOKENS][tail[:NEXT_TOKENS] > 0] |= AFTER_EDIT
        self._set(np.concatenate([ages[:start], np.full(count, -1, np.int32), tail]))

    def mark_pending(self, start: int, stop: int, cached_tokens: int) -> None:
        """Notes that tokens `start` to `stop` are to be encoded again, and no later ones."""
        ages = np.concatenate([self.ages, np.zeros(cached_tokens - len(self.ages), np.int32)])
        ages[start:stop] = -1
        self._set(ages)

    def mark_encoded(
        self, start: int, stop: int, *, predicted: bool = False, from_passage: bool = False
    ) -> None:
        """Notes that tokens `start` to `stop` were computed, `predicted` or `from_passage`.

        What comes from another text has something else on its left, as after one edit.
        """
        age = PREDICTED if predicted else 1 if from_passage else self._age_after(start)
        if start < len(self.ages) or age:
            ages = np.zeros(max(stop, len(self.ages)), np.int32)
            ages[: len(self.ages)] = self.ages
            ages[start:stop] = age
            self._set(ages)

    def _age_after(self, start: int) -> int:
        """Returns the age of a token that is computed from the first `start` tokens as they are."""
        before = self.ages[:start]
        stale = before[before > 0]
        return (
            0
            if not len(stale)
            else FROM_STALE
            if (stale < FROM_PREDICTED).all()
            else FROM_PREDICTED
        )

    def cut(self, num_tokens: int) -> int:
        """Keeps the first `num_tokens` tokens without a gap at their end; returns their number."""
        gaps = [start for start, stop in self.gaps if start < num_tokens <= stop]
        kept = gaps[0] if gaps else num_tokens
        if kept < len(self.ages):
            self._set(self.ages[:kept])
        return kept

    def _set(self, ages: Ages) -> None:
        """Takes over `ages` without the zeros at their end."""
        aged = np.flatnonzero(ages)
        self.ages = ages[: aged[-1] + 1 if len(aged) else 0].copy()
        self._find_gaps()

    def _find_gaps(self) -> None:
        self.gaps = _runs(self.ages < 0)
        self.missing = sum(stop - start for start, stop in self.gaps)


def _runs(holds: NDArray[np.bool_]) -> list[tuple[int, int]]:
    steps = np.flatnonzero(np.diff(holds, prepend=False, append=False))
    return list(zip(steps[::2].tolist(), steps[1::2].tolist(), strict=True))
