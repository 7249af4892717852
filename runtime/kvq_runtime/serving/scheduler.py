"""Who runs next. Knows ranks, order and counts; no thread, no clock, no model.

Waiting jobs are admitted to slots by rank, first come first served inside one; running jobs take
turns by rank, round and round inside one, so that a long prompt never blocks a short request.
What is passed over too often rises a rank, so that nothing starves.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

# Ranks by name: a smaller one goes first.
PRIORITIES = {"completion": 0, "chat": 1, "batch": 2}

# A waiting job rises a rank after being overtaken this often, a running one after as many steps.
OVERTAKES_PER_RANK = 8
STEPS_PER_RANK = 16


class Rankable(Protocol):
    """What the scheduler needs to know about a job."""

    @property
    def rank(self) -> int:
        """A value of PRIORITIES."""
        ...

    @property
    def ready(self) -> bool:
        """Whether it can be worked on now."""
        ...

    @property
    def brief(self) -> bool:
        """Whether its next rows are few, as those of an answer are and a prompt's are not."""
        ...


J = TypeVar("J", bound=Rankable)


@dataclass(kw_only=True, slots=True, eq=False)
class _Entry(Generic[J]):
    job: J
    order: int
    passed: int = 0

    def rank(self, patience: int) -> int:
        return max(0, self.job.rank - self.passed // patience)


class Scheduler(Generic[J]):
    """Up to `queue` jobs waiting for `slots` slots.

    Long work leaves room for better ranks while there are slots enough: of 4 slots, 3 are taken
    by chats and batch work at most, 2 of these by batch work.
    """

    def __init__(self, *, slots: int, queue: int) -> None:
        self._slots = slots
        self._queue = queue
        self._count = 0
        self._waiting: list[_Entry[J]] = []
        self._running: list[_Entry[J]] = []

    @property
    def waiting(self) -> tuple[J, ...]:
        """Jobs that have no slot yet, in order of arrival."""
        return tuple(entry.job for entry in self._waiting)

    @property
    def running(self) -> tuple[J, ...]:
        """Jobs that hold a slot."""
        return tuple(entry.job for entry in self._running)

    def submit(self, job: J) -> bool:
        """Lets `job` wait, unless the queue is full."""
        if len(self._waiting) >= self._queue:
            return False
        self._count += 1
        self._waiting.append(_Entry(job=job, order=self._count))
        return True

    def admit(self) -> J | None:
        """The next job that may have a slot; it holds one until `finish`."""
        waiting = [entry for entry in self._waiting if self._has_room(entry.job.rank)]
        if not waiting:
            return None
        best = min(waiting, key=lambda entry: (entry.rank(OVERTAKES_PER_RANK), entry.order))
        self._waiting.remove(best)
        for entry in self._waiting:
            entry.passed += entry.order < best.order
        best.passed = 0
        self._count += 1
        best.order = self._count
        self._running.append(best)
        return best.job

    def _has_room(self, rank: int) -> bool:
        """Whether jobs of every rank from 0 to `rank`, or worse, leave a slot for this one."""
        ranks = [entry.job.rank for entry in self._running]
        return all(
            sum(other >= least for other in ranks) < max(1, self._slots - least)
            for least in range(rank + 1)
        )

    def next(self) -> list[J]:
        """The running jobs of the next pass, its leader first; none when none can be worked on.

        The leader is the best rank's, of several the one that has waited for longest. Jobs that
        are `brief` join every pass: their few rows cost the others next to nothing.
        """
        ready = [entry for entry in self._running if entry.job.ready]
        if not ready:
            return []
        best = min(ready, key=lambda entry: (entry.rank(STEPS_PER_RANK), entry.order))
        for entry in ready:
            entry.passed += entry.job.rank > best.job.rank
        served = [best, *(entry for entry in ready if entry is not best and entry.job.brief)]
        for entry in served:
            entry.passed = 0
            self._count += 1
            entry.order = self._count
        return [entry.job for entry in served]

    def finish(self, job: J) -> None:
        """Gives back the slot of `job`."""
        self._running = [entry for entry in self._running if entry.job is not job]

    def drop(self, unwanted: Callable[[J], bool]) -> Iterator[J]:
        """Takes every unwanted job out of the queue and yields it."""
        dropped = [entry.job for entry in self._waiting if unwanted(entry.job)]
        self._waiting = [entry for entry in self._waiting if entry.job not in dropped]
        yield from dropped
