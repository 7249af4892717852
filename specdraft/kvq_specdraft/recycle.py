"""Token Recycling: what the model thought of before after the same token."""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvq_runtime.drafter import NO_DRAFT, Draft, Drafter, Round
from kvq_runtime.sampling import largest
from kvq_specdraft.trees import Child, grown

# Successors kept of each token.
_RANKS = 8
# How often the model's last first, second, .. choice after a token came after it again, in texts
# that the bench does not have; a session's own rounds move it.
_CHANCES = (0.30, 0.10, 0.06, 0.04, 0.03, 0.02, 0.02, 0.01)
_NEWEST = 0.01


@dataclass(kw_only=True, eq=False)
class Recycle(Drafter):
    """Proposes a tree of the successors that the model's logits last had on top, token by token.

    Token Recycling (arXiv 2408.08696): a matrix [V, 8] of each token's likeliest successors when
    it last went through the model, in the text or in a guess, right or wrong, and a fixed tree over
    it. Departures: the tree is the best of its size by how often each rank came true in this
    session (`trees.grown`); logits are taken as the check left them, of which often only the
    largest are exact. 32 bytes for each token of the vocabulary that was met.
    """

    branches = True

    def __post_init__(self) -> None:
        self._text = array("i")
        self._chances = list(_CHANCES)
        # Tokens are kept as one more, so that memory that was never written says none.
        self._successors: NDArray[np.int32] | None = None

    def follow(self, kept: int, new: Sequence[int]) -> None:
        """See `Drafter`."""
        del self._text[kept:]
        self._text.extend(new)

    def propose(self, room: int) -> Draft:
        """See `Drafter`."""
        if self._successors is None or not self._text:
            return NO_DRAFT
        draft = grown(room, self._text[-1], self._children)
        return draft if draft.ids else NO_DRAFT

    def observe(self, outcome: Round) -> None:
        """Notes the likeliest successors after the text and after every guess."""
        if self._successors is None:
            self._successors = np.zeros((outcome.logits.shape[1], _RANKS), np.int32)
        before = (self._text[-1], *outcome.draft.ids)
        for place, token in zip((-1, *outcome.path), outcome.tokens, strict=True):
            self._rate(before[place + 1], token)
        for token, logits in zip(before, outcome.logits, strict=True):
            found = largest(logits, _RANKS)
            self._successors[token, : len(found)] = found + 1

    def _children(self, token: int) -> list[Child[int]]:
        """What may follow `token`, likeliest first."""
        assert self._successors is not None
        row = self._successors[token].tolist()
        return [(one - 1, own, one - 1) for one, own in zip(row, self._chances, strict=True) if one]

    def _rate(self, token: int, successor: int) -> None:
        """`successor` came after `token`: which of those that were kept was right."""
        assert self._successors is not None
        row = self._successors[token].tolist()
        if row[0]:
            for rank, chance in enumerate(self._chances):
                self._chances[rank] += _NEWEST * ((row[rank] == successor + 1) - chance)
