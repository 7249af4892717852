"""Lookahead decoding: guesses that the model made of its own guesses."""

from array import array
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from kvq.errors import UsageError
from kvq_runtime.drafter import NO_DRAFT, Draft, Drafter, Round

# Tokens that n-grams are kept of; the oldest are forgotten.
_POOL_TOKENS = 4096


@dataclass(kw_only=True, eq=False)
class Lookahead(Drafter):
    """Runs a window of guesses through the model and proposes what this gave before.

    Lookahead decoding (arXiv 2402.02057). A pass carries a window of `window` guesses after the
    text; what the model would write after each of them is the next pass's window (Jacobi
    iteration), and the `ngram` tokens that follow one another along `ngram` windows are kept. Up to
    `most` of those kept that begin with the text's last token are branches of the same draft.
    Departure: a window's tokens see the same window before them, and not those of the passes
    before, so that a window costs as many rows as it has tokens and not `ngram` - 1 times as many.

    It is here to be measured: rows cost time on a CPU, and it spends more of them for a token
    than any other drafter (2 to 7 for 0.1 to 0.3 tokens); see `apps/lab/log/drafts.md`.
    """

    ngram: int = 3
    window: int = 4
    most: int = 2

    branches = True

    def __post_init__(self) -> None:
        least = {"ngram": 2, "window": 1, "most": 1}
        for name, low in least.items():
            if getattr(self, name) < low:
                raise UsageError(
                    about="draft",
                    value=f"lookahead: {name}={getattr(self, name)}",
                    possible=f"{low} or more",
                )
        self._text = array("i")
        # Guesses of the last passes by where in the text the first one stands, newest last.
        self._windows: deque[_Placed] = deque(maxlen=self.ngram - 1)
        # What the model would have written there.
        self._written = _Placed(0, ())
        self._pool: dict[int, deque[tuple[int, ...]]] = {}

    def follow(self, kept: int, new: Sequence[int]) -> None:
        """See `Drafter`."""
        del self._text[kept:]
        self._text.extend(new)

    def propose(self, room: int) -> Draft:
        """See `Drafter`."""
        if not self._text:
            return NO_DRAFT
        ids, parents = list[int](), list[int]()
        first = len(self._text)
        written = list(self._written.since(first)) or [self._text[-1]]
        guesses = (written + written[-1:] * self.window)[: min(self.window, room)]
        self._windows.append(_Placed(first, tuple(guesses)))
        # The window comes first, so that its rows are known.
        for branch in (guesses, *reversed(self._pool.get(self._text[-1], ()))):
            length = min(len(branch), room - len(ids))
            parents += [-1, *range(len(ids), len(ids) + length - 1)][:length]
            ids += branch[:length]
        return Draft(ids=tuple(ids), parents=tuple(parents))

    def observe(self, outcome: Round) -> None:
        """Notes what the model would write after each guess of the window."""
        if not outcome.drafted:
            return
        first, guesses = self._windows[-1]
        rows = outcome.logits[: 1 + len(guesses)]
        self._written = _Placed(first, tuple(rows.argmax(axis=1).tolist()))
        for last in range(first, first + len(rows)):
            begin = last - self.ngram + 1
            path = [one.at(begin + place) for place, one in enumerate(self._windows)]
            if len(path) == self.ngram - 1 and None not in path:
                self._keep((*(one for one in path if one is not None), self._written.at(last)))

    def _keep(self, ngram: Sequence[int | None]) -> None:
        """Notes that the rest of `ngram` may follow its first token."""
        first, rest = ngram[0], tuple(one for one in ngram[1:] if one is not None)
        assert first is not None
        kept = self._pool.pop(first, None) or deque(maxlen=self.most)
        if rest in kept:
            kept.remove(rest)
        kept.append(rest)
        self._pool[first] = kept
        if len(self._pool) > _POOL_TOKENS:
            del self._pool[next(iter(self._pool))]


class _Placed(NamedTuple):
    """Tokens that stand, or might, from position `first` of a text on."""

    first: int
    tokens: tuple[int, ...]

    def at(self, position: int) -> int | None:
        """The token at `position`, or None."""
        place = position - self.first
        return self.tokens[place] if 0 <= place < len(self.tokens) else None

    def since(self, position: int) -> tuple[int, ...]:
        """Those from `position` on."""
        return self.tokens[max(0, position - self.first) :]
