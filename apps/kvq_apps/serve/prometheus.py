"""Prometheus' text of numbers. Knows names and labels only."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass


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
