"""What a pool did so far. Knows numbers only."""

from dataclasses import dataclass

from kvq_runtime.metrics import NO_ROUNDS, Rounds
from kvq_runtime.serving.outbox import Report

# Requests this far back tell how long one takes.
_RECENT = 0.2


@dataclass(kw_only=True, slots=True)
class Counts:
    """Totals since the start, changed by the pool's thread; `steps` counts passes."""

    refused: int = 0
    cancelled: int = 0
    failed: int = 0
    finished: int = 0
    steps: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    new_tokens: int = 0
    rounds: Rounds = NO_ROUNDS
    decode_s: float = 0.0
    busy_s: float = 0.0
    _recent_s: float = 1.0

    def add(self, report: Report, *, failed: bool) -> None:
        """A job ended."""
        self.finished += 1
        self.failed += failed
        self.prompt_tokens += report.prompt_tokens
        self.cached_tokens += report.cached_tokens
        self.new_tokens += report.new_tokens
        self.rounds += report.rounds
        self.decode_s += report.decode_ms / 1e3
        seconds = (report.prompt_ms + report.decode_ms) / 1e3
        self._recent_s += _RECENT * (seconds - self._recent_s)

    def mean_s(self) -> float:
        """Engine seconds of a recent request, about."""
        return self._recent_s
