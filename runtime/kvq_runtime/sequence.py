"""One sequence: its token ids, and the cache of their keys and values. Knows no sampling, no text.

The tokens a sequence holds and those its cache holds differ by a pending end: what was given or
chosen but has not been through the model. A pass adds rows to a *branch*, which forgets all that
is not committed: a prompt's piece commits every row, a verified draft the rows that were right.

What its cache holds of the text, with the gaps that edits leave, is its `Encoding`; what needs a
model is `Work` that asks for passes.
"""

import collections.abc
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from typing import Generic

import numpy as np
from numpy.typing import NDArray

from kvq.errors import UsageError
from kvq_runtime.backends import WHOLE, Backend, C, SequencePass
from kvq_runtime.branch import Branch
from kvq_runtime.config import SessionConfig
from kvq_runtime.encoding import Encoding, SequenceState
from kvq_runtime.hunks import Hunk, common_prefix, hunks, one_by_one
from kvq_runtime.passes import Call, Logits, Work, run
from kvq_runtime.prediction import Prediction, PromptReader
from kvq_runtime.staleness import Ages, next_tokens
from kvq_runtime.states import States
from kvq_runtime.turns import end_of_piece

Ids = collections.abc.Sequence[int]


class TokenSequence(Generic[C]):
    """Token ids and one cache. Opening it takes the cache's bytes, `close` gives them back.

    A sequence belongs to one thread at a time; after `close` every use raises `UsageError`.
    """

    def __init__(self, backend: Backend[C], config: SessionConfig) -> None:
        self.config = config
        self._backend = backend
        self.encoding = Encoding(backend.open_cache(config), config.context_tokens)
        self._tokens: list[int] = []
        self._unchanged, self._told = 0, object()
        # Those of its cached tokens, for a drafter that reads them.
        self.states: States | None = None
        limit = backend.model.short_rope_tokens
        # Whether its passes use the long-context rotary table of a model that has two.
        self.rope_long = limit is not None and config.context_tokens > limit
        # A tight budget leaves room for shorter pieces only.
        self.chunk_tokens = min(config.chunk_tokens, self.cache.chunk_tokens)

    @property
    def cache(self) -> C:
        """The cache of its keys and values. Raises `UsageError` after `close`."""
        return self.encoding.cache

    @property
    def tokens(self) -> tuple[int, ...]:
        """Every token, pending ones included."""
        return tuple(self._tokens)

    def __len__(self) -> int:
        return len(self._tokens)

    def changes(self, asker: object) -> tuple[int, list[int]]:
        """How many of the first tokens have stayed since the last call, and those after them.

        None have for who was not the last to ask.
        """
        kept = self._unchanged if asker is self._told else 0
        self._told, self._unchanged = asker, len(self._tokens)
        return kept, self._tokens[kept:]

    @property
    def pending_tokens(self) -> int:
        """Tokens at the end that have not been through the model yet."""
        return len(self._tokens) - self.encoding.tokens

    @property
    def room(self) -> int:
        """Tokens the context can still take."""
        return self.config.context_tokens - len(self._tokens)

    def append(self, ids: Iterable[int]) -> None:
        """Adds tokens to the pending end. Raises `UsageError` for one the model does not have."""
        self._tokens += self._backend.model.checked(ids)

    def keep(self, num_tokens: int) -> None:
        """Forgets all but the first `num_tokens` tokens."""
        if self.cache.tokens > num_tokens:
            self.encoding.trim(num_tokens)
        self._rewrite(num_tokens, ())

    def rollback(self, num_tokens: int) -> None:
        """Forgets the last `num_tokens` tokens. Raises `UsageError` for more than there are."""
        if not 0 <= num_tokens <= len(self._tokens):
            raise UsageError(
                f"cannot roll back {num_tokens} tokens; the session holds {len(self._tokens)}"
            )
        self.keep(len(self._tokens) - num_tokens)

    def align(
        self,
        ids: Ids,
        *,
        edits: bool = False,
        changes: list[Hunk] | None = None,
        predicts: bool = False,
    ) -> int:
        """Becomes `ids`, keeping the beginning they share; how many of these are not computed.

        What is not kept is pending afterwards. `edits`: what follows a change is kept as well, as
        `edit` does; the places that changed are `changes`, or found by comparing the two texts.
        Predicted tokens are kept only where it `predicts`.
        """
        if not predicts and self.encoding.staleness.computed is not None:
            self.keep(self.encoding.staleness.computed)
            changes = None
        if edits:
            changes = hunks(self._tokens, ids) if changes is None else changes
            self._backend.model.checked(token for hunk in changes for token in hunk.new_ids)
            for hunk in one_by_one(changes):
                self.edit(*hunk)
            return len(ids) - len(self.ready())
        shared = common_prefix(self._tokens, ids)
        new = self._backend.model.checked(ids[shared:])
        self.keep(shared)
        self.append(new)
        return len(ids) - len(self.ready())

    def edit(
        self,
        start: int,
        stop: int,
        new_ids: Ids,
        *,
        reencode_next: int | None = None,
        reencode_tail: int = 1,
    ) -> int:
        """Replaces tokens `start` to `stop` by `new_ids`; how many tokens are kept as computed.

        What follows keeps its keys and values and moves (PIE, 2407.03157): only `new_ids`, the next
        `reencode_next` tokens and the last `reencode_tail` of the text are pending afterwards, and
        no model runs here. `reencode_next` None: as `next_tokens` says.
        Several edits are made one after the other in the text as it then is, or from the last
        place to the first; what is pending is encoded left to right. Where the cache cannot move
        what follows, that is pending too: `edit_counts` tells, and a line in the log says why.
        Raises `UsageError` for a place that is none, an unknown token, or a text too long.
        """
        new, held = self._backend.model.checked(new_ids), self.cache.tokens
        if not 0 <= start <= stop <= len(self._tokens):
            raise UsageError(
                f"tokens {start} to {stop} cannot be replaced; the text has {len(self._tokens)}"
            )
        if len(new) > stop - start + self.room:
            raise UsageError(
                f"the edited text has {len(self._tokens) - stop + start + len(new)} tokens and the "
                f"context holds {self.config.context_tokens}; open the session with a larger one"
            )
        if start == stop and not new:
            return self.encoding.tokens
        behind = self._tokens[stop:]
        wanted = next_tokens(stop - start, len(new)) if reencode_next is None else reencode_next
        again = min(max(wanted, 0), len(behind))
        if stop + again >= held or not self.encoding.replace(start, stop, len(new), again):
            self.keep(start)
        self._rewrite(start, [*new, *behind])
        last = max(0, len(self._tokens) - max(reencode_tail, 0))
        if self.cache.tokens > last:
            self.encoding.trim(last)
        self.encoding.logits = None
        self.encoding.compact()
        return self.encoding.tokens

    def refresh(
        self, max_tokens: int | None = None, cancel: Callable[[], bool] = lambda: False
    ) -> int:
        """Encodes up to `max_tokens` stale tokens again, left to right; how many are stale then.

        For idle time: `cancel` is asked before each piece, and any may be the last. When none is
        stale the cache is what a session that computed the whole text would have, but for where
        its pages begin and for rounding, as `Session.exact` says.
        """
        left = self.config.context_tokens if max_tokens is None else max_tokens
        while left > 0 and not cancel() and (self.due() or self.encoding.staleness.stale):
            left -= max(1, run(self.refreshing(left)))
        return self.encoding.staleness.stale

    def refreshing(self, max_tokens: int) -> Work[C, int]:
        """One piece of `refresh`: how many tokens it encoded, what was pending first."""
        if not self.due() and self.encoding.staleness.stale:
            self.encoding.open_stale(min(max_tokens, self.chunk_tokens))
        before = len(self.ready())
        if before:
            yield from self.advancing(max_tokens)
        return before - len(self.due())

    def drop_stale(self) -> int:
        """Makes all from the first stale token on pending again; how many tokens are due then."""
        first = self.encoding.staleness.first_stale
        if first is None:
            return 0
        self.encoding.trim(first)
        return len(self.due())

    def due(self) -> list[int]:
        """What must go through the model before a next token can be chosen, left to right.

        What is pending, or the last token once more where its logits were dropped by a rollback.
        """
        if not self.pending_tokens:
            return self._tokens[-1:] if self.encoding.logits is None else []
        end = self._tokens[self.cache.tokens :]
        for start, stop in reversed(self.encoding.staleness.gaps):
            end[:0] = self._tokens[start:stop]
        return end

    def ready(self) -> list[int]:
        """Makes all that is due pending; the tokens, more where a cache goes back in steps."""
        due = self.due()
        if due and not self.pending_tokens:
            self.encoding.trim(len(self._tokens) - 1)
            due = self.due()
        return due

    @contextmanager
    def branch(self, at: int | None = None) -> Generator[Branch[C]]:
        """Rows after the cached tokens; those that are not committed inside are forgotten.

        `at`: they are the tokens from there on of a gap that an edit left.
        """
        held = self.encoding.logits if at is None else None
        width = 0 if self.states is None else self._backend.model.state_width
        branch = Branch(self.cache, held, self._commit, self._call, at, width)
        try:
            yield branch
        finally:
            branch.forget()

    def advancing(
        self,
        max_tokens: int | None = None,
        prediction: Prediction | None = None,
        reader: PromptReader | None = None,
    ) -> Work[C, float]:
        """Brings one piece, at most `max_tokens`, of what is due into the cache; its seconds.

        It is computed, but for what `prediction` says, in whose place `reader` may read.
        """
        self.ready()
        end = self.cache.tokens, len(self._tokens)
        (start, stop), mode = (self.encoding.staleness.gaps or [end])[0], WHOLE
        if prediction is not None and not self.encoding.staleness.gaps:
            going_on = self.encoding.staleness.is_predicted(start - 1)
            stop, mode = prediction.piece(start, stop, going_on=going_on)
        if self.cache.keeps_places:
            ends = self._backend.model.stop_ids
            stop = end_of_piece(self._tokens, start, stop, ends, self.cache.mark)
        count = min(stop - start, self.chunk_tokens, max_tokens or len(self._tokens))
        if count == 0:
            return 0.0
        if mode.predicted and reader is not None:
            ids = self._tokens[: start + count]
            seconds = yield from reader.taking(self.cache, ids, start, rope_long=self.rope_long)
            self._commit(start, ids[start:], None, predicted=True, states=None)
            return seconds
        with self.branch(start if self.encoding.staleness.gaps else None) as branch:
            # A piece that is not the last needs no logits.
            last = [count - 1][: start + count == len(self._tokens)]
            ids = self._tokens[start : start + count]
            passed = yield from branch.extend(ids, rows=last, mode=mode)
            branch.commit(range(count))
        return passed.seconds

    @contextmanager
    def forward(
        self, ids: Ids, parents: Ids | None = None, *, rows: Ids | None = None
    ) -> Generator[Branch[C]]:
        """One pass of this sequence alone over new rows, whose logits the branch then holds.

        See `Branch.extend`; leaving without `commit` forgets every row.
        """
        with self.branch() as branch:
            run(branch.extend(ids, parents, rows=rows))
            yield branch

    def fork(self) -> "TokenSequence[C]":
        """Another sequence of the same tokens over a cache of its own, of the same bytes."""
        other = TokenSequence(self._backend, self.config)
        other.restore(self.state())
        return other

    def state(self) -> SequenceState:
        """A copy of everything held."""
        return SequenceState(
            tokens=np.array(self._tokens, np.int64),
            logits=None if self.encoding.logits is None else self.encoding.logits.copy(),
            cache=self.cache.state(),
            ages=self.encoding.staleness.ages.copy(),
        )

    def restore(self, state: SequenceState) -> None:
        """Becomes `state`; unchanged when the cache refuses it with `SnapshotError`."""
        self.cache.load_state(state.cache)
        self.adopt(state.tokens.tolist(), state.logits, state.ages)

    def adopt(self, tokens: list[int], logits: Logits | None, ages: Ages) -> None:
        """Takes `tokens`, of which its cache holds the first, and the last held one's logits."""
        self._rewrite(0, tokens)
        self.encoding.became(logits, ages)

    def close(self) -> None:
        """Frees the cache's memory."""
        self.encoding.close()

    def _call(self, rows: SequencePass[C]) -> Call[C]:
        return Call(backend=self._backend, rows=rows, rope_long=self.rope_long)

    def _commit(
        self,
        first: int,
        ids: list[int],
        logits: Logits | None,
        predicted: bool,
        states: NDArray[np.float32] | None,
    ) -> None:
        """A branch's path, from token `first` on, is cached now."""
        assert self._tokens[first : first + len(ids)] == ids[: len(self._tokens) - first]
        self._tokens += ids[len(self._tokens) - first :]
        self.encoding.passed(first, first + len(ids), logits, predicted=predicted)
        if self.states is not None and states is not None:
            self.states.add(first, states)

    def _rewrite(self, kept: int, new: Ids) -> None:
        """The text is now its first `kept` tokens, and then `new`."""
        self._tokens[kept:] = new
        self._unchanged = min(self._unchanged, kept)
        if self.states is not None:
            self.states.cut(kept)
