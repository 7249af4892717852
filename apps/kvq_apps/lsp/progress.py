"""Work that an editor may show while it goes on: LSP's work done progress. Knows no server."""

from collections.abc import Callable
from threading import Lock
from typing import Any


class Progress:
    """One piece of work, shown from when the client agrees until it ends. From any thread.

    `call` sends a request of ours, whose answer a function gets; `send` a notification.
    """

    def __init__(
        self,
        token: str,
        title: str,
        call: Callable[[str, dict[str, Any], Callable[[Any], None]], None],
        send: Callable[[dict[str, Any]], None],
    ) -> None:
        self._token, self._title, self._send = token, title, send
        self._lock = Lock()
        self._shown = self._ended = False
        self._done: int | None = None
        call("window/workDoneProgress/create", {"token": token}, self._begin)

    def report(self, done: int) -> None:
        """So many of a hundred parts are done; told only when it is another number."""
        with self._lock:
            if done != self._done:
                self._done = done
                self._tell({"kind": "report", "percentage": done})

    def end(self) -> None:
        """The work is done, or given up."""
        with self._lock:
            self._tell({"kind": "end"})
            self._ended = True

    def _begin(self, _: Any) -> None:
        with self._lock:
            if not self._ended:
                self._shown = True
                known = {} if self._done is None else {"percentage": self._done}
                self._tell({"kind": "begin", "title": self._title} | known)

    def _tell(self, value: dict[str, Any]) -> None:
        if self._shown and not self._ended:
            params = {"token": self._token, "value": value}
            self._send({"method": "$/progress", "params": params})
