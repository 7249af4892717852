"""Decides which job runs next, by ranks, order and counts.

Waiting jobs get slots by rank, and first come first served inside a rank. Running jobs take turns
by rank, and round-robin inside a rank, so that a long prompt never blocks a short request. A job
that is passed over too often rises a rank, so that no job starves.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

# Ranks by name: a smaller one goes first.
PRIORITIES = {"completion": 0, "chat": 1, "batch": 2}

# A waiting job rises a rank after so many overtakes, a running one after so many steps.
OVERTAKES_PER_RANK = 8
STEPS_PER_RANK = 16


class Rankable(Protocol):
    """Declares what the scheduler needs to know about a job."""

    @property
    def rank(self) -> int:
        """Returns a value of `PRIORITIES`."""
        ...

    @property
    def ready(self) -> bool:
        """Returns whether it can be worked on now."""
        ...

    @property
    def brief(self) -> bool:
        """Returns whether its next rows are few, like those of an answer and unlike a prompt's."""
        ...


J = TypeVar("J", bound=Rankable)


@dataclass(kw_only=True, slots=True, eq=False)
class _Entry(Generic[J]):
    job: J
    order: int
    skips: int = 0

    def rank(self, patience: int) -> int:
        return max(0, self.job.rank - self.skips // patience)


class Scheduler(Generic[J]):
    """Holds up to `queue` jobs that wait for `slots` slots.

    Long work leaves room for better ranks while there are slots enough: of 4 slots chats and batch
    work take 3 at most, and batch work 2 of these.
    """

    def __init__(self, *, slots: int, queue: int) -> None:
        self._slots = slots
        self._queue = queue
        self._count = 0
        self._waiting: list[_Entry[J]] = []
        self._running: list[_Entry[J]] = []

    @property
    def waiting(self) -> tuple[J, ...]:
        """Returns the jobs that have no slot yet, in order of arrival."""
        return tuple(entry.job for entry in self._waiting)

    @property
    def running(self) -> tuple[J, ...]:
        """Returns the jobs that have a slot."""
        return tuple(entry.job for entry in self._running)

    def submit(self, job: J) -> bool:
        """Lets `job` wait; returns False if the queue is full."""
        if len(self._waiting) >= self._queue:
            return False
        self._count += 1
        self._waiting.append(_Entry(job=job, order=self._count))
        return True

    def admit(self) -> J | None:
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

    def next(self) -> list[J]:
        """Returns the running jobs of the next pass, its leader first; none when none is ready.

        The leader has the best rank; of several, it is the one that has waited longest. Jobs that
        are `brief` join every pass, as their few rows cost the others next to nothing.
        """
        ready = [entry for entry in self._running if entry.job.ready]
        if not ready:
            return []
        best = min(ready, key=lambda entry: (entry.rank(STEPS_PER_RANK), entry.order))
        ready.remove(best)
        jobs: list[J] = []
        for entry in (best, *ready):
            entry.skips += entry.job.rank > best.job.rank
            if entry is best or entry.job.brief:
                entry.skips = 0
                self._count += 1
                entry.order = self._count
                jobs.append(entry.job)
        return jobs

    def finish(self, job: J) -> None:
        """Frees the slot of `job`."""
        self._running = [entry for entry in self._running if entry.job is not job]

    def drop(self, matches: Callable[[J], bool]) -> list[J]:
        """Takes every waiting job that `matches` out of the queue and returns these."""
        dropped = [entry.job for entry in self._waiting if matches(entry.job)]
        if dropped:
            self._waiting = [entry for entry in self._waiting if entry.job not in dropped]
        return dropped
