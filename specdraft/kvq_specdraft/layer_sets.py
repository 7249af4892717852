"""Which layers to leave out: CLaSp's dynamic program, and a memory of sets. Knows no model."""

import numpy as np
from numpy.typing import NDArray

States = NDArray[np.float32]

# Sets that are kept, and how alike two texts must be to be of one kind.
_MOST_KINDS = 32
_ALIKE = 0.6
_BUCKETS = 1024


class Choosing:
    """CLaSp's choice (arXiv 2505.24196, algorithm 1) of `count` of `num_layers` layers.

    Asks for states of the stream one by one: `wanted` names the layers left out of the pass whose
    states [n, V], rows of length 1, `take` is to be given; None: `best` is known. After layer i
    with j of the first i left out, the state kept is the one closest to the whole model's after
    layer i: either layer i is left out as well, or it runs.
    """

    def __init__(self, *, num_layers: int, count: int) -> None:
        self.best: tuple[int, ...] = ()
        self._layers = num_layers
        self._count = count
        self._layer = 0
        # The whole model's state after the layer; of each j the best set and its state.
        self._whole: States | None = None
        self._sets: dict[int, tuple[tuple[int, ...], States | None]] = {0: ((), None)}
        self._next: dict[int, tuple[tuple[int, ...], States | None]] = {}

    def wanted(self) -> tuple[int, ...] | None:
        """Layers left out of the pass that comes next; None: the choice is made."""
        if self._layer == self._layers:
            return None
        return (*self._asked(), *range(self._layer + 1, self._layers))

    def take(self, states: States) -> None:
        """The states of the pass asked for."""
        if self._whole is None:
            self._whole = states
        self._decide(len(self._next), states)
        if len(self._next) > min(self._count, self._layer):
            self._advance()

    def _asked(self) -> tuple[int, ...]:
        """The set whose state the layer runs on."""
        return self._sets[len(self._next)][0]

    def _decide(self, left_out: int, ran: States) -> None:
        """Keeps the better way to have left out so many layers after this one."""
        way = (self._sets[left_out][0], ran)
        if left_out and left_out - 1 in self._sets:
            fewer, state = self._sets[left_out - 1]
            if state is not None and self._closeness(state) > self._closeness(ran):
                way = ((*fewer, self._layer), state)
        self._next[left_out] = way

    def _advance(self) -> None:
        """On to the next layer."""
        first = self._layer + 1
        if first <= self._count:
            fewer, state = self._sets[first - 1]
            self._next[first] = ((*fewer, self._layer), state)
        self._sets, self._next, self._whole = self._next, {}, None
        self._layer += 1
        if self._layer == self._layers:
            self.best = self._sets[self._count][0]

    def _closeness(self, states: States) -> float:
        assert self._whole is not None
        return float((states * self._whole).sum(axis=1).mean())


class Kinds:
    """Layer sets by kind of text, the newest; kinds are told apart by how often tokens occur."""

    def __init__(self) -> None:
        self._known: list[tuple[NDArray[np.float64], tuple[int, ...]]] = []

    def nearest(self, tokens: list[int]) -> tuple[int, ...] | None:
        """The set of the text most like this one; None: there is none alike."""
        own = _counts(tokens)
        alike = [(float(own @ other), layers) for other, layers in self._known]
        closest, layers = max(alike, default=(0.0, ()))
        return layers if closest >= _ALIKE else None

    def keep(self, tokens: list[int], layers: tuple[int, ...]) -> None:
        """Remembers the set of a text, and forgets the oldest of too many."""
        self._known = [*self._known[1 - _MOST_KINDS :], (_counts(tokens), layers)]


def _counts(tokens: list[int]) -> NDArray[np.float64]:
    """Roots of how often tokens occur, by buckets of ids, as a row of length 1."""
    counts = np.sqrt(np.bincount(np.array(tokens, np.int64) % _BUCKETS, minlength=_BUCKETS))
    return counts / max(1.0, float(np.linalg.norm(counts)))
