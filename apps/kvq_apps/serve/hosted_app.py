"""The HTTP routes over a session pool, for code that has an event loop of its own.

`server` connects them to sockets, a batch calls them without one, a replica of a fleet serves them.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import suppress

from starlette.types import ASGIApp, Message, Receive, Scope

from kvq_apps.serve.config import ServeConfig
from kvq_apps.serve.http_app import make_app
from kvq_apps.serve.loading import ServedModel
from kvq_runtime.serving.pool import SessionPool


class Hosted:
    """Lets the code of one event loop wait for changes that any thread reports."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._changed = asyncio.Event()

    def start(self) -> None:
        self._loop = asyncio.get_running_loop()

    async def until(self, holds: Callable[[], bool]) -> None:
        """Waits until `holds` returns True; it is called after each change."""
        while not holds():
            await self._changed.wait()
            self._changed.clear()

    def notify(self) -> None:
        """Wakes the event loop, from any thread or a signal's handler."""
        if self._loop is not None:
            with suppress(RuntimeError):  # the loop is closed: there is nobody to wake
                self._loop.call_soon_threadsafe(self._changed.set)


MakeApp = Callable[[SessionPool[ServedModel], ServeConfig], ASGIApp]


class HostedApp(Hosted):
    """Holds a `pool` and the routes over it."""

    def __init__(
        self, load: Callable[[], ServedModel], config: ServeConfig, make: MakeApp = make_app
    ) -> None:
        super().__init__()
        self.pool = SessionPool(load, config, self.notify)
        self.app = make(self.pool, config)
        self._config = config

    @property
    def open(self) -> bool:
        return self.pool.ready

    @property
    def ended(self) -> bool:
        return self.pool.ended

    @property
    def error(self) -> BaseException | None:
        return self.pool.error

    def start(self) -> None:
        super().start()
        self.pool.start()

    async def ready(self) -> ServedModel:
        """Waits for the model and returns it. Raises what loading it raised."""
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


async def ask(app: ASGIApp, path: str, body: bytes) -> tuple[int, bytes]:
    """Sends one POST without a socket; returns the status and the whole body of the answer."""
    scope: Scope = {
        "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "POST",
        "scheme": "http", "path": path, "raw_path": path.encode(), "root_path": "",
        "query_string": b"", "client": None, "server": None,
        "headers": [(b"host", b"localhost"), (b"content-type", b"application/json")],
    }  # fmt: skip
    messages = [message async for batch in replies(app, scope, body) for message in batch]
    return messages[0]["status"], b"".join(message.get("body", b"") for message in messages)


async def replies(app: ASGIApp, scope: Scope, body: bytes) -> AsyncGenerator[list[Message]]:
    """Yields the ASGI messages that answer a request, as many at once as there are.

    A client leaves by closing the generator. Raises what `app` raises before it answers.
    """
    messages: asyncio.Queue[Message | None] = asyncio.Queue()

    async def never() -> Message:
        return await asyncio.Future[Message]()

    async def run() -> None:
        try:
            await app(scope, repeated(body, never), messages.put)
        finally:
            messages.put_nowait(None)

    running = asyncio.create_task(run())
    try:
        ended = answered = False
        while not ended:
            batch = [await messages.get()]
            while not messages.empty():
                batch.append(messages.get_nowait())
            ended = batch[-1] is None
            answered |= batch[0] is not None
            yield [message for message in batch if message is not None]
        if not answered:
            await running
    finally:
        running.cancel()
        # Starlette raises an error again after it has sent its answer.
        with suppress(asyncio.CancelledError, Exception):
            await running


def repeated(body: bytes, receive: Receive) -> Receive:
    """Returns a `receive` that gives a body that was read already, and then what follows."""
    messages: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def again() -> Message:
        return messages.pop() if messages else await receive()

    return again
