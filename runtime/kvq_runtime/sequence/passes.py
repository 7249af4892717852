"""Passes that sequences ask for, and functions that make them.

Code that needs a model is a generator, `Work`: it yields a `PassRequest` and is sent a
`PassResult`. `run` serves one sequence, `run_all` and `kvq_runtime.serving` serve many sequences in
one pass.
"""

from collections import deque
from collections.abc import Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from operator import attrgetter
from time import perf_counter
from typing import Any, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from kvq.errors import BackendError
from kvq_runtime.backends import Backend, C, SequencePass

Logits = NDArray[np.float32]
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, slots=True)
class PassResult:
    """Holds what a pass gave one sequence: its logits float32 [R, V].

    The pass took `seconds` for `rows` rows, those of all its sequences. `hidden_states` float32 [T,
    hidden] are those of this sequence's rows, where they were asked for.
    """

    logits: Logits
    seconds: float
    rows: int
    hidden_states: NDArray[np.float32] | None = None


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PassRequest(Generic[C]):
    """Asks for a pass of one sequence's `rows` through the model of `backend`."""

    backend: Backend[C]
    rows: SequencePass[C]
    rope_long: bool = False

    def joins(self, other: "PassRequest[Any]") -> bool:
        """Decides whether both requests can share a pass."""
        return (
            self.backend is other.backend
            and self.rows.mode == other.rows.mode
            and self.rope_long == other.rope_long
        )


Work = Generator[PassRequest[C], PassResult, T]


class SharedPassError(Exception):
    """Says that a shared pass failed; the work that receives it asks for the same rows again."""


def run(work: Work[C, T]) -> T:
    """Runs `work` to its end, each pass for it alone, and returns its result."""
    try:
        request = next(work)
        while True:
            try:
                (result,) = _forward((request,))
            except BaseException as error:  # noqa: BLE001  the branch must forget its rows
                request = work.throw(error)
            else:
                request = work.send(result)
    except StopIteration as end:
        return end.value


def forward_all(requests: Sequence[PassRequest[Any]]) -> list[PassResult]:
    """Makes the passes that sequences asked for, as few as their models and modes allow."""
    results = dict[PassRequest[Any], PassResult]()
    for first in requests:
        if first not in results:
            together = list(filter(first.joins, requests))
            results |= zip(together, _forward(together), strict=True)
    return [results[request] for request in requests]


def run_all(works: Iterable[Work[Any, T]], at_once: int) -> Iterator[tuple[int, T]]:
    """Yields what each of `works` returns, with its place among them, as they end.

    `at_once` of them share passes; the next one begins when one of these has ended. Raises what a
    pass or any of them raises; the others are closed then.
    """
    numbered = enumerate(works)
    due = deque[tuple[int, Work[Any, T], PassResult | None]](
        (place, work, None) for place, work in islice(numbered, at_once)
    )
    waiting: list[tuple[int, Work[Any, T], PassRequest[Any]]] = []
    try:
        while due:
            while due:
                place, work, result = due.popleft()
                try:
                    waiting.append((place, work, work.send(result)))  # type: ignore[arg-type]
                except StopIteration as end:
                    yield place, end.value
                    due += ((place, work, None) for place, work in islice(numbered, 1))
            results = forward_all([request for _, _, request in waiting])
            due += (
                (place, work, result)
                for (place, work, _), result in zip(waiting, results, strict=True)
            )
            waiting = []
    finally:
        for _, work, _ in [*waiting, *due]:
            work.close()


def _forward(requests: Sequence[PassRequest[C]]) -> list[PassResult]:
    """Makes one pass over the rows of all `requests` and returns the result of each."""
    started = perf_counter()
    rows, first = tuple(map(attrgetter("rows"), requests)), requests[0]
    logits = first.backend.forward(rows, rope_long=first.rope_long)
    seconds = perf_counter() - started
    count = 0
    for part, sequence in zip(logits, rows, strict=True):
        if len(part) != len(sequence.logit_rows):
            raise BackendError(
                f"the model gave {len(part)} rows of logits for {len(sequence.logit_rows)}"
            )
        count += len(sequence.ids)
    return [
        PassResult(logits=part, seconds=seconds, rows=count, hidden_states=sequence.hidden_states)
        for part, sequence in zip(logits, rows, strict=True)
    ]
