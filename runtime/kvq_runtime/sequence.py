"""One sequence: its token ids, and the cache of their keys and values. Knows no sampling, no text.

The tokens a sequence holds and those its cache holds differ by a pending end: what was given or
chosen but has not been through the model. A pass adds rows to a *branch*, which forgets all that
is not committed: a prompt's piece commits every row, a verified draft the rows that were right.

An edit in the middle leaves gaps: tokens that are pending although tokens behind them are cached.

What needs a model is written as a generator that yields a `Call` and is sent a `Passed`, so that
one sequence alone (`run`) and many in one pass (`run_all`, `kvq_runtime.serving`) are served by
one code.
"""

import collections.abc
import logging
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import islice
from time import perf_counter
from typing import Any, Generic, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from kvq.errors import BackendError, CacheError, UsageError
from kvq_runtime.backends import WHOLE, Backend, C, Mode, Pass, Rows
from kvq_runtime.config import SessionConfig
from kvq_runtime.hunks import Hunk, common_prefix, hunks, one_by_one
from kvq_runtime.prediction import Prediction
from kvq_runtime.staleness import Ages, EditCounts, Staleness, next_tokens
from kvq_runtime.states import States

logger = logging.getLogger(__name__)

# A cache keeps room for what filling so many gaps takes; see `kvq.sizing.GAP_VIEWS`.
MOST_GAPS = 16
# Of so many of a chat's newest turns the ends are places to go back to, beside that of the first.
MARKED_TURNS = 3
# After an edit there is room for so many tokens more, or for what the context takes.
TOKENS_AHEAD = 256

Ids = collections.abc.Sequence[int]
Logits = NDArray[np.float32]
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, slots=True)
class Passed:
    """What a pass gave one sequence: its logits float32 [R, V].

    The pass took `seconds` for `rows` rows, those of all its sequences. `states` float32 [T,
    hidden] are those of its own rows, where they were asked for.
    """

    logits: Logits
    seconds: float
    rows: int
    states: NDArray[np.float32] | None = None


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Call(Generic[C]):
    """What one sequence asks for: a pass of `rows` through the model of `backend`."""

    backend: Backend[C]
    rows: Rows[C]
    rope_long: bool = False

    def joins(self, other: "Call[Any]") -> bool:
        """Whether both can be parts of one pass."""
        return (
            self.backend is other.backend
            and self.rows.mode == other.rows.mode
            and self.rope_long == other.rope_long
        )


Work = Generator[Call[C], Passed, T]

# Told of a path: its first token's place, its tokens, the last one's logits, whether they were
# predicted, and states of all.
Adopt = Callable[[int, list[int], Logits | None, bool, NDArray[np.float32] | None], None]


class SharedPassError(Exception):
    """Thrown into work whose pass failed beside others': it asks for the same rows again."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SequenceState:
    """A sequence at one moment: token ids int64 [n], logits float32 [V] or None, its cache.

    `ages` int32: see `Staleness`.
    """

    tokens: NDArray[np.int64]
    logits: Logits | None
    cache: bytes
    ages: Ages


class PromptReader(Protocol):
    """Another model, which reads prompts in this one's place; see `kvq_runtime.auxiliary`."""

    def taking(self, cache: Any, ids: Ids, start: int, *, rope_long: bool) -> "Work[Any, float]":
        """Gives `cache` keys and values of the tokens of `ids` from `start` on; seconds of passes.

        `cache` holds the tokens before these.
        """
        ...


