"""Sends a span of each answered request to a collector, named as OpenTelemetry does for GenAI.

Spans have counts and times and never a text. A request's `traceparent` header makes the span a part
of its client's trace.
"""

import time
from collections.abc import Callable, Mapping
from functools import cache
from importlib import import_module
from typing import Any
from urllib.parse import urlsplit

from kvq.errors import UsageError, argument
from kvq_apps.serve.errors import as_request_error
from kvq_runtime.serving.outbox import Done, Failed

# What is called with the last event of a request, None when its client has left.
Ended = Callable[[Done | Failed | None], None]
# Makes such a function for a request to the model of this name, at this path, with these headers.
Begin = Callable[[str, str, Mapping[str, str]], Ended]

_CHAT, _TEXT, _EMBEDDINGS = "chat", "text_completion", "embeddings"
# By a word of the path.
_OPERATIONS = {
    "chat": _CHAT, "messages": _CHAT, "responses": _CHAT, "embed": _EMBEDDINGS, "rank": _EMBEDDINGS,
}  # fmt: skip


def untraced(path: str, model: str, headers: Mapping[str, str]) -> Ended:
    """Begins no span."""
    return lambda _: None


def tracer(url: str | None) -> Begin:
    """Returns what begins a span of each request; `url` is that of an OTLP/HTTP collector.

    None: no span is made, and no package is needed.
    """
    return untraced if url is None else _exporting(url)


@cache
def _exporting(url: str) -> Begin:
    """Returns the one tracer to `url`, which all models of a process share."""
    if urlsplit(url).scheme not in ("http", "https") or not urlsplit(url).netloc:
        raise UsageError(
            f"{argument('--traces')} {url} is not possible: give the address of an OTLP/HTTP "
            "collector, such as http://127.0.0.1:4318"
        )
    exporters = import_module("opentelemetry.exporter.otlp.proto.http.trace_exporter")
    exporter = exporters.OTLPSpanExporter(endpoint=f"{url.rstrip('/')}/v1/traces")
    return _beginning(exporter)


def _beginning(exporter: Any) -> Begin:
    """Returns what begins spans that go to `exporter`, in batches and on another thread."""
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor
    from opentelemetry.trace import SpanKind, Status, StatusCode
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    provider = TracerProvider(resource=Resource.create({"service.name": "kvq"}))
    provider.add_span_processor(BatchSpanProcessor(exporter))
    spans, propagator = provider.get_tracer("kvq"), TraceContextTextMapPropagator()

    def begin(path: str, model: str, headers: Mapping[str, str]) -> Ended:
        operation = next((name for word, name in _OPERATIONS.items() if word in path), _TEXT)
        span = spans.start_span(
            f"{operation} {model}",
            context=propagator.extract(dict(headers)),
            kind=SpanKind.SERVER,
            start_time=time.time_ns(),
            attributes={
                "gen_ai.operation.name": operation,
                "gen_ai.provider.name": "kvq",
                "gen_ai.request.model": model,
                "url.path": path,
            },
        )

        def end(event: Done | Failed | None) -> None:
            if isinstance(event, Done):
                span.set_attributes(_figures(event))
            else:
                reason = "client_closed_request"
                if event is not None:
                    reason = as_request_error(event.error).code or type(event.error).__name__
                span.set_attribute("error.type", reason)
                span.set_status(Status(StatusCode.ERROR))
            span.end()

        return end

    return begin


def _figures(event: Done) -> dict[str, float]:
    report = event.report
    return {
        "gen_ai.usage.input_tokens": report.prompt_tokens,
        "gen_ai.usage.output_tokens": report.new_tokens,
        "gen_ai.usage.cache_read.input_tokens": report.cached_tokens,
        "kvq.moved_tokens": report.moved_tokens,
        "kvq.queued_ms": report.queued_ms,
        "kvq.ttft_ms": report.ttft_ms,
    }
