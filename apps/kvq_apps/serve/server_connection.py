"""Connects to a running server at its address or its unix socket; imports nothing heavy."""

import json
import socket
from contextlib import closing
from http.client import HTTPConnection, HTTPException
from typing import Any
from urllib.parse import urlsplit

from kvq.errors import UsageError, argument
from kvq.json_values import is_object

TIMEOUT_S = 2.0


def check_files_can_be_sockets() -> None:
    """Raises `UsageError` on a system without unix sockets, such as Windows."""
    if not hasattr(socket, "AF_UNIX"):
        raise UsageError(
            "this system has no unix sockets; use an address: `kvq serve --port 8012`, which "
            f"{argument('--api-key')} keeps to those who know the key, is reached at http://127.0.0.1:8012"
        )


class UnixConnection(HTTPConnection):
    """Speaks HTTP over the unix socket at `path`."""

    def __init__(self, path: str, *, timeout: float = TIMEOUT_S) -> None:
        super().__init__("localhost", timeout=timeout)
        self._path = path

    def connect(self) -> None:
        """Opens the socket. Raises `OSError`, or `UsageError` on a system without unix sockets."""
        check_files_can_be_sockets()
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)


def get_json(url: str | None, path: str | None, route: str) -> dict[str, Any]:
    """Returns the object at `route` of the server at `url`, or else at the socket `path`.

    The HTTP status may be any. Raises `OSError` when nobody answers, `ValueError` for an answer
    that is not an object.
    """
    if url is not None:
        parts = urlsplit(url)
        connection = HTTPConnection(parts.hostname or "", parts.port, timeout=TIMEOUT_S)
    else:
        connection = UnixConnection(path or "")
    with closing(connection):
        try:
            connection.request("GET", route)
            answer: Any = json.loads(connection.getresponse().read())
        except HTTPException as error:
            raise ValueError(str(error)) from error
    if not is_object(answer):
        raise ValueError(f"{route} is not an object")
    return answer
