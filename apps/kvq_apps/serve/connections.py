"""A connection with limits: uvicorn times bodies and idle ones, not heads, and takes any number."""

import asyncio
import json
from http import HTTPStatus

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from kvq_apps.serve.config import ServeConfig
from kvq_apps.serve.errors import RequestError, error_body
from kvq_apps.serve.protocol import own_headers

# A refused client gets this long to take its answer.
_LAST_WORDS_S = 1.0


class BoundedConnection(H11Protocol):
    """Refuses one connection too many with 503, and a head that is not whole in time with 408."""

    limits: ServeConfig

    _waiting: asyncio.TimerHandle | None = None
    _refused = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """A client connects."""
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
        """Some bytes of a request; of a refused client nothing is read."""
        if not self._refused:
            super().data_received(data)
            self._time_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """The client has left, or was told to."""
        self._stop_waiting()
        super().connection_lost(exc)

    def _time_head(self) -> None:
        """Lets the time for a head run, from its first byte or the connection's beginning."""
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
        """Answers without having read; closing at once would take the answer with it."""
        self._refused = True
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
    """Connections within the limits of `config`."""
    return type("Connection", (BoundedConnection,), {"limits": config})
