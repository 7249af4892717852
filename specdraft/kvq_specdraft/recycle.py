"""The drafter `recycle`: what the model thought likely the last time it read the same token."""

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from kvq_runtime.answer.drafter import NO_DRAFT, Draft, Drafter, Round
from kvq_runtime.answer.sampling import largest

# Successors stored for each token.
_RANKS = 8
# First chances that the model's first, second, .. choice after a token comes after it again; they
# were counted in texts that the bench does not have.
_CHANCES = (0.30, 0.10, 0.06, 0.04, 0.03, 0.02, 0.02, 0.01)
# Weight of the newest token in these chances.
_NEWEST = 0.01

S = TypeVar("S")
# A token, the chance that it follows if all before it is right, and the state after it.
Child = tuple[int, float, S]


@dataclass(kw_only=True, eq=False)
class Recycle(Drafter):
    """Proposes a tree of the tokens that the model's logits had on top after each token.

    Token Recycling (arXiv 2408.08696) keeps a matrix [V, 8] of each token's likeliest successors at
    the time it last went through the model, in the text or in a guess, right or wrong, and a fixed
    tree over it. Here the tree is the best of its size, by how often each rank came true in this
    session (`grow_tree`). Logits are taken as the check left them, of which often only the
    largest are exact. It stores 32 bytes for each token of the vocabulary that was read. It has no
    options.
    """

    branches = True

    def __post_init__(self) -> None:
        self._text = array("i")
        self._chances = list(_CHANCES)
        # Stored as token + 1, so that memory that was never written means no token.
        self._successors: NDArray[np.int32] | None = None

    def follow(self, kept: int, new: Sequence[int]) -> None:
        del self._text[kept:]
        self._text.extend(new)

    def propose(self, room: int) -> Draft:
        if self._successors is None or not self._text:
            return NO_DRAFT
        draft = grow_tree(room, self._text[-1], self._children)
        return draft if draft.ids else NO_DRAFT

    def observe(self, outcome: Round) -> None:
        """Stores the likeliest successors after the text and after every guess."""
        if self._successors is None:
            self._successors = np.zeros((outcome.logits.shape[1], _RANKS), np.int32)
        before = (self._text[-1], *outcome.draft.ids)
        for place, token in zip((-1, *outcome.path), outcome.tokens, strict=True):
            self._rate(before[place + 1], token)
        for token, logits in zip(before, outcome.logits, strict=True):
            likeliest = largest(logits, _RANKS)
            self._successors[token, : len(likeliest)] = likeliest + 1

    def _children(self, token: int) -> list[Child[int]]:
        """Returns the tokens that may follow `token`, likeliest first."""
        assert self._successors is not None
        row = self._successors[token].tolist()
        ranked = zip(row, self._chances, strict=True)
        return [(stored - 1, chance, stored - 1) for stored, chance in ranked if stored]

    def _rate(self, token: int, successor: int) -> None:
        """Updates the chances of the ranks by the `successor` that came after `token`."""
        assert self._successors is not None
        row = self._successors[token].tolist()
        if row[0]:
            for rank, chance in enumerate(self._chances):
                self._chances[rank] += _NEWEST * ((row[rank] == successor + 1) - chance)


def grow_tree(room: int, root: S, children: Callable[[S], Sequence[Child[S]]]) -> Draft:
    """Returns the tree of at most `room` tokens with the most right tokens on average.

    It takes the tokens with the largest chance that they and all before them are right, in this
    order. So the first n tokens are the best tree of n. Sequoia (arXiv 2402.12374) finds this by
    dynamic programming where chances depend on ranks alone, and DySpec (arXiv 2410.11744) by this
    heap where they do not.

    Args:
        room: The most tokens.
        root: The state at the end of the text.
        children: Returns the tokens that may follow a state, likeliest first.
    """
    heap: list[tuple[float, int, int, int, Sequence[Child[S]]]] = []
    ids, parents, chances = list[int](), list[int](), list[float]()

    def offer(parent: int, chance: float, siblings: Sequence[Child[S]], rank: int) -> None:
        if rank < len(siblings):
            heappush(heap, (-chance * siblings[rank][1], len(ids), parent, rank, siblings))

    offer(-1, 1.0, children(root), 0)
    while heap and len(ids) < room:
        negative, _, parent, rank, siblings = heappop(heap)
        token, chance, state = siblings[rank]
        offer(parent, -negative / chance if chance else 0.0, siblings, rank + 1)
        ids.append(token)
        parents.append(parent)
        chances.append(chance)
        if len(ids) < room:
            offer(len(ids) - 1, -negative, children(state), 0)
    return Draft(ids=tuple(ids), parents=tuple(parents), chances=tuple(chances))
