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
    """

    ids: tuple[int, ...] = ()
    parents: tuple[int, ...] | None = None

    def after(self, place: int, token: int) -> int | None:
        """The place of `token` drafted right after `place` (-1: the text), or None."""
        parents = range(-1, len(self.ids) - 1) if self.parents is None else self.parents
        pairs = enumerate(zip(self.ids, parents, strict=True))
        return next((own for own, pair in pairs if pair == (token, place)), None)


NO_DRAFT = Draft()


class Drafter(Protocol):
    """Guesses how a text goes on."""

    def propose(self, tokens: Sequence[int], room: int) -> Draft:
        """At most `room` tokens that may follow `tokens`."""
        ...

    def observe(self, accepted: Sequence[int]) -> None:
        """Notes what really followed, accepted guesses included."""
        ...
