"""Passes that sequences ask for, and who makes them. Knows no tokens and no cache.

What needs a model is written as a generator that yields a `Call` and is sent a `Passed`, so that
one sequence alone (`run`) and many in one pass (`run_all`, `kvq_runtime.serving`) are served by
one code.
"""

from collections import deque
from collections.abc import Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from time import perf_counter
from typing import Any, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from kvq.errors import BackendError
from kvq_runtime.backends import Backend, C, Pass, SequencePass

Logits = NDArray[np.float32]
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, slots=True)
class Passed:
    """What a pass gave one sequence: its logits float32 [R, V].

    The pass took `seconds` for `rows` rows, those of all its sequences. `states` float32 [T,
    hidden] are those of its own rows, where they were asked for.
    """

    logits: Logits
    seconds: float
    rows: int
    states: NDArray[np.float32] | None = None


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Call(Generic[C]):
    """What one sequence asks for: a pass of `rows` through the model of `backend`."""

    backend: Backend[C]
    rows: SequencePass[C]
    rope_long: bool = False

    def joins(self, other: "Call[Any]") -> bool:
        """Whether both can be parts of one pass."""
        return (
            self.backend is other.backend
            and self.rows.mode == other.rows.mode
            and self.rope_long == other.rope_long
        )


Work = Generator[Call[C], Passed, T]


class SharedPassError(Exception):
    """Thrown into work whose pass failed beside others': it asks for the same rows again."""


def run(work: Work[C, T]) -> T:
    """What `work` returns, each of its passes made for it alone."""
    try:
        call = next(work)
        while True:
            try:
                (passed,) = _forward((call,))
            except BaseException as error:  # noqa: BLE001  the branch must forget its rows
                call = work.throw(error)
            else:
                call = work.send(passed)
    except StopIteration as end:
        return end.value


def forward_all(calls: Sequence[Call[Any]]) -> list[Passed]:
    """What one or many sequences asked for, in as few passes as their models and modes allow."""
    answers = dict[int, Passed]()
    for place, first in enumerate(calls):
        if place not in answers:
            together = [i for i in range(place, len(calls)) if first.joins(calls[i])]
            answers |= zip(together, _forward([calls[i] for i in together]), strict=True)
    return [answers[place] for place in range(len(calls))]


def run_all(works: Iterable[Work[Any, T]], at_once: int) -> Iterator[tuple[int, T]]:
    """What each of `works` returns, with its place among them, as they end.

    `at_once` of them share passes; the next begins when one of these has ended. Raises what any of
    them raises, and what a pass does; the others are closed.
    """
    numbered = enumerate(works)
    due = deque[tuple[int, Work[Any, T], Passed | None]](
        (place, work, None) for place, work in islice(numbered, at_once)
    )
    asking: list[tuple[int, Work[Any, T], Call[Any]]] = []
    try:
        while due:
            while due:
                place, work, passed = due.popleft()
                try:
                    asking.append((place, work, work.send(passed)))  # type: ignore[arg-type]
                except StopIteration as end:
                    yield place, end.value
                    due += ((place, work, None) for place, work in islice(numbered, 1))
            answers = forward_all([call for _, _, call in asking])
            due += ((asked[0], asked[1], one) for asked, one in zip(asking, answers, strict=True))
            asking = []
    finally:
        for _, work, _ in [*asking, *due]:
            work.close()


def _forward(calls: Sequence[Call[C]]) -> list[Passed]:
    """One pass over the rows of one or many sequences, and what it gave each of them."""
    started = perf_counter()
    rows, first = [call.rows for call in calls], calls[0]
    logits = first.backend.forward(Pass(rows=tuple(rows), rope_long=first.rope_long))
    seconds = perf_counter() - started
    for part, own in zip(logits, rows, strict=True):
        if len(part) != len(own.wanted):
            raise BackendError(f"the model gave {len(part)} rows of logits for {len(own.wanted)}")
    count = sum(len(own.ids) for own in rows)
    return [
        Passed(logits=part, seconds=seconds, rows=count, states=own.states)
        for part, own in zip(logits, rows, strict=True)
    ]
