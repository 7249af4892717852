"""The routes over a pool of this process, for whoever brings an event loop of their own.

`server` gives them sockets, a batch asks them without one, a replica of a fleet holds them.
"""

import asyncio
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from starlette.types import ASGIApp, Message, Scope

from kvq_apps.serve.app import make_app
from kvq_apps.serve.config import ServeConfig
from kvq_apps.serve.loading import ServedModel
from kvq_runtime.serving.pool import SessionPool


class Hosted:
    """`pool`, and the routes over it in `app`. Made anywhere, used in one event loop."""

    def __init__(self, load: Callable[[], ServedModel], config: ServeConfig) -> None:
        self.pool = SessionPool(load, config, self.notify)
        self.app = make_app(self.pool, config)
        self._config = config
        self._loop: asyncio.AbstractEventLoop | None = None
        self._news = asyncio.Event()

    def start(self) -> None:
        """Begins to load."""
        self._loop = asyncio.get_running_loop()
        self.pool.start()

    async def ready(self) -> ServedModel:
        """Waits for the model. Raises what loading it raised."""
        await self.until(lambda: self.pool.ready or self.pool.ended)
        if self.pool.error is not None:
            raise self.pool.error
        assert self.pool.served is not None
        return self.pool.served

    async def leave(self, hurried: Callable[[], bool] = lambda: False) -> None:
        """Takes no more requests, gives running ones `grace_s` unless `hurried`, then stops."""
        self.pool.drain()
        with suppress(TimeoutError):
            async with asyncio.timeout(self._config.grace_s):
                await self.until(lambda: not self.pool.busy or hurried())
        await self.stop()

    async def stop(self) -> None:
        """Ends what runs with an error, saves the sessions, frees the model."""
        await asyncio.to_thread(self.pool.stop)

    async def until(self, holds: Callable[[], bool]) -> None:
        """Waits for news until `holds`."""
        while not holds():
            await self._news.wait()
            self._news.clear()

    def notify(self) -> None:
        """Wakes the event loop, from any thread or a signal's handler."""
        if self._loop is not None:
            with suppress(RuntimeError):  # the loop is closed: there is nobody to wake
                self._loop.call_soon_threadsafe(self._news.set)


async def ask(app: ASGIApp, path: str, body: bytes) -> tuple[int, bytes]:
    """One POST without a socket: the status and the whole body of the answer."""
    asked: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]
    status, parts = 0, list[bytes]()

    async def receive() -> Message:
        if not asked:
            await asyncio.Future[None]()  # this client never hangs up
        return asked.pop()

    async def send(message: Any) -> None:
        nonlocal status
        status = message.get("status", status)
        parts.append(message.get("body", b""))

    scope: Scope = {
        "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "POST",
        "scheme": "http", "path": path, "raw_path": path.encode(), "root_path": "",
        "query_string": b"", "client": None, "server": None,
        "headers": [(b"host", b"localhost"), (b"content-type", b"application/json")],
    }  # fmt: skip
    try:
        await app(scope, receive, send)
    except Exception:
        # Starlette raises a fault again behind its answer.
        if not status:
            raise
    return status, b"".join(parts)
