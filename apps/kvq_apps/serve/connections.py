"""Connections with limits that uvicorn does not have: on the time of a head, on their number."""

import asyncio
import json
import logging
from http import HTTPStatus

import h11

# uvicorn documents no way to see that a head has arrived or an answer has begun. Should a release
# lack this class, its `conn` or `send_400_response`, tests/apps/serve/test_serve_refusals.py fails.
from uvicorn.protocols.http.h11_impl import H11Protocol

from kvq_apps.serve.config import ServeConfig
from kvq_apps.serve.errors import RequestError, error_body
from kvq_apps.serve.protocol import own_headers

logger = logging.getLogger(__name__)
# uvicorn also logs how to install a WebSocket library, which does not help here.
logger.addFilter(lambda record: "WebSocket library" not in str(record.msg))

# A refused client gets this long to take its answer.
_LAST_WORDS_S = 1.0


class BoundedConnection(H11Protocol):
    """Refuses a connection too many with 503, a head that is late with 408, no HTTP with 400."""

    limits: ServeConfig

    _waiting: asyncio.TimerHandle | None = None
    _refused = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self.logger = logger
        super().connection_made(transport)
        if len(self.connections) <= self.limits.connections:
            self._time_head()
            return
        self._refuse(
            RequestError(
                f"{self.limits.connections} connections are open already; close some, or try "
                "again later",
                status=503,
                code="too_many_connections",
                retry_s=1,
            )
        )

    def data_received(self, data: bytes) -> None:
        if not self._refused:
            super().data_received(data)
        if not self._refused:
            self._time_head()

    def send_400_response(self, msg: str) -> None:
        """Refuses what is no HTTP; closes the connection if an answer has begun already."""
        unanswered = self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE)
        # The handler learns that the client has left, and sends nothing more.
        super().connection_lost(ConnectionAbortedError())
        if unanswered:
            self._refuse(RequestError("this is no HTTP request; nothing was done", status=400))
        else:
            self._refused = True
            self.transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        super().connection_lost(exc)

    def _time_head(self) -> None:
        """Starts the timer for a head, at its first byte or when the connection begins."""
        if self.conn.their_state is not h11.IDLE:
            self._stop_waiting()
        elif self._waiting is None:
            self._waiting = self.loop.call_later(self.limits.head_s, self._end_slow_head)

    def _stop_waiting(self) -> None:
        if self._waiting is not None:
            self._waiting.cancel()
            self._waiting = None

    def _end_slow_head(self) -> None:
        self._refuse(
            RequestError(
                f"the request's head did not arrive within {self.limits.head_s:g} s; send it at "
                "once",
                status=408,
                code="head_too_slow",
            )
        )

    def _refuse(self, error: RequestError) -> None:
        """Answers without reading the request; closes later, so that the answer is not lost."""
        self._refused = True
        self._stop_waiting()
        body = json.dumps(error_body(error)).encode()
        rows = [
            *own_headers(),
            ("Content-Type", "application/json"),
            ("Content-Length", str(len(body))),
            ("Connection", "close"),
            *([("Retry-After", str(error.retry_s))] if error.retry_s is not None else []),
        ]
        head = f"HTTP/1.1 {error.status} {HTTPStatus(error.status).phrase}\r\n"
        head += "".join(f"{name}: {value}\r\n" for name, value in rows)
        self.transport.write(f"{head}\r\n".encode() + body)
        self.transport.write_eof()
        self._waiting = self.loop.call_later(_LAST_WORDS_S, self.transport.abort)


def bounded(config: ServeConfig) -> type[BoundedConnection]:
    """Returns a class of connections within the limits of `config`."""
    return type("Connection", (BoundedConnection,), {"limits": config})
