"""Sends a job's events to its client, as one answer or as server-sent events.

It runs in the event loop and ends the job if the client leaves.
"""

import asyncio
from collections.abc import AsyncGenerator, Iterable
from contextlib import suppress
from time import monotonic
from typing import Any

import numpy as np
from numpy.typing import NDArray
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from kvq_apps.serve.config import ServeConfig
from kvq_apps.serve.errors import as_request_error
from kvq_apps.serve.tracing import Ended
from kvq_apps.serve.wire import Choice, Json, Shape
from kvq_apps.serve.workers import gone
from kvq_runtime.serving.job import Job
from kvq_runtime.serving.outbox import (
    Delta,
    Done,
    Event,
    Failed,
    Finished,
    Measured,
    Outbox,
    Report,
)
from kvq_runtime.serving.pool import SessionPool
from kvq_runtime.serving.request import GenerationRequest, PoolError

_STREAM_HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no"}


class JobEvents:
    """Passes a job's events to the event loop."""

    def __init__(
        self,
        pool: SessionPool[Any],
        config: ServeConfig,
        request: GenerationRequest,
        report_end: Ended,
    ) -> None:
        """Submits the job. `report_end` gets its last event, None for a client that has left."""
        self._pool = pool
        self._arrived = asyncio.Event()
        self._ended = False
        self._report_end = report_end
        loop = asyncio.get_running_loop()

        def notify() -> None:
            # A closed loop has no reader left.
            with suppress(RuntimeError):
                loop.call_soon_threadsafe(self._arrived.set)

        self.job = Job(request, Outbox(config.buffer_bytes, notify))
        try:
            pool.submit(self.job)
        except PoolError as error:
            report_end(Failed(error=error))
            raise

    async def next(self, timeout_s: float | None = None) -> Event | None:
        """Returns the next event; None after `timeout_s` without one. Raises `ClientDisconnect`."""
        while True:
            self._arrived.clear()
            if self.job.cancelled:
                raise ClientDisconnect
            was_full = self.job.outbox.full
            event = self.job.outbox.take()
            if was_full and not self.job.outbox.full:
                self._pool.poke()
            if event is not None:
                if isinstance(event, Done | Failed):
                    self._ended = True
                    self._report_end(event)
                return event
            try:
                await asyncio.wait_for(self._arrived.wait(), timeout_s)
            except TimeoutError:
                return None

    def cancel(self) -> None:
        """Ends the job, unless it has ended, and wakes what waits for it."""
        if not self._ended:
            if not self.job.cancelled:
                self._report_end(None)
            self._pool.cancel(self.job)
            self._arrived.set()


async def cancel_when_gone(receive: Receive, events: JobEvents) -> None:
    """Ends the job when its client hangs up."""
    await gone(receive)
    events.cancel()


async def whole_answer(events: JobEvents, shape: Shape) -> tuple[Any, Report]:
    """Returns the whole answer and its report; a worker thread shapes the answer."""
    choices = [Choice() for _ in range(shape.request.generation.num_answers)]
    while True:
        match await events.next():
            case Delta(index=index, text=text, logs=logs):
                choices[index].parts.append(text)
                choices[index].logs += logs
            case Finished(index=index, reason=reason, stop_string=stop_string):
                choices[index].reason, choices[index].stop_string = reason, stop_string
            case Done(report=report):
                return await asyncio.to_thread(shape.whole, choices, report), report
            case Failed(error=error):
                raise as_request_error(error) from error
            case Measured() | None:
                pass


async def measured_prompts(events: JobEvents) -> tuple[list[NDArray[np.float32]], Report]:
    """Returns the numbers of every prompt in order, and the report."""
    rows: list[NDArray[np.float32]] = []
    while True:
        match await events.next():
            case Measured(values=values):
                rows.append(values)
            case Done(report=report):
                return rows, report
            case Failed(error=error):
                raise as_request_error(error) from error
            case _:
                pass


async def chunks(
    events: JobEvents, first: Event | None, shape: Shape, ping_s: float
) -> AsyncGenerator[str]:
    """Yields the answer in pieces; comments show progress when there is no event."""
    opened: set[int] = set()
    spoke_s = monotonic()
    event = first if first is not None else await events.next(ping_s)
    while not isinstance(event, Done | Failed):
        if event is None:
            done, total = events.job.progress
            yield shape.comment(f"prompt {done}/{total}")
        else:
            assert not isinstance(event, Measured)
            if event.index not in opened:
                opened.add(event.index)
                yield _framed(shape.opening(event.index), shape)
            rows = shape.delta(event) if isinstance(event, Delta) else shape.finish(event)
            text = _framed(rows, shape)
            if text:
                spoke_s = monotonic()
            elif monotonic() - spoke_s >= ping_s:
                # A call is held back until it is complete, and a thought may be hidden.
                spoke_s = monotonic()
                yield shape.comment("the answer is being written")
            yield text
        event = await events.next(ping_s)
    if isinstance(event, Failed):
        yield shape.frame(shape.failed(as_request_error(event.error)))
        return
    # Counting the tokens of a long thought is slow, so a worker thread does it.
    closing = asyncio.to_thread(lambda: _framed(shape.closing(event.report), shape))
    yield await closing + shape.last


def _framed(rows: Iterable[Json], shape: Shape) -> str:
    return "".join(map(shape.frame, rows))


class EventStream(Response):
    """Sends chunks and ends when the client leaves, on any server and ASGI version."""

    def __init__(self, chunks: AsyncGenerator[str], media_type: str, events: JobEvents) -> None:
        super().__init__(None, 200, _STREAM_HEADERS | {"content-type": media_type})
        del self.headers["content-length"]
        self._chunks = chunks
        self._events = events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
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
