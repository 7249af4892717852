"""`--traces`: a span of each request at a real collector's address, without its texts."""

import socket
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from kvq_apps.cli import main
from serving import CHAT, COMPLETIONS, Rule, ask, chat, connect, request_bytes, running, wait_until

pytestmark = pytest.mark.usefixtures("own_state")


class Collector(ThreadingHTTPServer):
    """Takes what an exporter sends, and keeps the spans and the bytes."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.spans: list[Any] = []
        self.content = b""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def attributes(self, place: int) -> dict[str, Any]:
        rows = self.spans[place].attributes
        return {row.key: getattr(row.value, row.value.WhichOneof("value")) for row in rows}


class _Handler(BaseHTTPRequestHandler):
    server: Collector

    def do_POST(self) -> None:
        assert self.path == "/v1/traces"
        content = self.rfile.read(int(self.headers["Content-Length"]))
        message = ExportTraceServiceRequest.FromString(content)
        self.server.content += content
        for resource in message.resource_spans:
            for scope in resource.scope_spans:
                self.server.spans += scope.spans
        self.send_response(200)
        self.end_headers()

    def log_message(self, format: str, *arguments: Any) -> None:
        pass


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[Collector]:
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "20")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_COMPRESSION", "none")
    with Collector() as server:
        Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


def test_each_request_is_a_span_of_its_clients_trace(rule: Rule, collector: Collector) -> None:
    trace = "0af7651916cd43dd8448eb211c80319c"
    with running(rule.load, traces=collector.url) as server:
        body = chat("a secret word", max_tokens=3)
        answer = ask(server, CHAT, body, headers={"traceparent": f"00-{trace}-b7ad6b7169203331-01"})
        assert ask(server, CHAT, body | {"stream": True}).status == 200
        assert ask(server, COMPLETIONS, {"prompt": "x", "max_tokens": 2}).status == 200
        wait_until(lambda: len(collector.spans) == 3)
    first = collector.spans[0]
    assert (first.name, first.trace_id.hex()) == ("chat rule", trace)
    assert first.end_time_unix_nano > first.start_time_unix_nano
    figures, extension = collector.attributes(0), answer.json["x_kvq"]
    assert figures["gen_ai.usage.input_tokens"] == answer.json["usage"]["prompt_tokens"]
    assert figures["gen_ai.usage.output_tokens"] == 3
    assert figures["kvq.ttft_ms"] == pytest.approx(extension["ttft_ms"])
    assert collector.attributes(1)["gen_ai.usage.cache_read.input_tokens"] > 0
    assert collector.attributes(2)["gen_ai.operation.name"] == "text_completion"
    assert b"secret" not in collector.content


def test_what_fails_says_why(rule: Rule, collector: Collector) -> None:
    with running(rule.load, traces=collector.url) as server:
        long = {"prompt": "x" * 5000, "max_tokens": 2}
        assert ask(server, COMPLETIONS, long).status == 400
        rule.backend.shut = True
        connection = connect(server)
        body = chat("x", max_tokens=3) | {"stream": True}
        connection.sendall(request_bytes("POST", CHAT, body))
        wait_until(lambda: server.pool.busy)
        connection.shutdown(socket.SHUT_RDWR)
        connection.close()
        wait_until(lambda: len(collector.spans) >= 1)
        rule.backend.open()
    assert collector.attributes(-1)["error.type"] == "client_closed_request"
    assert collector.spans[-1].status.code == 2


def test_a_wrong_address_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "-m", "nano", "--traces", "localhost:4318", "--port", "0"]) == 2
    assert "give the address of an OTLP/HTTP collector" in capsys.readouterr().err
