"""A job's events on their way to its client: in one piece, or as server-sent events.

Runs in the event loop and watches for a client that leaves: then the job ends.
"""

import asyncio
import json
from collections.abc import AsyncGenerator
from contextlib import suppress
from time import monotonic
from typing import Any

from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from kvq_apps.serve.config import ServeConfig
from kvq_apps.serve.errors import as_request_error, error_body
from kvq_apps.serve.shapes import Answered, Choice, Shape
from kvq_runtime.serving.job import Job
from kvq_runtime.serving.outbox import Delta, Done, Event, Failed, Finished, Outbox, Report
from kvq_runtime.serving.pool import SessionPool
from kvq_runtime.serving.request import GenerationRequest

_STREAM_HEADERS = {
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-cache",
    "x-accel-buffering": "no",
}


class Events:
    """A job's events as they reach the event loop."""

    def __init__(
        self, pool: SessionPool[Any], config: ServeConfig, request: GenerationRequest
    ) -> None:
        self._pool = pool
        self._arrived = asyncio.Event()
        self._ended = False
        loop = asyncio.get_running_loop()

        def notify() -> None:
            # A loop that is gone has no reader left.
            with suppress(RuntimeError):
                loop.call_soon_threadsafe(self._arrived.set)

        self.job = Job(request, Outbox(config.buffer_bytes, notify))
        pool.submit(self.job)

    async def next(self, timeout_s: float | None = None) -> Event | None:
        """The next event; None after `timeout_s` of silence. Raises `ClientDisconnect`."""
        while True:
            self._arrived.clear()
            if self.job.cancelled:
                raise ClientDisconnect
            was_full = self.job.outbox.full
            event = self.job.outbox.take()
            if was_full and not self.job.outbox.full:
                self._pool.poke()
            if event is not None:
                self._ended = isinstance(event, Done | Failed)
                return event
            try:
                await asyncio.wait_for(self._arrived.wait(), timeout_s)
            except TimeoutError:
                return None

    def cancel(self) -> None:
        """Ends the job, unless it has ended; wakes whoever waits for it."""
        if not self._ended:
            self._pool.cancel(self.job)
            self._arrived.set()


async def cancel_when_gone(receive: Receive, events: Events) -> None:
    """Ends the job when its client hangs up."""
    while (await receive())["type"] != "http.disconnect":
        pass
    events.cancel()


async def whole_answer(events: Events, shape: Shape, answered: Answered) -> tuple[Any, Report]:
    """The answer in one piece, and what it cost."""
    request = answered.request
    choices = [Choice() for _ in range(request.num_answers)]
    while True:
        match await events.next():
            case Delta(index=index, text=text, logs=logs):
                choices[index].text += text
                choices[index].logs += logs
            case Finished(index=index, reason=reason, stop_string=stop_string):
                choices[index].reason, choices[index].stop_string = reason, stop_string
            case Done(report=report):
                return shape.whole(choices, report), report
            case Failed(error=error):
                raise as_request_error(error) from error
            case None:
                pass


async def chunks(
    events: Events, first: Event | None, shape: Shape, ping_s: float
) -> AsyncGenerator[str]:
    """The answer as server-sent events; silence is filled with comments that tell the progress."""
    opened: set[int] = set()
    spoke_s = monotonic()
    event = first if first is not None else await events.next(ping_s)
    while not isinstance(event, Done | Failed):
        if event is None:
            done, total = events.job.progress
            yield f": prompt {done}/{total}\n\n"
        else:
            if event.index not in opened:
                opened.add(event.index)
                yield _data(shape.opening(event.index))
            said = shape.delta(event) if isinstance(event, Delta) else shape.finish(event)
            if said is not None:
                spoke_s = monotonic()
            elif monotonic() - spoke_s >= ping_s:
                # A call is held back until it is whole, and a thought may not be told.
                spoke_s = monotonic()
                yield ": the answer is being written\n\n"
            yield _data(said)
        event = await events.next(ping_s)
    if isinstance(event, Failed):
        yield _data(error_body(as_request_error(event.error)))
        return
    yield _data(shape.closing(event.report))
    if shape.last is not None:
        yield f"data: {shape.last}\n\n"


def _data(value: Any) -> str:
    """One event, nothing for None. ASCII only: some parsers split at Unicode's line separators."""
    return "" if value is None else f"data: {json.dumps(value)}\n\n"


class EventStream(Response):
    """Sends chunks while watching for the client's leave, on any server and ASGI version."""

    def __init__(self, chunks: AsyncGenerator[str], events: Events) -> None:
        super().__init__(None, 200, _STREAM_HEADERS)
        del self.headers["content-length"]
        self._chunks = chunks
        self._events = events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One ASGI response."""
        watcher = asyncio.create_task(cancel_when_gone(receive, self._events))
        try:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            async for chunk in self._chunks:
                if chunk:
                    body = chunk.encode()
                    await send({"type": "http.response.body", "body": body, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        except ClientDisconnect:
            pass
        finally:
            watcher.cancel()
            self._events.cancel()
            await self._chunks.aclose()
