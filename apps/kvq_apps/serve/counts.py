"""What the server did so far, and Prometheus' text of it. Knows numbers only."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from kvq_apps.serve.outbox import Report

# Requests this far back tell how long one takes.
_RECENT = 0.2


@dataclass(kw_only=True, slots=True)
class Counts:
    """Totals since the start. Each is changed by one thread only."""

    requests: dict[tuple[str, int], int] = field(default_factory=dict[tuple[str, int], int])
    refused: int = 0
    cancelled: int = 0
    failed: int = 0
    finished: int = 0
    steps: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    new_tokens: int = 0
    busy_s: float = 0.0
    _recent_s: float = 1.0

    def answered(self, path: str, status: int) -> None:
        """A request got its status."""
        self.requests[path, status] = self.requests.get((path, status), 0) + 1

    def add(self, report: Report, *, failed: bool) -> None:
        """A job ended."""
        self.finished += 1
        self.failed += failed
        self.prompt_tokens += report.prompt_tokens
        self.cached_tokens += report.cached_tokens
        self.new_tokens += report.new_tokens
        seconds = (report.prompt_ms + report.decode_ms) / 1e3
        self._recent_s += _RECENT * (seconds - self._recent_s)

    def mean_s(self) -> float:
        """Engine seconds of a recent request, about."""
        return self._recent_s


@dataclass(frozen=True, kw_only=True, slots=True)
class Metric:
    """One name with its values by labels."""

    name: str
    kind: str
    help: str
    values: Mapping[str, float]


def prometheus_text(metrics: Iterable[Metric]) -> str:
    """The exposition format, version 0.0.4."""
    lines: list[str] = []
    for metric in metrics:
        lines.append(f"# HELP {metric.name} {metric.help}")
        lines.append(f"# TYPE {metric.name} {metric.kind}")
        lines += [
            f"{metric.name}{f'{{{labels}}}' if labels else ''} {value:.10g}"
            for labels, value in metric.values.items()
        ]
    return "\n".join(lines) + "\n"