class Sequence(Generic[C]):
    """Token ids and one cache. Opening it takes the cache's bytes, `close` gives them back.

    A sequence belongs to one thread at a time; after `close` every use raises `UsageError`.
    """

    def __init__(self, backend: Backend[C], config: SessionConfig) -> None:
        self.config = config
        self._backend = backend
        self._cache: C = backend.open_cache(config)
        self._closed = False
        self._tokens: list[int] = []
        self._unchanged, self._told = 0, object()
        # Of the last cached token; None: it goes through the model again before one is chosen.
        self._logits: Logits | None = None
        self._staleness = Staleness()
        self._edits = [0, 0, 0]
        self.recomputed_tokens = 0  # that were held, and could not be kept by going back
        # Those of its cached tokens, for a drafter that reads them.
        self.states: States | None = None
        # A tight budget leaves room for shorter pieces only.
        self.chunk_tokens = min(config.chunk_tokens, self._cache.chunk_tokens)

    @property
    def cache(self) -> C:
        """The cache of its keys and values. Raises `UsageError` after `close`."""
        if self._closed:
            raise UsageError("this session is closed; open another one on the engine")
        return self._cache

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
        return len(self._tokens) - self.cache.tokens + self._staleness.missing

    @property
    def staleness(self) -> Staleness:
        """How old the encoding of its tokens is."""
        return self._staleness

    @property
    def edit_counts(self) -> EditCounts:
        """What edits of this text were so far."""
        edits, tokens, recomputed = self._edits
        stale = self._staleness.stale
        return EditCounts(
            edits=edits,
            edited_tokens=tokens,
            recomputed_edits=recomputed,
            stale_tokens=stale,
            predicted_tokens=self._staleness.predicted,
        )

    @property
    def room(self) -> int:
        """Tokens the context can still take."""
        return self.config.context_tokens - len(self._tokens)

    @property
    def rope_long(self) -> bool:
        """Whether its passes use the long-context rotary table of a model that has two."""
        limit = self._backend.model.short_rope_tokens
        return limit is not None and self.config.context_tokens > limit

    def append(self, ids: Iterable[int]) -> None:
        """Adds tokens to the pending end. Raises `UsageError` for one the model does not have."""
        self._tokens += self._checked(ids)

    def keep(self, num_tokens: int) -> None:
        """Forgets all but the first `num_tokens` tokens."""
        if self.cache.tokens > num_tokens:
            self._trim(num_tokens)
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
        if not predicts and self._staleness.computed is not None:
            self.keep(self._staleness.computed)
            changes = None
        if edits:
            changes = hunks(self._tokens, ids) if changes is None else changes
            self._checked(token for hunk in changes for token in hunk.new_ids)
            for hunk in one_by_one(changes):
                self.edit(*hunk)
            return len(ids) - len(self.ready())
        shared = common_prefix(self._tokens, ids)
        new = self._checked(ids[shared:])
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
        new, held = self._checked(new_ids), self.cache.tokens
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
            return held - self._staleness.missing
        behind = self._tokens[stop:]
        wanted = next_tokens(stop - start, len(new)) if reencode_next is None else reencode_next
        again = min(max(wanted, 0), len(behind))
        if stop + again >= held or not self._moved(start, stop, len(new), again):
            self.keep(start)
        self._rewrite(start, [*new, *behind])
        last = max(0, len(self._tokens) - max(reencode_tail, 0))
        if self.cache.tokens > last:
            self._trim(last)
        self._logits = None
        self._compact()
        return self.cache.tokens - self._staleness.missing

    def _compact(self) -> None:
        """Opens what edits have left of a page, until the next tokens fit without giving any up."""
        while len(self.gaps) < MOST_GAPS:
            room = self.config.context_tokens - self.cache.tokens
            ahead = min(room, TOKENS_AHEAD) + self._staleness.missing
            runs = self.cache.crowded(ahead)
            if not runs or len(self.gaps) + len(runs) > MOST_GAPS:
                return
            for start, stop in reversed(runs):
                self._open(start, stop)

    def _moved(self, start: int, stop: int, count: int, again: int) -> bool:
        """Whether what follows an edit in the middle of what is cached was kept and moved.

        But for the next `again` tokens, which leave a gap as the `count` new ones do.
        """
        self._edits[0] += 1
        self._edits[1] += count
        reason = self.cache.why_not_edit()
        if reason is None and len(self._staleness.gaps) >= MOST_GAPS:
            reason = f"{MOST_GAPS} edits wait for a pass"
        held = self.cache.tokens
        try:
            if reason is None:
                self.cache.edit(start, stop + again, count + again)
        except CacheError as error:
            reason = str(error)
        if reason is None:
            self._staleness.edited(start, stop + again, count + again, held)
            return True
        self._edits[2] += 1
        logger.info("an edit computes %d tokens behind it again: %s", held - stop, reason)
        return False

    def refresh(
        self, max_tokens: int | None = None, cancel: Callable[[], bool] = lambda: False
    ) -> int:
        """Encodes up to `max_tokens` stale tokens again, left to right; how many are stale then.

        For idle time: `cancel` is asked before each piece, and any may be the last. When none is
        stale the cache is what a session that computed the whole text would have, but for where
        its pages begin and for rounding, as `Session.exact` says.
        """
        left = self.config.context_tokens if max_tokens is None else max_tokens
        while left > 0 and not cancel() and (self.due() or self._staleness.stale):
            left -= max(1, self.run(self.refreshing(left)))
        return self._staleness.stale

    def refreshing(self, max_tokens: int) -> Work[C, int]:
        """One piece of `refresh`: how many tokens it encoded, what was pending first."""
        if not self.due() and self._staleness.stale:
            self._open_stale(max_tokens)
        before = len(self.ready())
        if before:
            yield from self.advancing(max_tokens)
        return before - len(self.due())

    def drop_stale(self) -> int:
        """Makes all from the first stale token on pending again; how many tokens are due then."""
        first = self._staleness.first_stale
        if first is None:
            return 0
        self._trim(first)
        return len(self.due())

    def _open_stale(self, max_tokens: int) -> None:
        """Stale tokens are pending again."""
        start, end = self._staleness.next_to_refresh()
        self._open(start, min(end, start + min(max_tokens, self.chunk_tokens)))

    def _open(self, start: int, stop: int) -> None:
        """Cached tokens `start` to `stop` are pending again; what follows stays if it can."""
        held = self.cache.tokens
        try:
            if stop < held and self.cache.why_not_edit() is None:
                self.cache.edit(start, stop, stop - start)
                self._staleness.opened(start, stop, held)
                self._logits = None
                return
        except CacheError as error:
            logger.info("a refresh computes all that follows: %s", error)
        self._trim(start)

    def due(self) -> list[int]:
        """What must go through the model before a next token can be chosen, left to right.

        What is pending, or the last token once more where its logits were dropped by a rollback.
        """
        if self._last_again:
            return self._tokens[-1:]
        end = self._tokens[self.cache.tokens :]
        for start, stop in reversed(self._staleness.gaps):
            end[:0] = self._tokens[start:stop]
        return end

    def ready(self) -> list[int]:
        """Makes all that is due pending; the tokens, more where a cache goes back in steps."""
        if self._last_again:
            self._trim(len(self._tokens) - 1)
        return self.due()

    @property
    def _last_again(self) -> bool:
        return bool(self._tokens) and not self.pending_tokens and self._logits is None

    @property
    def gaps(self) -> list[tuple[int, int]]:
        """Pending tokens with cached ones behind them: (first, after the last) of each run."""
        return self._staleness.gaps

    @contextmanager
    def branch(self, at: int | None = None) -> Generator["Branch[C]"]:
        """Rows after the cached tokens; those that are not committed inside are forgotten.

        `at`: they are the tokens from there on of a gap that an edit left.
        """
        held = self._logits if at is None else None
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
        (start, stop), mode = (self.gaps or [end])[0], WHOLE
        if prediction is not None and not self.gaps:
            going_on = self._staleness.is_predicted(start - 1)
            stop, mode = prediction.piece(start, stop, going_on=going_on)
        stop = self._marked(start, stop)
        count = min(stop - start, self.chunk_tokens, max_tokens or len(self._tokens))
        if count == 0:
            return 0.0
        if mode.predicted and reader is not None:
            return (yield from self._taking(reader, start, start + count))
        with self.branch(start if self.gaps else None) as branch:
            # A piece that is not the last needs no logits.
            last = [count - 1][: start + count == len(self._tokens)]
            ids = self._tokens[start : start + count]
            passed = yield from branch.extend(ids, rows=last, mode=mode)
            branch.commit(range(count))
        return passed.seconds

    def _marked(self, start: int, stop: int) -> int:
        """Where a piece of tokens `start` to `stop` ends, so that it can be gone back there.

        Behind the first turn of a chat, often a system prompt, which other chats begin with too;
        and behind the newest, before an answer that is written again, or shortened when it is told,
        and before messages that are changed. A turn ends where an answer would. Caches that go back
        anywhere are not asked to.
        """
        ends, tokens, last = self._backend.model.stop_ids, self._tokens, len(self._tokens) - 1
        if stop - start < 2 or not ends:
            return stop
        first = next((at + 1 for at in range(last) if tokens[at] in ends), None)
        if first is None:
            return stop
        backwards = (at + 1 for at in range(last - 1, -1, -1) if tokens[at] in ends)
        places = [place for place in islice(backwards, MARKED_TURNS) if place > start]
        # The one that is marked last is kept longest: here it is used once more.
        for place in (*reversed(places), first):
            if not self.cache.mark(place):
                return stop
        return min(place for place in (first, *places, stop) if place > start)

    def _taking(self, reader: PromptReader, start: int, stop: int) -> Work[Any, float]:
        """The keys and values of tokens `start` to `stop` are those that `reader` makes."""
        ids = self._tokens[:stop]
        seconds = yield from reader.taking(self.cache, ids, start, rope_long=self.rope_long)
        self._commit(start, ids[start:], None, predicted=True, states=None)
        return seconds

    @contextmanager
    def forward(
        self, ids: Ids, parents: Ids | None = None, *, rows: Ids | None = None
    ) -> Generator["Branch[C]"]:
        """One pass of this sequence alone over new rows, whose logits the branch then holds.

        See `Branch.extend`; leaving without `commit` forgets every row.
        """
        with self.branch() as branch:
            self.run(branch.extend(ids, parents, rows=rows))
            yield branch

    def run(self, work: Work[C, T]) -> T:
        """What `work` returns, each of its passes made for this sequence alone."""
        try:
            call = next(work)
            while True:
                try:
                    passed = forward_all((call,))[0]
                except BaseException as error:  # noqa: BLE001  the branch must forget its rows
                    call = work.throw(error)
                else:
                    call = work.send(passed)
        except StopIteration as end:
            return end.value

    def fork(self) -> "Sequence[C]":
        """Another sequence of the same tokens over a cache of its own, of the same bytes."""
        other = Sequence(self._backend, self.config)
        other.restore(self.state())
        return other

    def state(self) -> SequenceState:
        """A copy of everything held."""
        return SequenceState(
            tokens=np.array(self._tokens, np.int64),
            logits=None if self._logits is None else self._logits.copy(),
            cache=self.cache.state(),
            ages=self._staleness.ages.copy(),
        )

    def restore(self, state: SequenceState) -> None:
        """Becomes `state`; unchanged when the cache refuses it with `SnapshotError`."""
        self.cache.load_state(state.cache)
        self.adopt(state.tokens.tolist(), state.logits, state.ages)

    def adopt(self, tokens: list[int], logits: Logits | None, ages: Ages) -> None:
        """Takes `tokens`, of which its cache holds the first, and the last held one's logits."""
        self._rewrite(0, tokens)
        self._staleness = Staleness(ages)
        self._logits = None if logits is None else logits.copy()

    def close(self) -> None:
        """Frees the cache's memory."""
        if not self._closed:
            self._closed = True
            self._cache.close()

    def _call(self, rows: Rows[C]) -> Call[C]:
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
        self._staleness.encoded(first, first + len(ids), predicted=predicted)
        self._logits = logits if first + len(ids) == self.cache.tokens else None
        if self.states is not None and states is not None:
            self.states.add(first, states)

    def _trim(self, num_tokens: int) -> None:
        """The cache holds at most the first `num_tokens`, and no gap at its end."""
        wanted = self._staleness.cut(num_tokens)
        self.cache.trim(wanted)
        self.recomputed_tokens += wanted - self.cache.tokens
        self._staleness.cut(self.cache.tokens)
        self._logits = None

    def _checked(self, ids: Iterable[int]) -> list[int]:
        """Tokens of the model. Raises `UsageError` for one it does not have."""
        new = list(map(int, ids))
        size = self._backend.model.vocab_size
        wrong = next((token for token in new if not 0 <= token < size), None)
        if wrong is not None:
            raise UsageError(f"token {wrong} is not one of the model's: 0 to {size - 1}")
        return new

    def _rewrite(self, kept: int, new: Ids) -> None:
        """The text is now its first `kept` tokens, and then `new`."""
        self._tokens[kept:] = new
        self._unchanged = min(self._unchanged, kept)
        if self.states is not None:
            self.states.cut(kept)


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
        call: Callable[[Rows[C]], Call[C]],
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
        of those of `ids`; such rows cannot be committed. `exact_rows`: see `Rows`; logits that are
        not all exact serve this pass only. Rows of a `mode` that guesses can only be rewound.
        `joined`: the states that a draft head reads, see `Rows`.
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
            Rows(
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


def forward_all(calls: collections.abc.Sequence[Call[Any]]) -> list[Passed]:
    """What one or many sequences asked for, in as few passes as their models and modes allow."""
    answers = dict[int, Passed]()
    for place, first in enumerate(calls):
        if place not in answers:
            together = [i for i in range(place, len(calls)) if first.joins(calls[i])]
            answers |= zip(together, _forward([calls[i] for i in together]), strict=True)
    return [answers[place] for place in range(len(calls))]


def run_all(works: Iterable[Work[Any, T]], at_once: int) -> Iterator[tuple[int, T]]:
    """What each of `works` returns, with its place among them, as they end.

    `at_once` of them share passes; the next begins when one of these has ended. Raises what any of
    them raises, and what a pass does; the others are closed.
    """
    numbered = enumerate(works)
    due = deque[tuple[int, Work[Any, T], Passed | None]](
        (place, work, None) for place, work in islice(numbered, at_once)
    )
    asking: list[tuple[int, Work[Any, T], Call[Any]]] = []
    try:
        while due:
            while due:
                place, work, passed = due.popleft()
                try:
                    asking.append((place, work, work.send(passed)))  # type: ignore[arg-type]
                except StopIteration as end:
                    yield place, end.value
                    due += ((place, work, None) for place, work in islice(numbered, 1))
            answers = forward_all([call for _, _, call in asking])
            due += ((asked[0], asked[1], one) for asked, one in zip(asking, answers, strict=True))
            asking = []
    finally:
        for _, work, _ in [*asking, *due]:
            work.close()


def _forward(calls: collections.abc.Sequence[Call[C]]) -> list[Passed]:
    """One pass over the rows of one or many sequences, and what it gave each of them."""
    started = perf_counter()
    rows, first = [call.rows for call in calls], calls[0]
    logits = first.backend.forward(Pass(rows=tuple(rows), rope_long=first.rope_long))
    seconds = perf_counter() - started
    for part, own in zip(logits, rows, strict=True):
        if len(part) != len(own.wanted):
            raise BackendError(f"the model gave {len(part)} rows of logits for {len(own.wanted)}")
    count = sum(len(own.ids) for own in rows)
    return [
        Passed(logits=part, seconds=seconds, rows=count, states=own.states)
        for part, own in zip(logits, rows, strict=True)
    ]
