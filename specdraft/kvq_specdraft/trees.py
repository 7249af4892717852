"""Grows the tree of guesses that are worth a row each, the likeliest first."""

from collections.abc import Callable, Sequence
from heapq import heappop, heappush
from typing import TypeVar

from kvq_runtime.answer.drafter import Draft

S = TypeVar("S")
# A token, the chance that it follows if all before it is right, and the state after it.
Child = tuple[int, float, S]


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
