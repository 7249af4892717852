"""Which guesses are worth a row each: a tree grown from the likeliest one on. Knows no drafter."""

from collections.abc import Callable, Sequence
from heapq import heappop, heappush
from typing import TypeVar

from kvq_runtime.drafter import Draft

S = TypeVar("S")
# A token, the chance that it follows if what is before it is right, and where that leads.
Child = tuple[int, float, S]


def grown(room: int, root: S, children: Callable[[S], Sequence[Child[S]]]) -> Draft:
    """The tree of at most `room` tokens that the most are right of.

    `children` of a place come likeliest first. The tokens are those of the largest chance that
    they and all before them are right, in this order, so that the first n are the best tree of n:
    what Sequoia (arXiv 2402.12374) finds by dynamic programming where chances depend on ranks
    alone, and DySpec (2410.11744) by this heap where they do not.
    """
    heap: list[tuple[float, int, int, int, Sequence[Child[S]]]] = []
    ids, parents, chances = list[int](), list[int](), list[float]()

    def offer(place: int, likely: float, siblings: Sequence[Child[S]], own: int) -> None:
        if own < len(siblings):
            heappush(heap, (-likely * siblings[own][1], len(ids), place, own, siblings))

    offer(-1, 1.0, children(root), 0)
    while heap and len(ids) < room:
        negative, _, place, own, siblings = heappop(heap)
        token, chance, state = siblings[own]
        offer(place, -negative / chance if chance else 0.0, siblings, own + 1)
        ids.append(token)
        parents.append(place)
        chances.append(chance)
        if len(ids) < room:
            offer(len(ids) - 1, -negative, children(state), 0)
    return Draft(ids=tuple(ids), parents=tuple(parents), chances=tuple(chances))
