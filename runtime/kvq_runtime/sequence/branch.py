"""Rows that are added after a sequence's cached tokens, and then kept or forgotten."""

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Generic

import numpy as np
from numpy.typing import NDArray

from kvq.errors import UsageError
from kvq_runtime.backends import WHOLE, C, Mode, SequencePass
from kvq_runtime.sequence.passes import Logits, PassRequest, PassResult, SharedPassError, Work

Ids = Sequence[int]
# Called with a committed path: the place of its first token, its tokens, the last one's logits,
# whether they were predicted, and the hidden states of all.
Adopt = Callable[[int, list[int], Logits | None, bool, NDArray[np.float32] | None], None]


class Branch(AbstractContextManager["Branch[C]"], Generic[C]):
    """Holds rows after a sequence's cached tokens, which one or more passes add.

    `commit` keeps some of the rows, `forget` none. With `at` the rows lie in a gap instead, which
    begins at this token and has room for all of them. `state_width` is the width of a hidden state
    where the rows' hidden states are asked for, else 0.
    """

    def __init__(
        self,
        cache: C,
        last_logits: Logits | None,
        adopt: Adopt,
        make_request: Callable[..., PassRequest[C]],
        at: int | None = None,
        state_width: int = 0,
    ) -> None:
        self.logits: Logits = np.zeros((0, 0), np.float32)
        self._cache = cache
        self._adopt = adopt
        self._make_request = make_request
        self._at = at
        self._first = cache.tokens if at is None else at
        self._ids: list[int] = []
        self._depths: list[int] = []
        self._mixed = False
        self._guessed: set[int] = set()
        self._predicted = False
        self._whole = True
        self._row_logits: dict[int, Logits] = {} if last_logits is None else {-1: last_logits}
        # One for every row; None for a row whose pass gave none.
        self._hidden_states: list[NDArray[np.float32] | None] = []
        self._state_width = state_width

    @property
    def rows(self) -> int:
        """Returns how many rows were added and not forgotten."""
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
    ) -> Work[C, PassResult]:
        """Adds `ids` as rows of one pass; `logits` then holds the logits of `rows`.

        Row numbers count from the branch's beginning. The logits of row -1, the last cached token,
        are known already and cost no pass. Rows of a `mode` that guesses can only be rewound.

        Args:
            ids: Token of each new row.
            parents: For each new row the row that it follows, -1 for the last cached token. None:
                each row follows the one before it.
            rows: Rows whose logits are asked for. None: all new rows.
            mixed: Ids int64 [T, K] and weights float32 [T, K] of mixed embeddings that are run in
                place of `ids`. Such rows cannot be committed.
            exact_rows: See `SequencePass`. Logits that are not all exact serve this pass only.
            mode: How much of the model the pass reads.
            joined: Hidden states float32 [T, hidden] that a draft head reads, see `SequencePass`.
        """
        first, result = len(self._ids), None
        logit_rows = list(range(first, first + len(ids)) if rows is None else rows)
        if ids:
            new = [row for row in logit_rows if row >= first]
            try:
                result = yield self._begin(ids, parents, new, mixed, exact_rows, mode, joined)
            except SharedPassError:
                self.rewind(first)
                result = yield self._begin(ids, parents, new, mixed, exact_rows, mode, joined)
            if result.hidden_states is not None:
                self._hidden_states[first:] = result.hidden_states
            self._row_logits.update(zip(new, result.logits, strict=True))
            if len(new) == len(logit_rows):
                self.logits = result.logits
                return result
        self.logits = (
            np.stack([self._row_logits[row] for row in logit_rows])
            if logit_rows
            else self.logits[:0]
        )
        if result is None:
            return PassResult(logits=self.logits, seconds=0.0, rows=0)
        return replace(result, logits=self.logits)

    def commit(self, path: Iterable[int]) -> None:
        """Keeps the rows of `path`, each the parent of the next, and forgets the others."""
        rows = list(path)
        if rows and self._mixed:
            raise UsageError("rows of mixed embeddings stand for no tokens and cannot be kept")
        assert self._guessed.isdisjoint(rows)
        if self._ids:
            self._cache.commit(rows)
            last = rows[-1] if rows else -1
            logits = self._row_logits.get(last) if self._whole else None
            ids = list(map(self._ids.__getitem__, rows))
            states = (
                [state for row in rows if (state := self._hidden_states[row]) is not None]
                if self._state_width
                else []
            )
            hidden_states = np.stack(states) if states and len(states) == len(rows) else None
            self._adopt(self._first, ids, logits, self._predicted, hidden_states)
        self._ids = []

    def rewind(self, num_rows: int) -> None:
        """Forgets all but the first `num_rows` rows, so that a pass may write them again."""
        self._cache.rewind(num_rows)
        for values in (self._ids, self._depths, self._hidden_states):
            del values[num_rows:]
        self._guessed.intersection_update(range(num_rows))
        self._row_logits = {row: kept for row, kept in self._row_logits.items() if row < num_rows}
        self._whole, self._mixed = self._whole or not num_rows, self._mixed and num_rows > 0
        self._predicted &= num_rows > 0

    def forget(self, *_: object) -> None:
        """Forgets every row that was not committed."""
        if self._ids:
            self.rewind(0)

    __exit__ = forget

    def _begin(
        self,
        ids: Ids,
        parents: Ids | None,
        logit_rows: list[int],
        mixed: tuple[NDArray[np.int64], NDArray[np.float32]] | None,
        exact_rows: int,
        mode: Mode,
        joined: NDArray[np.float32] | None,
    ) -> PassRequest[C]:
        first = len(self._ids)
        chain = range(first - 1, first - 1 + len(ids))
        self._cache.begin(
            len(ids), parents, view=mode.view, at=self._at, kv_only_layers=mode.predicted
        )
        self._ids += ids
        for parent in chain if parents is None else parents:
            self._depths.append(0 if parent < 0 else self._depths[parent] + 1)
        self._mixed |= mixed is not None
        if mode.guesses:
            self._guessed.update(range(first, first + len(ids)))
        self._hidden_states.extend([None] * len(ids))
        # Rows that go through a part of the layers have no hidden states. A draft head needs
        # those of the rows that it guesses by only.
        tells = self._state_width and not mode.predicted and (joined is None or logit_rows)
        self._predicted |= bool(mode.predicted)
        self._whole &= exact_rows == 0 and not mode.head_tokens
        table = np.array(ids, np.int64)[:, None], np.array([[1.0]] * len(ids), np.float32)
        return self._make_request(
            rows=SequencePass(
                cache=self._cache,
                ids=(mixed or table)[0],
                weights=(mixed or table)[1],
                positions=self._first + np.array(self._depths[first:], np.int64),
                logit_rows=np.array(logit_rows, np.int64) - first,
                exact_rows=exact_rows,
                mode=mode,
                joined=joined,
                hidden_states=np.empty((len(ids), self._state_width), np.float32)
                if tells
                else None,
            )
        )
