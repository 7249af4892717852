"""Decides whose pass runs next where several pools share the processor.

Each pool has a model. Two passes at once would take as long as one after the other, and a chat's
pass would slow the one that an editor waits for. So one runs at a time, by rank and then in turn.
"""

from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from threading import Condition

from kvq_runtime.serving.scheduler import STEPS_PER_RANK


@dataclass(kw_only=True, slots=True)
class _Wish:
    """Holds the rank of a pool's next pass; it was passed over `skips` times since its last."""

    rank: int
    order: int
    skips: int = 0

    @property
    def key(self) -> tuple[int, int]:
        return max(0, self.rank - self.skips // STEPS_PER_RANK), self.order


class Turns:
    """Gives each pass its turn.

    A pool says the rank of its work once it has some, and takes it back when it has none. In
    between it keeps its place, also while it works on the answer to a pass: the next one of a
    better rank comes at once, so a pool of a worse rank waits for it.
    """

    def __init__(self) -> None:
        self._changed = Condition()
        self._wishes: dict[object, _Wish] = {}
        self._is_taken = False
        self._orders = count()

    def wish(self, pool: object, rank: int | None) -> None:
        """Says the rank (`scheduler.PRIORITIES`) of what `pool` will run next; None: nothing."""
        with self._changed:
            if rank is None:
                self._wishes.pop(pool, None)
            elif pool in self._wishes:
                self._wishes[pool].rank = rank
            else:
                self._wishes[pool] = _Wish(rank=rank, order=next(self._orders))
            self._changed.notify_all()

    @contextmanager
    def turn(self, pool: object) -> Generator[None, None, None]:
        """Waits for the turn of a pool that said what it will run, and holds it in the context."""
        with self._changed:
            mine = self._wishes[pool]
            self._changed.wait_for(lambda: not self._is_taken and self._best() is mine)
            self._is_taken = True
            for wish in self._wishes.values():
                wish.skips += 1
            mine.skips, mine.order = 0, next(self._orders)
        try:
            yield
        finally:
            with self._changed:
                self._is_taken = False
                self._changed.notify_all()

    def _best(self) -> _Wish:
        return min(self._wishes.values(), key=lambda wish: wish.key)
