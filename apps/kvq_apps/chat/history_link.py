"""The history on a thread of its own: writes in order, reads awaited, trouble told on screen."""

from asyncio import wrap_future
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import TypeVar

from kvq_apps.chat.history import History
from kvq_apps.chat.view import View
from kvq_apps.chat.worker import Worker

T = TypeVar("T")


class HistoryLink:
    """A `History`, used from its thread only. `leaving`: what fails now is told to nobody."""

    def __init__(self, view: View) -> None:
        self.leaving = False
        self._view = view
        self._thread = Worker("kvq-history")
        self._history: History | None = None

    @property
    def is_open(self) -> bool:
        """Whether it can be read yet."""
        return self._history is not None

    async def open(self, path: Path | None) -> None:
        """Opens the file; None keeps the chats in memory."""
        say = self._view.say_from_thread
        opening = self._thread.call(lambda: History(path, on_trouble=say))
        self._history = await wrap_future(opening)

    def write(self, write: Callable[[History], None]) -> None:
        """Has the history's thread do `write`, after what it was given before."""
        future = self._thread.call(lambda: write(self._opened()))
        future.add_done_callback(self._written)

    async def read(self, read: Callable[[History], T]) -> T:
        """What `read` finds in the history, on its thread."""
        return await wrap_future(self._thread.call(lambda: read(self._opened())))

    def close(self, wait_s: float) -> None:
        """Closes the file after what is to be written; does not wait longer than `wait_s`."""
        if self._history is not None:
            self._thread.call(self._history.close)
        self._thread.stop(wait_s)

    def _opened(self) -> History:
        assert self._history is not None
        return self._history

    def _written(self, future: "Future[None]") -> None:
        error = future.exception()
        if error is not None and not self.leaving:
            self._view.say_from_thread(
                f"the chat history failed: {error}; copy what you need with y"
            )
