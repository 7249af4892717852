"""Writes numbers in Prometheus' text format."""

from collections.abc import Mapping

# What a metric says and its values by their labels, by its name. A counter's name ends with _total.
Metrics = Mapping[str, tuple[str, Mapping[str, float]]]


def prometheus_text(metrics: Metrics) -> str:
    """Returns the metrics in the exposition format, version 0.0.4."""
    lines: list[str] = []
    for name, (text, values) in metrics.items():
        kind = "counter" if name.endswith("_total") else "gauge"
        lines += [f"# HELP {name} {text}", f"# TYPE {name} {kind}"]
        lines += [
            f"{name}{f'{{{labels}}}' if labels else ''} {value:.10g}"
            for labels, value in values.items()
        ]
    return "\n".join(lines) + "\n"
