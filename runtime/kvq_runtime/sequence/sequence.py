"""One sequence: its token ids and the cache of their keys and values.

A sequence may hold more tokens than its cache: those at its end that have not been through the
model are *pending*. A pass adds rows to a *branch*, which forgets all that is not committed. A
piece of a prompt commits every row, a verified draft the rows that were right.

The cached part of the text, with the gaps that edits leave, is an `Encoding`. Methods that need a
model return `Work`, a generator that asks for passes.
"""

import collections.abc
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from functools import partial
from time import perf_counter
from typing import TYPE_CHECKING, Generic

import numpy as np
from numpy.typing import NDArray

from kvq.errors import UsageError
from kvq_runtime.backends import WHOLE, Backend, C
from kvq_runtime.config import SessionConfig
from kvq_runtime.sequence.branch import Branch
from kvq_runtime.sequence.encoding import Encoding, SequenceState
from kvq_runtime.sequence.hunks import Hunk, common_prefix, hunks, one_by_one
from kvq_runtime.sequence.passes import Logits, PassRequest, Work, run
from kvq_runtime.sequence.staleness import Ages, next_tokens
from kvq_runtime.sequence.states import HiddenStates

if TYPE_CHECKING:
    from kvq_runtime.sequence.passages import Piece, PromptPassages
    from kvq_runtime.sequence.prediction import Prediction, PromptReader

Ids = collections.abc.Sequence[int]


