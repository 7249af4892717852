"""The encoded part of a text: its cache, with the gaps that edits leave.

A gap is a run of tokens that are not encoded although tokens after them are. An edit in the middle
leaves one.
"""

import logging
from dataclasses import dataclass
from typing import Any, Generic

import numpy as np
from numpy.typing import NDArray

from kvq.errors import CacheError, UsageError, closed
from kvq_runtime.backends import C
from kvq_runtime.sequence.passes import Logits
from kvq_runtime.sequence.staleness import Ages, EditCounts, Staleness

logger = logging.getLogger(__name__)

# A cache has room for the views that filling so many gaps takes, see `csrc/layout.h`.
MOST_GAPS = 16
# After an edit there is room for so many tokens more, or for the rest of the context.
TOKENS_AHEAD = 256

_CLOSED: Any = closed(lambda: UsageError("this session is closed; open another one on the engine"))


@dataclass(frozen=True, kw_only=True, slots=True)
class SequenceState:
    """Holds a sequence at one moment: token ids int64 [n], logits float32 [V] or None, its cache.

    `ages` int32: see `Staleness`.
    """

    tokens: NDArray[np.int64]
    logits: Logits | None
    cache: bytes
    ages: Ages


class Encoding(Generic[C]):
    """Holds the keys and values of a text's first tokens, and how old each of them is.

    `logits` are those of the last cached token. None: this token goes through the model again
    before the next one is chosen. `taken_tokens` counts tokens whose keys and values came from
    another text. `recomputed_tokens` counts tokens that had to be computed again
    because the cache could not go back exactly. `edited_tokens` counts new tokens in the middle of
    kept text. After `close` every use of the cache raises `UsageError`.
    """

    def __init__(self, cache: C, context_tokens: int) -> None:
        self.logits: Logits | None = None
        self.staleness = Staleness()
        self.recomputed_tokens = self.taken_tokens = 0
        self.cache = cache
        self._context_tokens = context_tokens
        self._edits = self.edited_tokens = self._recomputed_edits = 0

    @property
    def tokens(self) -> int:
        """Returns how many tokens are cached, without those in gaps."""
        return self.cache.tokens - self.staleness.missing

    @property
    def edit_counts(self) -> EditCounts:
        """Returns the counts of this text's edits so far."""
        return EditCounts(
            edits=self._edits,
            edited_tokens=self.edited_tokens,
            recomputed_edits=self._recomputed_edits,
            taken_tokens=self.taken_tokens,
            stale_tokens=self.staleness.stale,
            predicted_tokens=self.staleness.predicted,
        )

    def adopt(self, logits: Logits | None, ages: Ages) -> None:
        """Takes over the logits and ages of the text that the cache was filled with."""
        self.staleness = Staleness(ages)
        self.logits = None if logits is None else logits.copy()

    def mark_encoded(
        self,
        first: int,
        stop: int,
        logits: Logits | None,
        *,
        predicted: bool = False,
        from_passage: bool = False,
    ) -> None:
        """Notes that tokens `first` to `stop` are cached; `logits` are those of the last one.

        They were computed, or only `predicted`, or came `from_passage`, of another text.
        """
        self.taken_tokens += (stop - first) * from_passage
        if predicted or from_passage or len(self.staleness.ages):
            self.staleness.mark_encoded(first, stop, predicted=predicted, from_passage=from_passage)
        self.logits = logits if stop == self.cache.tokens else None

    def trim(self, num_tokens: int) -> None:
        """Keeps at most the first `num_tokens` tokens, without a gap at the end."""
        target_tokens = self.staleness.cut(num_tokens)
        self.cache.trim(target_tokens)
        self.recomputed_tokens += target_tokens - self.cache.tokens
        self.staleness.cut(self.cache.tokens)
        self.logits = None

    def replace(self, start: int, stop: int, count: int, again: int) -> bool:
        """Makes room for an edit in the cached part; says whether what follows was kept.

        Tokens `start` to `stop` give way to a gap of `count` tokens. The next `again` tokens become
        a part of the gap, so that they are encoded again.
        """
        self._edits += 1
        self.edited_tokens += count
        reason = self.cache.why_not_edit()
        if reason is None and len(self.staleness.gaps) >= MOST_GAPS:
            reason = f"{MOST_GAPS} edits wait for a pass"
        cached_tokens = self.cache.tokens
        try:
            if reason is None:
                self.cache.edit(start, stop + again, count + again)
        except CacheError as error:
            reason = str(error)
        if reason is None:
            self.staleness.mark_edited(start, stop + again, count + again, cached_tokens)
            return True
        self._recomputed_edits += 1
        logger.info("an edit computes %d tokens behind it again: %s", cached_tokens - stop, reason)
        return False

    def compact(self) -> None:
        """Opens gaps where edits left pages half empty, until the next tokens fit."""
        while len(self.staleness.gaps) < MOST_GAPS:
            room = self._context_tokens - self.cache.tokens
            ahead = min(room, TOKENS_AHEAD) + self.staleness.missing
            runs = self.cache.crowded(ahead)
            if not runs or len(self.staleness.gaps) + len(runs) > MOST_GAPS:
                return
            for start, stop in reversed(runs):
                self._open(start, stop)

    def open_stale(self, max_tokens: int) -> None:
        """Makes up to `max_tokens` stale tokens pending, those that are to be encoded first."""
        start, end = self.staleness.next_to_refresh()
        self._open(start, min(end, start + max_tokens))

    def close(self) -> None:
        """Frees the cache's memory."""
        closing, self.cache = self.cache, _CLOSED
        if closing is not _CLOSED:
            closing.close()

    def _open(self, start: int, stop: int) -> None:
        """Makes cached tokens `start` to `stop` pending; keeps what follows if the cache can."""
        cached_tokens = self.cache.tokens
        try:
            if stop < cached_tokens and self.cache.why_not_edit() is None:
                self.cache.edit(start, stop, stop - start)
                self.staleness.mark_pending(start, stop, cached_tokens)
                self.logits = None
                return
        except CacheError as error:
            logger.info("a refresh computes all that follows: %s", error)
        self.trim(start)
