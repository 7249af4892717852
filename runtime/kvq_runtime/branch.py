"""Rows after a sequence's cached tokens, which are kept or forgotten. Knows no text."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Generic

import numpy as np
from numpy.typing import NDArray

from kvq.errors import UsageError
from kvq_runtime.backends import WHOLE, C, Mode, SequencePass
from kvq_runtime.passes import Call, Logits, Passed, SharedPassError, Work

Ids = Sequence[int]
# Told of a path: its first token's place, its tokens, the last one's logits, whether they were
# predicted, and states of all.
Adopt = Callable[[int, list[int], Logits | None, bool, NDArray[np.float32] | None], None]


class Branch(Generic[C]):
    """Rows after a sequence's cached tokens, added by one or more passes, kept or forgotten.

    `at`: in the gap at this token instead, which has room for all of them. `state_width`: numbers
    of a state, where those of the rows are wanted.
    """

    def __init__(
        self,
        cache: C,
        held: Logits | None,
        adopt: Adopt,
        call: Callable[[SequencePass[C]], Call[C]],
        at: int | None = None,
        state_width: int = 0,
    ) -> None:
        self.logits: Logits = np.zeros((0, 0), np.float32)
        self._cache = cache
        self._adopt = adopt
        self._call = call
        self._at = at
        self._first = cache.tokens if at is None else at
        self._ids: list[int] = []
        self._depths: list[int] = []
        self._mixed = False
        self._guessed: list[bool] = []
        self._predicted = False
        self._whole = True
        self._of_row: dict[int, Logits] = {} if held is None else {-1: held}
        # Of every row, None of those that told none.
        self._states: list[NDArray[np.float32] | None] = []
        self._state_width = state_width

    @property
    def rows(self) -> int:
        """How many rows were added and not forgotten."""
        return len(self._ids)

    def extend(
        self,
        ids: Ids,
        parents: Ids | None = None,
        *,
        rows: Ids | None = None,
        mixed: tuple[NDArray[np.int64], NDArray[np.float32]] | None = None,
        exact_rows: int = 0,
        mode: Mode = WHOLE,
        joined: NDArray[np.float32] | None = None,
    ) -> Work[C, Passed]:
        """Adds `ids` as rows of one pass; `logits` are then those of `rows`, all by default.

        `parents[i]` is the row that row i of `ids` follows, -1 the last cached token; None: a
        chain. Rows are counted from the branch's beginning; row -1's logits are held and cost no
        pass. `mixed`: ids int64 [T, K] and weights float32 [T, K] of embeddings to run instead
        of those of `ids`; such rows cannot be committed. `exact_rows`: see `SequencePass`; logits
        that are not all exact serve this pass only. Rows of a `mode` that guesses can only be
        rewound. `joined`: the states that a draft head reads, see `SequencePass`.
        """
        first, passed = len(self._ids), None
        wanted = list(range(first, first + len(ids)) if rows is None else rows)
        if ids:
            new = [row - first for row in wanted if row >= first]
            try:
                passed = yield self._begin(ids, parents, new, mixed, exact_rows, mode, joined)
            except SharedPassError:
                self.rewind(first)
                passed = yield self._begin(ids, parents, new, mixed, exact_rows, mode, joined)
            if passed.states is not None:
                self._states[first:] = passed.states
            self._of_row.update(zip((row + first for row in new), passed.logits, strict=True))
        self.logits = np.stack([self._of_row[row] for row in wanted]) if wanted else self.logits[:0]
        if passed is None:
            return Passed(logits=self.logits, seconds=0.0, rows=0)
        return replace(passed, logits=self.logits)

    def commit(self, path: Iterable[int]) -> None:
        """Keeps the rows of `path`, each the parent of the next; the others are forgotten."""
        rows = list(path)
        if rows and self._mixed:
            raise UsageError("rows of mixed embeddings stand for no tokens and cannot be kept")
        assert not any(self._guessed[row] for row in rows)
        if self._ids:
            self._cache.commit(rows)
            last = rows[-1] if rows else -1
            logits = self._of_row.get(last) if self._whole else None
            ids = [self._ids[row] for row in rows]
            told = [state for row in rows if (state := self._states[row]) is not None]
            states = np.stack(told) if told and len(told) == len(rows) else None
            self._adopt(self._first, ids, logits, self._predicted, states)
        self._ids = []

    def rewind(self, num_rows: int) -> None:
        """Forgets all but the first `num_rows` rows, so that a pass may write them anew."""
        self._cache.rewind(num_rows)
        for held in (self._ids, self._depths, self._guessed, self._states):
            del held[num_rows:]
        self._of_row = {row: kept for row, kept in self._of_row.items() if row < num_rows}
        self._whole, self._mixed = self._whole or not num_rows, self._mixed and num_rows > 0
        self._predicted &= num_rows > 0

    def forget(self) -> None:
        """Forgets every row that was not committed."""
        if self._ids:
            self.rewind(0)

    def _begin(
        self,
        ids: Ids,
        parents: Ids | None,
        wanted: list[int],
        mixed: tuple[NDArray[np.int64], NDArray[np.float32]] | None,
        exact_rows: int,
        mode: Mode,
        joined: NDArray[np.float32] | None,
    ) -> Call[C]:
        first = len(self._ids)
        chain = range(first - 1, first - 1 + len(ids))
        self._cache.begin(len(ids), parents, view=mode.view, at=self._at, silent=mode.silent)
        self._ids += ids
        for parent in chain if parents is None else parents:
            self._depths.append(0 if parent < 0 else self._depths[parent] + 1)
        self._mixed |= mixed is not None
        self._guessed.extend([mode.guesses] * len(ids))
        self._states.extend([None] * len(ids))
        # Of rows that go through a part of the layers there are none, and of a draft head's only
        # those matter that it guesses by.
        tells = self._state_width and not mode.silent and (joined is None or wanted)
        self._predicted |= bool(mode.predicted)
        self._whole &= exact_rows == 0 and not mode.head_tokens
        table = np.array(ids, np.int64)[:, None], np.ones((len(ids), 1), np.float32)
        return self._call(
            SequencePass(
                cache=self._cache,
                ids=(mixed or table)[0],
                weights=(mixed or table)[1],
                positions=self._first + np.array(self._depths[first:], np.int64),
                wanted=np.array(wanted, np.int64),
                exact_rows=exact_rows,
                mode=mode,
                joined=joined,
                states=np.empty((len(ids), self._state_width), np.float32) if tells else None,
            )
        )
