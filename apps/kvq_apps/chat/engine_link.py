"""The engine as the chat meets it: on a thread of its own, lost and found, and what it does now.

Nothing here waits for the engine on the screen's thread, and nothing here knows a conversation.
"""

from asyncio import sleep, wrap_future
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from itertools import chain, repeat
from time import monotonic
from typing import Any, TypeVar

from kvq.errors import KvqError, UsageError
from kvq_apps.chat.client import ChatClient, EngineLostError, Facts, News, Stream
from kvq_apps.chat.messages import ReplyStats
from kvq_apps.chat.view import View
from kvq_apps.chat.worker import Worker
from kvq_apps.flags import told

FRAME_S = 0.033
# How long a lost engine is left alone before each try to find it again; then the last, for ever.
RETRY_S = (0.5, 1.0, 2.0, 4.0, 8.0)
T = TypeVar("T")


class EngineLink:
    """A client on its thread: `facts` once it is open, `stats` of the last reply.

    `stream` is what `cancel` stops, None while nothing streams; `activity` says what is done now;
    `kv_changed` whether the cache has taken anything since it was saved.
    """

    def __init__(self, view: View, client: ChatClient) -> None:
        self.client = client
        self.facts: Facts | None = None
        self.stats = ReplyStats()
        self.stream: Stream | None = None
        self.activity = ""
        self.lost = False
        self.kv_changed = False
        self._view = view
        self._thread = Worker("kvq-engine")

    def doing(self, activity: str) -> None:
        """Says what is done from now on."""
        self.activity = activity
        self._view.changed()

    def rest(self) -> None:
        """Says that nothing is done."""
        self.stream = None
        self.doing("ready" if self.facts else "no model")

    def cancel(self) -> bool:
        """Stops what streams; whether anything did that was not stopping already."""
        stream = self.stream
        if stream is None or stream.cancelled():
            return False
        stream.cancel()
        return True

    async def call(self, function: Callable[..., T], *arguments: object) -> T:
        """What `function(*arguments)` returns, on the engine's thread."""
        return await wrap_future(self._thread.call(function, *arguments))

    async def follow(
        self, show: Callable[[News], None], function: Callable[..., T], *arguments: Any
    ) -> T:
        """What `function(*arguments, stream)` returns; `show` is given what arrives until then."""
        self.stream = stream = Stream()
        self.kv_changed = True
        self.doing("encoding")
        future = self._thread.call(function, *arguments, stream)
        while not future.done():
            await sleep(FRAME_S)
            show(stream.take())
        show(stream.take())
        return future.result()

    def measure(self, news: News) -> None:
        """Takes the numbers of `news`."""
        if news.stats is not None:
            self.stats = news.stats
        if news.prefilled is not None:
            done, total = news.prefilled
            self.activity = f"encoding {done}/{total}" if done < total else "answering"
        if news.stats is not None or news.prefilled is not None:
            self._view.changed()

    async def open(self) -> None:
        """Opens the client; says what is wrong if that fails."""
        self.doing("loading the model")
        opening = self._thread.call(self.client.open)
        with suppress(Exception):
            await wrap_future(opening)
        self._opened(opening)

    def _opened(self, opening: "Future[Facts]") -> None:
        error = opening.exception()
        self.facts = opening.result() if error is None else None
        if isinstance(error, EngineLostError):
            self.lose(error)
        elif error is not None:
            ours = isinstance(error, KvqError)
            text = told(error) if ours else f"the model cannot be loaded: {told(error)}"
            self._view.say(f"{text}; /model NAME tries another", error=True)

    def lose(self, error: EngineLostError) -> None:
        """The engine went away: it is to be looked for."""
        self.lost = True
        self._view.say(f"engine lost, retrying: {told(error)}", error=True)

    async def find(self) -> bool:
        """Looks for the lost engine, ever less often; False if it was cancelled before."""
        self.stream = stream = Stream()
        self.doing("engine lost, retrying")
        for wait_s in chain(RETRY_S, repeat(RETRY_S[-1])):
            end = monotonic() + wait_s
            while monotonic() < end and not stream.cancelled():
                await sleep(FRAME_S)
            if stream.cancelled():
                break
            opening = self._thread.call(self.client.open)
            while not opening.done() and not stream.cancelled():
                await sleep(FRAME_S)
            if opening.done() and not isinstance(opening.exception(), EngineLostError):
                self.lost = False
                self._opened(opening)
                return True
        return False

    def opened(self) -> Facts:
        """What the engine runs on. Raises `UsageError` where there is none."""
        if self.facts is None:
            raise UsageError("there is no model yet; /model NAME loads one")
        return self.facts

    async def change_client(self, client: ChatClient, facts: Facts) -> None:
        """Goes on with another client, which is open, and closes the old one."""
        old, self.client, self.facts, self.lost = self.client, client, facts, False
        await self.call(old.close)