class TokenSequence(Generic[C]):
    """Holds token ids and one cache; opening it takes the cache's bytes, `close` frees them.

    A sequence belongs to one thread at a time. After `close` every use raises `UsageError`.
    """

    def __init__(self, backend: Backend[C], config: SessionConfig) -> None:
        self.config = config
        self._backend = backend
        self.encoding = Encoding(backend.open_cache(config), config.context_tokens)
        self._tokens: list[int] = []
        self._unchanged, self._last_asker = 0, object()
        # Hidden states of cached tokens, for a drafter that reads them.
        self.hidden_states: HiddenStates | None = None
        limit = backend.model.short_rope_tokens
        # True: passes use the long-context rotary table of a model that has two tables.
        self.rope_long = limit is not None and config.context_tokens > limit
        # A tight budget leaves room for shorter pieces only.
        self.chunk_tokens = min(config.chunk_tokens, self.cache.chunk_tokens)

    @property
    def cache(self) -> C:
        """Returns the cache of its keys and values. Raises `UsageError` after `close`."""
        return self.encoding.cache

    @property
    def tokens(self) -> tuple[int, ...]:
        """Returns every token, pending ones included."""
        return tuple(self._tokens)

    def __len__(self) -> int:
        return len(self._tokens)

    def changes(self, asker: object) -> tuple[int, list[int]]:
        """Returns how many first tokens stayed since `asker` last asked, and the tokens after them.

        None have stayed if another asker has asked since.
        """
        kept = self._unchanged if asker is self._last_asker else 0
        self._last_asker, self._unchanged = asker, len(self._tokens)
        return kept, self._tokens[kept:]

    @property
    def pending_tokens(self) -> int:
        """Returns how many tokens have not been through the model yet."""
        return len(self._tokens) - self.encoding.tokens

    @property
    def room(self) -> int:
        """Returns how many tokens the context can still take."""
        return self.config.context_tokens - len(self._tokens)

    def append(self, ids: Iterable[int]) -> None:
        """Adds tokens to the pending end, which `ModelFacts.checked` or the model itself gave."""
        self._tokens += ids

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
        """Becomes the text `ids` and keeps the beginning that both share.

        Args:
            ids: Tokens of the new text. What is not kept of it is pending afterwards.
            edits: What follows a change is kept too, as `edit` does.
            changes: The changed places, where they are known. None: the two texts are compared.
            predicts: Predicted tokens may be kept. Otherwise they are computed.

        Returns:
            How many tokens of `ids` need not be computed.
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
        """Replaces tokens `start` to `stop` by `new_ids` and keeps the encoding of what follows.

        What follows keeps its keys and values and moves (PIE, 2407.03157). No model runs here:
        `new_ids` and the tokens that are encoded again are pending afterwards and are encoded left
        to right. Several edits are made one after the other in the text as it then is, or from the
        last place to the first. Where the cache cannot move what follows, that is pending too;
        `Encoding.edit_counts` counts this, and the log says why.

        Args:
            start: First token that is replaced.
            stop: The token after the last one that is replaced.
            new_ids: Tokens of the new text.
            reencode_next: How many tokens after the edit are encoded again. None: as `next_tokens`
                says.
            reencode_tail: How many of the text's last tokens are encoded again.

        Returns:
            How many tokens are kept as computed.

        Raises:
            UsageError: For a place outside the text, a token that the model lacks, or a text that
                is too long.
        """
        new, cached_tokens = self._backend.model.checked(new_ids), self.cache.tokens
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
        tail = self._tokens[stop:]
        next_count = next_tokens(stop - start, len(new)) if reencode_next is None else reencode_next
        again = min(max(next_count, 0), len(tail))
        if stop + again >= cached_tokens or not self.encoding.replace(start, stop, len(new), again):
            self.keep(start)
        self._rewrite(start, [*new, *tail])
        last = max(0, len(self._tokens) - max(reencode_tail, 0))
        if self.cache.tokens > last:
            self.encoding.trim(last)
        self.encoding.logits = None
        self.encoding.compact()
        return self.encoding.tokens

    def refresh(
        self, max_tokens: int | None = None, cancel: Callable[[], bool] = lambda: False
    ) -> int:
        """Encodes stale tokens again, left to right, and returns how many are stale then.

        This is for idle time. When no token is stale, the cache is what a session that computed the
        whole text would have, except for rounding and for where its pages begin, as `Session.exact`
        says.

        Args:
            max_tokens: How many tokens are encoded again at most. None: all.
            cancel: Asked before each piece. Once it returns True no further piece is encoded.
        """
        remaining = self.config.context_tokens if max_tokens is None else max_tokens
        while remaining > 0 and not cancel() and (self.due() or self.encoding.staleness.stale):
            remaining -= max(1, run(self.refreshing(remaining)))
        return self.encoding.staleness.stale

    def refreshing(self, max_tokens: int) -> Work[C, int]:
        """Does one piece of `refresh`; returns how many tokens it encoded, pending ones first."""
        if not self.due() and self.encoding.staleness.stale:
            self.encoding.open_stale(min(max_tokens, self.chunk_tokens))
        before = len(self.ready())
        if before:
            yield from self.advancing(max_tokens)
        return before - len(self.due())

    def drop_stale(self) -> int:
        """Makes all from the first stale token on pending; returns how many tokens are due then."""
        first = self.encoding.staleness.first_stale
        if first is None:
            return 0
        self.encoding.trim(first)
        return len(self.due())

    def due(self) -> list[int]:
        """Returns the tokens that go through the model before the next one is chosen.

        These are the pending tokens, left to right, or the last token once more where a rollback
        dropped its logits.
        """
        pending = self._pending()
        if not pending and self.encoding.logits is None:
            return self._tokens[-1:]
        return pending

    def ready(self) -> list[int]:
        """Makes all that is due pending and returns it.

        It may be more than `due` returned, where the cache can go back in steps only.
        """
        pending = self._pending()
        if not pending and self._tokens and self.encoding.logits is None:
            self.encoding.trim(len(self._tokens) - 1)
            return self._pending()
        return pending

    def _pending(self) -> list[int]:
        """Returns the tokens that have not been through the model, left to right."""
        pending = self._tokens[self.encoding.cache.tokens :]
        for start, stop in reversed(self.encoding.staleness.gaps):
            pending[:0] = self._tokens[start:stop]
        return pending

    def branch(self, at: int | None = None, *, states: bool = False) -> Branch[C]:
        """Opens a branch after the cached tokens; rows that are not committed inside are forgotten.

        With `at` the rows are tokens of a gap that an edit left, from this token on. With `states`
        its passes give the hidden states of their rows.
        """
        last_logits = self.encoding.logits if at is None else None
        states = states or self.hidden_states is not None
        width = self._backend.model.state_width if states else 0
        request = partial(PassRequest, backend=self._backend, rope_long=self.rope_long)
        return Branch(self.encoding.cache, last_logits, self._commit, request, at, width)

    def advancing(
        self,
        max_tokens: int | None = None,
        prediction: "Prediction | None" = None,
        reader: "PromptReader | None" = None,
        passages: "PromptPassages | None" = None,
    ) -> Work[C, float]:
        """Brings one piece of what is due into the cache; returns the seconds of its passes.

        Args:
            max_tokens: Tokens of the piece at most. None: as many as one pass takes.
            prediction: Which tokens are predicted instead of computed. None: no token.
            reader: Reads the predicted tokens instead of this model.
            passages: Texts whose keys and values are taken over where they are known. None: none.
        """
        self.ready()
        cache = self.cache
        end = cache.tokens, len(self._tokens)
        (start, stop), mode = (self.encoding.staleness.gaps or [end])[0], WHOLE
        if prediction is not None and not self.encoding.staleness.gaps:
            continues = self.encoding.staleness.is_predicted(start - 1)
            stop, mode = prediction.piece(start, stop, continues=continues)
        if cache.keeps_places:
            from kvq_runtime.sequence.turns import end_of_piece

            ends = self._backend.model.stop_ids
            stop = end_of_piece(self._tokens, start, stop, ends, cache.mark)
        at = start if self.encoding.staleness.gaps else None
        piece = None if passages is None or mode.predicted else passages.piece(start, stop)
        if passages is not None and piece is not None:
            stop = piece.stop
            if piece.passage is not None:
                return self._take_over(passages, piece, start, at)
        count = min(stop - start, self.chunk_tokens, max_tokens or len(self._tokens))
        if count == 0:
            return 0.0
        copied = None if piece is None else piece.place
        if copied is not None:
            count = min(count, self.config.plan.tail_tokens)
        if mode.predicted and reader is not None:
            ids = self._tokens[: start + count]
            seconds = yield from reader.filling(cache, ids, start, rope_long=self.rope_long)
            self._commit(start, ids[start:], None, predicted=True, hidden_states=None)
            return seconds
        with self.branch(at) as branch:
            # A piece that is not the last needs no logits.
            last = [count - 1][: start + count == len(self._tokens)]
            ids = self._tokens[start : start + count]
            result = yield from branch.extend(ids, rows=last, mode=mode)
            branch.commit(range(count))
        if passages is not None and copied is not None:
            passages.copy(cache, copied, start, start + count, rope_long=self.rope_long)
        return result.seconds

    def _take_over(
        self, passages: "PromptPassages", piece: "Piece", start: int, at: int | None
    ) -> float:
        """Takes a piece of a passage over, as much as one pass may bring; returns the seconds."""
        began = perf_counter()
        stop = min(piece.stop, start + self.chunk_tokens)
        passages.take(self.cache, piece, start, stop, at=at, rope_long=self.rope_long)
        self.encoding.mark_encoded(start, stop, None, from_passage=True)
        return perf_counter() - began

    @contextmanager
    def forward(
        self, ids: Ids, parents: Ids | None = None, *, rows: Ids | None = None
    ) -> Generator[Branch[C]]:
        """Makes one pass of this sequence alone over new rows; the branch then holds their logits.

        See `Branch.extend`. Leaving without `commit` forgets every row.
        """
        with self.branch() as branch:
            run(branch.extend(ids, parents, rows=rows))
            yield branch

    def fork(self) -> "TokenSequence[C]":
        """Returns another sequence of the same tokens, over a cache of its own."""
        other = TokenSequence(self._backend, self.config)
        other.restore(self.state())
        return other

    def state(self) -> SequenceState:
        """Copies everything that the sequence holds."""
        return SequenceState(
            tokens=np.array(self._tokens, np.int64),
            logits=None if self.encoding.logits is None else self.encoding.logits.copy(),
            cache=self.cache.state(),
            ages=self.encoding.staleness.ages.copy(),
        )

    def restore(self, state: SequenceState) -> None:
        """Becomes `state`; raises `SnapshotError` and changes nothing when the cache refuses it."""
        self.cache.load_state(state.cache)
        self.adopt(state.tokens.tolist(), state.logits, state.ages)

    def adopt(self, tokens: list[int], logits: Logits | None, ages: Ages) -> None:
        """Takes over `tokens`, the first of which are cached, and the last cached one's logits."""
        self._rewrite(0, tokens)
        self.encoding.adopt(logits, ages)

    def close(self) -> None:
        self.encoding.close()

    def _commit(
        self,
        first: int,
        ids: list[int],
        logits: Logits | None,
        predicted: bool,
        hidden_states: NDArray[np.float32] | None,
    ) -> None:
        """Notes that a branch's path, from token `first` on, is cached."""
        assert self._tokens[first : first + len(ids)] == ids[: len(self._tokens) - first]
        self._tokens += ids[len(self._tokens) - first :]
        self.encoding.mark_encoded(first, first + len(ids), logits, predicted=predicted)
        if self.hidden_states is not None and hidden_states is not None:
            self.hidden_states.add(first, hidden_states)

    def _rewrite(self, kept: int, new: Ids) -> None:
        """Replaces the text after its first `kept` tokens by `new`."""
        self._tokens[kept:] = new
        self._unchanged = min(self._unchanged, kept)
        if self.hidden_states is not None:
            self.hidden_states.cut(kept)
