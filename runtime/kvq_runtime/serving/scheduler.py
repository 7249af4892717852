"""Decides which job runs next, by ranks, order and counts, and which of several pools.

Waiting jobs get slots by rank, and first come first served inside a rank. Running jobs take turns
by rank, and round-robin inside a rank, so that a long prompt never blocks a short request. A job
that is passed over too often rises a rank, so that no job starves.
"""

from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from threading import Condition
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvq_runtime.serving.job import Job

# Ranks by name: a smaller one goes first.
PRIORITIES = {"completion": 0, "chat": 1, "batch": 2}

# A waiting job rises a rank after so many overtakes, a running one after so many steps.
OVERTAKES_PER_RANK = 8
STEPS_PER_RANK = 16


@dataclass(kw_only=True, slots=True, eq=False)
class _Entry:
    job: "Job"
    order: int
    skips: int = 0

    def rank(self, patience: int) -> int:
        return max(0, self.job.rank - self.skips // patience)


class Scheduler:
    """Holds up to `queue` jobs that wait for `slots` slots.

    Long work leaves room for better ranks while there are slots enough: of 4 slots chats and batch
    work take 3 at most, and batch work 2 of these.
    """

    def __init__(self, *, slots: int, queue: int) -> None:
        self._slots = slots
        self._queue = queue
        self._count = 0
        self._waiting: list[_Entry] = []
        self._running: list[_Entry] = []

    @property
    def waiting(self) -> tuple["Job", ...]:
        """Returns the jobs that have no slot yet, in order of arrival."""
        return tuple(entry.job for entry in self._waiting)

    @property
    def running(self) -> tuple["Job", ...]:
        """Returns the jobs that have a slot."""
        return tuple(entry.job for entry in self._running)

    def submit(self, job: "Job") -> bool:
        """Lets `job` wait; returns False if the queue is full."""
        if len(self._waiting) >= self._queue:
            return False
        self._count += 1
        self._waiting.append(_Entry(job=job, order=self._count))
        return True

    def admit(self) -> "Job | None":
        """Returns the next job that may have a slot; it keeps the slot until `finish`."""
        waiting = [entry for entry in self._waiting if self._has_room(entry.job.rank)]
        if not waiting:
            return None
        best = min(waiting, key=lambda entry: (entry.rank(OVERTAKES_PER_RANK), entry.order))
        self._waiting.remove(best)
        for entry in self._waiting:
            entry.skips += entry.order < best.order
        best.skips = 0
        self._count += 1
        best.order = self._count
        self._running.append(best)
        return best.job

    def _has_room(self, rank: int) -> bool:
        """Decides whether jobs of every rank up to `rank`, or worse, leave a slot for this one."""
        ranks = [entry.job.rank for entry in self._running]
        return all(
            sum(other >= least for other in ranks) < max(1, self._slots - least)
            for least in range(rank + 1)
        )

    def next(self) -> list["Job"]:
        """Returns the running jobs of the next pass, its leader first; none when none is ready.

        The leader has the best rank; of several, it is the one that has waited longest. Jobs that
        are `brief` join every pass, as their few rows cost the others next to nothing.
        """
        ready = [entry for entry in self._running if entry.job.ready]
        if not ready:
            return []
        best = min(ready, key=lambda entry: (entry.rank(STEPS_PER_RANK), entry.order))
        ready.remove(best)
        jobs: list[Job] = []
        for entry in (best, *ready):
            entry.skips += entry.job.rank > best.job.rank
            if entry is best or entry.job.brief:
                entry.skips = 0
                self._count += 1
                entry.order = self._count
                jobs.append(entry.job)
        return jobs

    def finish(self, job: "Job") -> None:
        """Frees the slot of `job`."""
        self._running = [entry for entry in self._running if entry.job is not job]

    def drop(self, matches: Callable[["Job"], bool]) -> list["Job"]:
        """Takes every waiting job that `matches` out of the queue and returns these."""
        dropped = [entry.job for entry in self._waiting if matches(entry.job)]
        if dropped:
            self._waiting = [entry for entry in self._waiting if entry.job not in dropped]
        return dropped


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
    """Gives each pass its turn where several pools share the processor.

    Each pool has a model. Two passes at once would take as long as one after the other, and a
    chat's pass would slow the one that an editor waits for. So one runs at a time, by rank and then
    in turn.

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
        """Says the rank (`PRIORITIES`) of what `pool` will run next; None: nothing."""
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
