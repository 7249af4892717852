"""What of a text is encoded: its cache, with the gaps that edits leave. Knows no token.

An edit in the middle leaves gaps: tokens that are pending although tokens behind them are cached.
"""

import logging
from dataclasses import dataclass
from typing import Any, Generic

import numpy as np
from numpy.typing import NDArray

from kvq.errors import CacheError, UsageError, closed
from kvq_runtime.backends import C
from kvq_runtime.passes import Logits
from kvq_runtime.staleness import Ages, EditCounts, Staleness

logger = logging.getLogger(__name__)

# A cache keeps room for what filling so many gaps takes; see `kvq.geometry.GAP_VIEWS`.
MOST_GAPS = 16
# After an edit there is room for so many tokens more, or for what the context takes.
TOKENS_AHEAD = 256

_CLOSED: Any = closed(lambda: UsageError("this session is closed; open another one on the engine"))


@dataclass(frozen=True, kw_only=True, slots=True)
class SequenceState:
    """A sequence at one moment: token ids int64 [n], logits float32 [V] or None, its cache.

    `ages` int32: see `Staleness`.
    """

    tokens: NDArray[np.int64]
    logits: Logits | None
    cache: bytes
    ages: Ages


class Encoding(Generic[C]):
    """The keys and values of a text's first tokens in a cache, and how old each of them is.

    Every use of the cache raises `UsageError` after `close`.
    `logits` are those of the last cached token; None: it goes through the model again before one is
    chosen. `recomputed_tokens` were held, and could not be kept by going back; `edited_tokens` are
    new ones in the midst of what was kept.
    """

    def __init__(self, cache: C, context_tokens: int) -> None:
        self.logits: Logits | None = None
        self.staleness = Staleness()
        self.recomputed_tokens = 0
        self.cache = cache
        self._context_tokens = context_tokens
        self._edits = self.edited_tokens = self._recomputed_edits = 0

    @property
    def tokens(self) -> int:
        """Tokens that are cached, and not in gaps."""
        return self.cache.tokens - self.staleness.missing

    @property
    def edit_counts(self) -> EditCounts:
        """What edits of this text were so far."""
        return EditCounts(
            edits=self._edits,
            edited_tokens=self.edited_tokens,
            recomputed_edits=self._recomputed_edits,
            stale_tokens=self.staleness.stale,
            predicted_tokens=self.staleness.predicted,
        )

    def became(self, logits: Logits | None, ages: Ages) -> None:
        """Its cache was filled with another text's."""
        self.staleness = Staleness(ages)
        self.logits = None if logits is None else logits.copy()

    def passed(self, first: int, stop: int, logits: Logits | None, *, predicted: bool) -> None:
        """Tokens `first` to `stop` are cached now; `logits` are the last one's."""
        if predicted or len(self.staleness.ages):
            self.staleness.encoded(first, stop, predicted=predicted)
        self.logits = logits if stop == self.cache.tokens else None

    def trim(self, num_tokens: int) -> None:
        """Holds at most the first `num_tokens`, and no gap at its end."""
        wanted = self.staleness.cut(num_tokens)
        self.cache.trim(wanted)
        self.recomputed_tokens += wanted - self.cache.tokens
        self.staleness.cut(self.cache.tokens)
        self.logits = None

    def replace(self, start: int, stop: int, count: int, again: int) -> bool:
        """Whether what follows an edit in the middle of what is cached was kept and moved.

        But for the next `again` tokens, which leave a gap as the `count` new ones do.
        """
        self._edits += 1
        self.edited_tokens += count
        reason = self.cache.why_not_edit()
        if reason is None and len(self.staleness.gaps) >= MOST_GAPS:
            reason = f"{MOST_GAPS} edits wait for a pass"
        held = self.cache.tokens
        try:
            if reason is None:
                self.cache.edit(start, stop + again, count + again)
        except CacheError as error:
            reason = str(error)
        if reason is None:
            self.staleness.edited(start, stop + again, count + again, held)
            return True
        self._recomputed_edits += 1
        logger.info("an edit computes %d tokens behind it again: %s", held - stop, reason)
        return False

    def compact(self) -> None:
        """Opens what edits have left of a page, until the next tokens fit without giving any up."""
        while len(self.staleness.gaps) < MOST_GAPS:
            room = self._context_tokens - self.cache.tokens
            ahead = min(room, TOKENS_AHEAD) + self.staleness.missing
            runs = self.cache.crowded(ahead)
            if not runs or len(self.staleness.gaps) + len(runs) > MOST_GAPS:
                return
            for start, stop in reversed(runs):
                self._open(start, stop)

    def open_stale(self, max_tokens: int) -> None:
        """Up to so many stale tokens are pending again, those that are to be encoded first."""
        start, end = self.staleness.next_to_refresh()
        self._open(start, min(end, start + max_tokens))

    def close(self) -> None:
        """Frees the cache's memory."""
        closing, self.cache = self.cache, _CLOSED
        if closing is not _CLOSED:
            closing.close()

    def _open(self, start: int, stop: int) -> None:
        """Cached tokens `start` to `stop` are pending again; what follows stays if it can."""
        held = self.cache.tokens
        try:
            if stop < held and self.cache.why_not_edit() is None:
                self.cache.edit(start, stop, stop - start)
                self.staleness.opened(start, stop, held)
                self.logits = None
                return
        except CacheError as error:
            logger.info("a refresh computes all that follows: %s", error)
        self.trim(start)
