"""The events of one request, on their way to one reader.

The engine's thread puts events in and the reader takes them out. Text that waits for a slow reader
is merged. A full outbox stops the steps of its own request and of no other.
"""

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from threading import Lock
from time import monotonic

import numpy as np
from numpy.typing import NDArray

from kvq_runtime.answer.generation import Step
from kvq_runtime.answer.sampling import likeliest, log_probability
from kvq_runtime.session.metrics import NO_ROUNDS, Rounds, SessionStats

# Merging stops at this size, so that one event stays a bounded piece of work.
_EVENT_BYTES = 16 << 10
_LOG_BYTES = 64


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenLog:
    """Holds one token, its natural log-probability, and the likeliest `top` tokens with theirs.

    `logprob` is None for a text's first token, which follows nothing. `characters` are those of the
    text that came with the token; a token may be a part of a letter that comes with a later one.
    """

    token: int
    logprob: float | None
    top: tuple[tuple[int, float], ...] = ()
    characters: int = 0

    @classmethod
    def scored(cls, logits: NDArray[np.float32], token: int, top: int) -> "TokenLog":
        """Makes the log of a prompt's `token`, which came after these logits."""
        logprob = log_probability(logits, token)
        return cls(token=token, logprob=logprob, top=likeliest(logits, top))

    @classmethod
    def of(cls, step: Step, characters: int) -> "TokenLog":
        """Makes the log of a step whose log-probability was asked for."""
        assert step.logprob is not None
        return cls(token=step.token, logprob=step.logprob, top=step.top, characters=characters)


def steps_of(logs: Iterable[TokenLog], text: str) -> tuple[tuple[int, float], ...]:
    """Returns how likely each beginning of an answer's text is.

    These are pairs of characters up to the end of a token, and the log-probability of the text up
    to there. The last one is of all of `text`, where any token has a log.
    """
    steps, end, logprob = list[tuple[int, float]](), 0, 0.0
    for log in logs:
        end, logprob = end + log.characters, logprob + (log.logprob or 0.0)
        if log.characters:
            steps.append((end, logprob))
    return (*steps[:-1], (len(text), logprob)) if steps else ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """Holds what a request cost so far, in milliseconds and tokens.

    Rates are in tokens per second, 0 when unmeasured. `ttft_ms` is from the request's arrival to
    its first token, waiting included. `prompt_ms` and `decode_ms` are the engine's own time.
    `rounds` are the request's. `stats` are its session's, which holds `context_tokens`.
    `moved_tokens` of the `cached_tokens` were encoded before a change on their left;
    `edited_tokens` are new ones in the middle of a text that was kept.
    """

    prompt_tokens: int = 0
    cached_tokens: int = 0
    moved_tokens: int = 0
    edited_tokens: int = 0
    new_tokens: int = 0
    queued_ms: float = 0.0
    ttft_ms: float = 0.0
    prompt_ms: float = 0.0
    decode_ms: float = 0.0
    prefill_tok_s: float = 0.0
    decode_tok_s: float = 0.0
    context_tokens: int = 0
    rounds: Rounds = NO_ROUNDS
    stats: SessionStats = field(default_factory=SessionStats)


@dataclass(frozen=True, kw_only=True, slots=True)
class Delta:
    """Holds text that choice `index` gained, and its tokens where these were asked for."""

    index: int
    text: str
    logs: tuple[TokenLog, ...] = ()

    @property
    def num_bytes(self) -> int:
        """Returns the bytes it takes in memory, about."""
        return 4 * len(self.text) + sum([_LOG_BYTES * (1 + len(log.top)) for log in self.logs])


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """Holds the numbers that prompt `index` gave in place of a text."""

    index: int
    values: NDArray[np.float32]


@dataclass(frozen=True, kw_only=True, slots=True)
class Finished:
    """Says that choice `index` ended: `stop`, perhaps at `stop_string`, or `length`."""

    index: int
    reason: str
    report: Report
    stop_string: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Done:
    """Says that the whole request ended well."""

    report: Report


@dataclass(frozen=True, kw_only=True, slots=True)
class Failed:
    """Says that the request ended with `error`, before or after some text."""

    error: Exception


Event = Delta | Measured | Finished | Done | Failed


class Outbox:
    """Queues events up to a limit of bytes; calls `notify` after every put.

    The engine's thread calls `notify`.
    """

    def __init__(self, limit_bytes: int, notify: Callable[[], None]) -> None:
        self._limit_bytes = limit_bytes
        self._notify = notify
        self._events: deque[Event] = deque()
        self._num_bytes = 0
        self._full_since: float | None = None
        self._lock = Lock()

    @property
    def full(self) -> bool:
        """Returns whether the engine should wait for the reader."""
        return self._full_since is not None

    @property
    def num_bytes(self) -> int:
        """Returns the bytes that wait for the reader."""
        return self._num_bytes

    def stalled_s(self) -> float:
        """Returns for how many seconds it has been full without being read."""
        since = self._full_since
        return 0.0 if since is None else monotonic() - since

    def put(self, event: Event) -> None:
        """Adds an event; text joins the last event's text if that still waits."""
        with self._lock:
            last = self._events[-1] if self._events else None
            if (
                isinstance(event, Delta)
                and isinstance(last, Delta)
                and last.index == event.index
                and last.num_bytes < _EVENT_BYTES
            ):
                self._events[-1] = replace(
                    last, text=last.text + event.text, logs=last.logs + event.logs
                )
            else:
                self._events.append(event)
            if isinstance(event, Delta):
                self._num_bytes += event.num_bytes
            if self._num_bytes >= self._limit_bytes and self._full_since is None:
                self._full_since = monotonic()
        self._notify()

    def take(self) -> Event | None:
        """Returns the oldest event, or None when there is none."""
        with self._lock:
            if not self._events:
                return None
            event = self._events.popleft()
            if isinstance(event, Delta):
                self._num_bytes -= event.num_bytes
            if self._full_since is not None:
                below = self._num_bytes < self._limit_bytes // 2
                self._full_since = None if below else monotonic()
            return event
