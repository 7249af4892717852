"""Progress that an editor may show: LSP's work done progress. Knows no server."""

from threading import Lock
from typing import Any

from kvq_apps.lsp.connection import Connection


class WorkDoneProgress:
    """Shows one piece of work from when the client agrees until it ends. Any thread may call it."""

    def __init__(self, token: str, title: str, client: Connection) -> None:
        self._token, self._title, self._client = token, title, client
        self._lock = Lock()
        self._shown = self._ended = False
        self._done: int | None = None
        client.call("window/workDoneProgress/create", {"token": token}, self._begin)

    def report(self, done: int) -> None:
        """Reports the percentage, if it has changed."""
        with self._lock:
            if done != self._done:
                self._done = done
                self._notify({"kind": "report", "percentage": done})

    def end(self) -> None:
        """Reports that the work is done or given up."""
        with self._lock:
            self._notify({"kind": "end"})
            self._ended = True

    def _begin(self, _: Any) -> None:
        with self._lock:
            if not self._ended:
                self._shown = True
                percentage = {} if self._done is None else {"percentage": self._done}
                self._notify({"kind": "begin", "title": self._title} | percentage)

    def _notify(self, value: dict[str, Any]) -> None:
        if self._shown and not self._ended:
            self._client.notify("$/progress", {"token": self._token, "value": value})
