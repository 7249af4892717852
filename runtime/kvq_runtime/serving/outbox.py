"""What the engine says about one request, on its way to one reader.

The engine's thread puts, the reader takes. Text that a slow reader has not taken yet is merged,
and a full outbox says so: then its request is not stepped, and nobody else is disturbed.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from threading import Lock
from time import monotonic

from kvq_runtime.generation import Step
from kvq_runtime.metrics import NO_ROUNDS, Rounds, SessionStats

# Merging stops here, so that one event stays a bounded piece of work.
_EVENT_BYTES = 16 << 10
_LOG_BYTES = 64


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenLog:
    """One token, its natural log-probability, and the likeliest `top` (token, log-probability)."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()

    @classmethod
    def of(cls, step: Step) -> "TokenLog":
        """That of a step whose log-probability was asked for."""
        assert step.logprob is not None
        return cls(token=step.token, logprob=step.logprob, top=step.top)


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """What a request cost so far. Milliseconds; rates in tokens per second, 0 when unmeasured.

    `ttft_ms` is from the request's arrival to its first token, waiting included; `prompt_ms` and
    `decode_ms` are the engine's own time; `rounds` are the request's, `stats` its session's, which
    holds `context_tokens`. `edited_tokens` are new ones in the middle of a text that was kept.
    """

    prompt_tokens: int = 0
    cached_tokens: int = 0
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
    """Text that choice `index` gained, and the tokens it came from where these were asked for."""

    index: int
    text: str
    logs: tuple[TokenLog, ...] = ()

    @property
    def num_bytes(self) -> int:
        """Bytes it keeps in memory, about."""
        return 4 * len(self.text) + sum(_LOG_BYTES * (1 + len(log.top)) for log in self.logs)


@dataclass(frozen=True, kw_only=True, slots=True)
class Finished:
    """Choice `index` ended: stop, perhaps at `stop_string`, or length."""

    index: int
    reason: str
    report: Report
    stop_string: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Done:
    """The whole request ended well."""

    report: Report


@dataclass(frozen=True, kw_only=True, slots=True)
class Failed:
    """The request ended with `error`, before or after some text."""

    error: Exception


Event = Delta | Finished | Done | Failed


class Outbox:
    """A bounded queue of events. `notify` is called after every put, from the engine's thread."""

    def __init__(self, limit_bytes: int, notify: Callable[[], None]) -> None:
        self._limit_bytes = limit_bytes
        self._notify = notify
        self._events: deque[Event] = deque()
        self._num_bytes = 0
        self._full_since: float | None = None
        self._lock = Lock()

    @property
    def full(self) -> bool:
        """Whether the engine should wait for the reader."""
        return self._full_since is not None

    @property
    def num_bytes(self) -> int:
        """Bytes that wait for the reader."""
        return self._num_bytes

    def stalled_s(self) -> float:
        """Seconds it has been full without being read."""
        since = self._full_since
        return 0.0 if since is None else monotonic() - since

    def put(self, event: Event) -> None:
        """Adds an event; text joins the last one's when that still waits."""
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
        """The oldest event, or None when there is none."""
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
