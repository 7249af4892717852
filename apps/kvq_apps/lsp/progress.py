"""Work that an editor may show while it goes on: LSP's work done progress. Knows no server."""

from threading import Lock
from typing import Any

from kvq_apps.lsp.connection import Connection


class Progress:
    """One piece of work, shown from when the client agrees until it ends. From any thread."""

    def __init__(self, token: str, title: str, client: Connection) -> None:
        self._token, self._title, self._client = token, title, client
        self._lock = Lock()
        self._shown = self._ended = False
        self._done: int | None = None
        client.call("window/workDoneProgress/create", {"token": token}, self._begin)

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
            self._client.notify("$/progress", {"token": self._token, "value": value})
