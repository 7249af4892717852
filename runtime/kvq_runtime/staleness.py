"""How old the encoding of each token of an edited text is. Knows no model and no cache.

An edit in the middle leaves the keys and values behind it as they were (PIE, 2407.03157): exact in
position, while their content never saw the new text. That is what *stale* means here. So are keys
and values that were predicted and not computed, and all that was computed from stale ones.
"""

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

Ages = NDArray[np.int32]

# In an age: the token was predicted, computed from what was, computed from what is stale otherwise.
PREDICTED, BEHIND, OVER = 1 << 30, 1 << 29, 1 << 28
# Or it stood right behind an edit.
NEXT = 1 << 27

# So many tokens right behind an edit lose most by it: they are encoded again before others.
NEXT_TOKENS = 16

# Runs of a text that edits have moved apart and that are let be until idle time reaches them.
MOST_SEGMENTS = 16


@dataclass(frozen=True, kw_only=True, slots=True)
class EditCounts:
    """What edits of a text were so far, and how it stands.

    `edits` in the middle brought `edited_tokens` new tokens; `recomputed_edits` of them could not
    keep what follows and computed it again. `stale_tokens` were encoded before a change on their
    left, predicted (`predicted_tokens` of them), or after such a one.
    """

    edits: int = 0
    edited_tokens: int = 0
    recomputed_edits: int = 0
    stale_tokens: int = 0
    predicted_tokens: int = 0


def next_tokens(gone: int, come: int) -> int:
    """How many tokens behind an edit are encoded again with it: no more than it costs anyway."""
    return min(NEXT_TOKENS, max(gone, come))


class Staleness:
    """Of a text's tokens: -1 not encoded yet, else how many edits to its left there were since.

    Added to that is `PREDICTED` or, of a token that saw one such, `BEHIND`, or `OVER` of one that
    saw another stale one, and `NEXT` of the first `NEXT_TOKENS` behind an edit.
    `ages` int32 [n] are those of the first tokens; all after them are 0. A text that was never
    edited has none. `gaps` are where tokens are not encoded: (first, after the last) of each run,
    left to right; `missing` counts these tokens.
    """

    def __init__(self, ages: Ages | None = None) -> None:
        self.ages: Ages = np.zeros(0, np.int32) if ages is None else ages.astype(np.int32)
        self._find_gaps()

    @property
    def stale(self) -> int:
        """Tokens that are to be encoded again before the text is exact."""
        return int((self.ages > 0).sum())

    @property
    def first_stale(self) -> int | None:
        """The first of these tokens; None: there is none."""
        found = np.flatnonzero(self.ages > 0)
        return int(found[0]) if len(found) else None

    @property
    def predicted(self) -> int:
        """Tokens whose keys and values were predicted."""
        return int((self.ages >= PREDICTED).sum())

    @property
    def computed(self) -> int | None:
        """The first token that was predicted, or computed from what was; None: there is none."""
        found = np.flatnonzero(self.ages >= BEHIND)
        return int(found[0]) if len(found) else None

    def is_predicted(self, token: int) -> bool:
        """Whether its keys and values were predicted."""
        return 0 <= token < len(self.ages) and bool(self.ages[token] >= PREDICTED)

    def next_to_refresh(self) -> tuple[int, int]:
        """The stale run, as `gaps` are told, that is to be encoded first; there must be one.

        Where more than `MOST_SEGMENTS` runs have moved apart, the smallest of these: each costs
        queries a rotation of their own. Then what stands right behind edits, the last of them
        first, which are nearest to what is asked; and then the leftmost, so that the text becomes
        exact from the left. That alone where a token was predicted: what is computed from it
        would have to be computed again.
        """
        if self.computed is None:
            apart = self._apart()
            if len(apart) > MOST_SEGMENTS:
                return min(apart, key=lambda run: (run[1] - run[0], run[0]))
            following = _runs((self.ages > 0) & (self.ages & NEXT > 0))
            if following:
                return following[-1]
        return _runs(self.ages > 0)[0]

    def _apart(self) -> list[tuple[int, int]]:
        """Runs that different numbers of edits have moved."""
        moves = np.where(self.ages > 0, self.ages & (NEXT - 1), 0)
        steps = np.flatnonzero(np.diff(moves, prepend=0, append=0)).tolist()
        return [(start, stop) for start, stop in pairwise(steps) if moves[start]]

    def edited(self, start: int, stop: int, count: int, held: int) -> None:
        """Tokens `start` to `stop` of the `held` ones gave way to a gap for `count` others."""
        ages = np.concatenate([self.ages, np.zeros(held - len(self.ages), np.int32)])
        behind = ages[stop:]
        behind[behind >= 0] += 1
        behind[:NEXT_TOKENS][behind[:NEXT_TOKENS] > 0] |= NEXT
        self._set(np.concatenate([ages[:start], np.full(count, -1, np.int32), behind]))

    def opened(self, start: int, stop: int, held: int) -> None:
        """Tokens `start` to `stop` are to be encoded again; those behind them stay as they are."""
        ages = np.concatenate([self.ages, np.zeros(held - len(self.ages), np.int32)])
        ages[start:stop] = -1
        self._set(ages)

    def encoded(self, start: int, stop: int, *, predicted: bool = False) -> None:
        """Tokens `start` to `stop` went through the model, or were `predicted` by its beginning."""
        age = PREDICTED if predicted else self._age_after(start)
        if start < len(self.ages) or age:
            ages = np.zeros(max(stop, len(self.ages)), np.int32)
            ages[: len(self.ages)] = self.ages
            ages[start:stop] = age
            self._set(ages)

    def _age_after(self, start: int) -> int:
        """The age of a token computed from the first `start` as they are."""
        before = self.ages[:start]
        stale = before[before > 0]
        return 0 if not len(stale) else OVER if (stale < BEHIND).all() else BEHIND

    def cut(self, num_tokens: int) -> int:
        """Only the first `num_tokens` are left, without a gap at their end; how many these are."""
        gaps = [start for start, stop in self.gaps if start < num_tokens <= stop]
        kept = gaps[0] if gaps else num_tokens
        if kept < len(self.ages):
            self._set(self.ages[:kept])
        return kept

    def _set(self, ages: Ages) -> None:
        """What is as in a text without edits, at the end, needs no age."""
        aged = np.flatnonzero(ages)
        self.ages = ages[: aged[-1] + 1 if len(aged) else 0].copy()
        self._find_gaps()

    def _find_gaps(self) -> None:
        self.gaps = _runs(self.ages < 0)
        self.missing = sum(stop - start for start, stop in self.gaps)


def _runs(holds: NDArray[np.bool_]) -> list[tuple[int, int]]:
    steps = np.flatnonzero(np.diff(holds, prepend=False, append=False))
    return list(zip(steps[::2].tolist(), steps[1::2].tolist(), strict=True))
