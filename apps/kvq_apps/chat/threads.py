"""The history and the engine, each on a thread of its own; the screen's thread waits for neither.

An engine may get lost, and is looked for until it is back. Nothing here knows a conversation.
"""

from asyncio import sleep, wrap_future
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from itertools import chain, repeat
from pathlib import Path
from queue import SimpleQueue
from threading import Thread
from time import monotonic
from typing import TYPE_CHECKING, Any, TypeVar

from kvq.errors import KvqError, UsageError
from kvq_apps.chat.client import ChatClient, EngineLostError, Facts, Stream, StreamUpdate
from kvq_apps.chat.history import History
from kvq_apps.chat.messages import ReplyStats
from kvq_apps.settings.flags import format_error

if TYPE_CHECKING:
    from kvq_apps.chat.chat_app import ChatApp

FRAME_S = 0.033
# Seconds between the tries to find a lost engine; the last one repeats for ever.
RETRY_S = (0.5, 1.0, 2.0, 4.0, 8.0)
T = TypeVar("T")
_Job = tuple[Callable[..., Any], tuple[Any, ...], "Future[Any]"]


class Worker:
    """Runs calls in order on a daemon thread, which never keeps the process alive."""

    def __init__(self, name: str) -> None:
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()
        self._thread = Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, function: Callable[..., T], *arguments: Any) -> "Future[T]":
        """Queues `function(*arguments)` and returns its future."""
        future: Future[T] = Future()
        self._jobs.put((function, arguments, future))
        return future

    async def call(self, function: Callable[..., T], *arguments: Any) -> T:
        """Runs `function(*arguments)` on the thread and returns its result."""
        return await wrap_future(self.submit(function, *arguments))

    def stop(self, wait_s: float) -> bool:
        """Ends after the calls queued so far; returns whether that took less than `wait_s`."""
        self._jobs.put(None)
        self._thread.join(wait_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            function, arguments, future = job
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(function(*arguments))
            except BaseException as error:  # noqa: BLE001 - whoever waits gets it
                future.set_exception(error)


class HistoryLink(Worker):
    """Uses a `History` from one thread only. `leaving`: errors are not shown any more."""

    def __init__(self, view: "ChatApp") -> None:
        super().__init__("kvq-history")
        self.leaving = False
        self._view = view
        self._history: History | None = None

    @property
    def is_open(self) -> bool:
        """Tells whether the history can be read yet."""
        return self._history is not None

    async def open(self, path: Path | None) -> None:
        """Opens the file; None keeps the chats in memory."""
        say = self._view.say_from_thread
        self._history = await self.call(lambda: History(path, on_trouble=say))

    def write(self, write: Callable[[History], None]) -> None:
        """Queues `write`. A failure is shown."""
        self.submit(lambda: write(self._opened())).add_done_callback(self._report_failure)

    async def read(self, read: Callable[[History], T]) -> T:
        """Returns what `read` returns."""
        return await self.call(lambda: read(self._opened()))

    def close(self, wait_s: float) -> None:
        """Closes the file after the queued writes; waits at most `wait_s`."""
        if self._history is not None:
            self.submit(self._history.close)
        self.stop(wait_s)

    def _opened(self) -> History:
        assert self._history is not None
        return self._history

    def _report_failure(self, future: "Future[None]") -> None:
        error = future.exception()
        if error is not None and not self.leaving:
            self._view.say_from_thread(
                f"the chat history failed: {error}; copy what you need with y"
            )


class EngineLink(Worker):
    """Uses a client from one thread: `facts` once it is open, `stats` of the last reply.

    `stream` is what `cancel` stops, None while nothing streams. `activity` describes the present
    work. `kv_changed` tells whether the cache has changed since it was saved.
    """

    def __init__(self, view: "ChatApp", client: ChatClient) -> None:
        super().__init__("kvq-engine")
        self.client = client
        self.facts: Facts | None = None
        self.stats = ReplyStats()
        self.stream: Stream | None = None
        self.activity = ""
        self.lost = False
        self.kv_changed = False
        self._view = view

    def set_activity(self, activity: str) -> None:
        self.activity = activity
        self._view.changed()

    def set_idle(self) -> None:
        """Shows that nothing is done."""
        self.stream = None
        self.set_activity("ready" if self.facts else "no model")

    def cancel(self) -> bool:
        """Stops what streams; returns whether anything was streaming."""
        stream = self.stream
        if stream is None or stream.cancelled():
            return False
        stream.cancel()
        return True

    async def follow(
        self, show: Callable[[StreamUpdate], None], function: Callable[..., T], *arguments: Any
    ) -> T:
        """Runs `function(*arguments, stream)`; passes to `show` what arrives until it returns."""
        self.stream = stream = Stream()
        self.kv_changed = True
        self.set_activity("encoding")
        future = self.submit(function, *arguments, stream)
        while not future.done():
            await sleep(FRAME_S)
            show(stream.take())
        show(stream.take())
        return future.result()

    def record(self, update: StreamUpdate) -> None:
        """Records the numbers of `update`."""
        if update.stats is not None:
            self.stats = update.stats
        if update.prefill_progress is not None:
            done, total = update.prefill_progress
            self.activity = f"encoding {done}/{total}" if done < total else "answering"
        if update.stats is not None or update.prefill_progress is not None:
            self._view.changed()

    async def open(self) -> None:
        """Opens the client, and shows why that failed."""
        self.set_activity("loading the model")
        opening = self.submit(self.client.open)
        with suppress(Exception):
            await wrap_future(opening)
        self._finish_opening(opening)

    def _finish_opening(self, opening: "Future[Facts]") -> None:
        error = opening.exception()
        self.facts = opening.result() if error is None else None
        if isinstance(error, EngineLostError):
            self.lose(error)
        elif error is not None:
            head = "" if isinstance(error, KvqError) else "the model cannot be loaded: "
            self._view.say(f"{head}{format_error(error)}; /model NAME tries another", error=True)

    def lose(self, error: EngineLostError) -> None:
        """Marks the engine as lost, so that it is looked for."""
        self.lost = True
        self._view.say(f"engine lost, retrying: {format_error(error)}", error=True)

    async def find(self) -> bool:
        """Looks for the lost engine, ever less often; returns False on a cancel."""
        self.stream = stream = Stream()
        self.set_activity("engine lost, retrying")
        for wait_s in chain(RETRY_S, repeat(RETRY_S[-1])):
            end = monotonic() + wait_s
            while monotonic() < end and not stream.cancelled():
                await sleep(FRAME_S)
            if stream.cancelled():
                break
            opening = self.submit(self.client.open)
            while not opening.done() and not stream.cancelled():
                await sleep(FRAME_S)
            if opening.done() and not isinstance(opening.exception(), EngineLostError):
                self.lost = False
                self._finish_opening(opening)
                return True
        return False

    def require_facts(self) -> Facts:
        """Returns what the engine runs. Raises `UsageError` where there is no model."""
        if self.facts is None:
            raise UsageError("there is no model yet; /model NAME loads one")
        return self.facts

    async def change_client(self, client: ChatClient, facts: Facts) -> None:
        """Goes on with another client, which is open, and closes the old one."""
        old, self.client, self.facts, self.lost = self.client, client, facts, False
        await self.call(old.close)
