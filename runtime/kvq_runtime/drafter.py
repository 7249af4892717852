"""What a drafter proposes. Knows token ids only, no model and no cache.

A drafter guesses how a text goes on; one pass of the model checks all guesses at once, and only
tokens that plain decoding would have chosen are kept (arXiv 2211.17192). No drafter is an empty
draft, so there is one loop for both.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, kw_only=True, slots=True)
class Draft:
    """Guessed tokens: a chain, or a tree when `parents` says which token each one follows.

    `parents[i]` is the place of an earlier token of the draft, or -1 for the end of the text.
    `confidence`, 0 to 1, is what its drafter thinks of the first token; it is to be compared with
    the same drafter's only.
    """

    ids: tuple[int, ...] = ()
    parents: tuple[int, ...] | None = None
    confidence: float = 0.0

    def after(self, place: int, token: int) -> int | None:
        """The place of `token` drafted right after `place` (-1: the text), or None."""
        parents = range(-1, len(self.ids) - 1) if self.parents is None else self.parents
        pairs = enumerate(zip(self.ids, parents, strict=True))
        return next((own for own, pair in pairs if pair == (token, place)), None)


NO_DRAFT = Draft()


@dataclass(frozen=True, kw_only=True, slots=True)
class Round:
    """What became of a draft, or of none.

    `tokens` followed the text: the draft's first `accepted` ones and one more. `rows` are those of
    the whole pass, which took `seconds`: `drafted` guesses among them, and in a shared pass the
    rows of other sequences.
    """

    tokens: tuple[int, ...]
    drafted: int
    accepted: int
    rows: int
    seconds: float


class Drafter(Protocol):
    """Guesses how one text goes on. It is told how the text changes, and never reads it again."""

    def follow(self, kept: int, new: Sequence[int]) -> None:
        """The text is now its first `kept` tokens as they were, and then `new`."""
        ...

    def propose(self, room: int) -> Draft:
        """At most `room` tokens that may follow the text."""
        ...

    def observe(self, outcome: Round) -> None:
        """Notes what a pass made of the last draft; `follow` tells the tokens once more."""
        ...
