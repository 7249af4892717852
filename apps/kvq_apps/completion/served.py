"""Completions from a running `kvq serve`, whose `/infill` follows a text by its edits, too.

Standard library only: nothing is loaded here, and another editor's requests share the weights.
"""

import json
from collections.abc import Callable, Sequence
from contextlib import suppress
from http.client import HTTPConnection, HTTPException
from select import select
from time import perf_counter
from typing import Any
from urllib.parse import urlsplit

from kvq.errors import BackendError, UsageError, argument
from kvq.json_values import is_array, is_object
from kvq_apps.completion.document import Document
from kvq_apps.completion.drafts import (
    DEFAULT_DRAFTS,
    DEFAULT_TOKENS,
    Completion,
    to_show,
)
from kvq_apps.serve.protocol import check_answer
from kvq_apps.serve.reach import UnixConnection, check_files_can_be_sockets

# Characters around the cursor; the server leaves out what does not fit its context.
NEAR = 200_000
# How long a request waits before it asks whether it is still wanted.
POLL_S = 0.05
CONNECT_S = 2.0
HTTP_OK = 200


class ServedCompletions:
    """Up to `drafts` suggestions of `tokens` tokens at most from the server at `address`.

    The first is the greedy one; the others begin with the next likeliest tokens. A server that
    knows no `x_kvq.distinct`, such as llama-server, writes the greedy one several times, which is
    shown once.
    """

    def __init__(
        self,
        address: str,
        *,
        drafts: int = DEFAULT_DRAFTS,
        tokens: int = DEFAULT_TOKENS,
        exact: bool = False,
        api_key: str | None = None,
    ) -> None:
        """`address`: http://HOST:PORT, or the path of a unix socket.

        Raises `UsageError` for an address that is neither; nobody is asked yet.
        """
        self._address = address
        self._host, self._port = _host(address)
        self._drafts, self._tokens, self._exact = drafts, tokens, exact
        self._headers = {"Content-Type": "application/json"}
        if api_key:
            self._headers["Authorization"] = f"Bearer {api_key}"

    def complete(
        self, document: Document, place: tuple[int, int], *, cancel: Callable[[], bool]
    ) -> Completion:
        """Suggestions that go on at `place`. Raises `BackendError` where nobody answers."""
        since = perf_counter()
        body = {
            "n_predict": self._tokens, "n_cmpl": self._drafts, "stop": ["\n"], "temperature": 0.0,
            "x_kvq": {"distinct": True, "exact": self._exact},
        }  # fmt: skip
        answers = self._asked(_around(document, place) | body, cancel)
        if answers is None:
            return Completion(drafts=(), why_not="cancelled")
        drafts = to_show(document, place, ((str(one.get("content", "")), 0.0) for one in answers))
        own: dict[str, Any] = answers[0].get("x_kvq") or {}
        cached = int(own.get("cached_tokens", 0))
        return Completion(
            drafts=tuple(drafts),
            reused_tokens=cached,
            encoded_tokens=int(own.get("prompt_tokens", 0)) - cached,
            ms=(perf_counter() - since) * 1e3,
            why_not=None if drafts else "filtered",
        )

    def read(
        self,
        document: Document,
        place: tuple[int, int],
        *,
        cancel: Callable[[], bool],
        progress: Callable[[int, int], None] = lambda done, total: None,
    ) -> bool:
        """Has the server read what a completion at `place` will need; False once `cancel` says so.

        It says nothing of its progress. Nobody waits for an answer here: where there is none, the
        next completion says so.
        """
        body = _around(document, place) | {"n_predict": 0, "x_kvq": {"exact": self._exact}}
        with suppress(BackendError):
            return self._asked(body, cancel) is not None
        return True

    def close(self) -> None:
        """Connections live for one request only."""

    def _asked(
        self, body: dict[str, Any], cancel: Callable[[], bool]
    ) -> Sequence[dict[str, Any]] | None:
        """The answers to `body`; None once they are not wanted. Raises `BackendError`."""
        connection = self._connection()
        try:
            connection.request("POST", "/infill", json.dumps(body).encode(), self._headers)
            while not select([connection.sock], [], [], POLL_S)[0]:
                if cancel():
                    return None
            response = connection.getresponse()
            check_answer(self._address, response.getheader)
            answer = json.loads(response.read())
        except (OSError, HTTPException, ValueError) as error:
            raise BackendError(f"{self._address} does not answer: {error}") from error
        finally:
            connection.close()
        answers = answer if is_array(answer) else [answer]
        if response.status != HTTP_OK or not answers or not all(map(is_object, answers)):
            raise BackendError(f"{self._address} refuses: {_reason(answer)}")
        return answers

    def _connection(self) -> HTTPConnection:
        if self._host is None:
            return UnixConnection(self._address.removeprefix("unix:"), timeout=CONNECT_S)
        return HTTPConnection(self._host, self._port, timeout=CONNECT_S)


def _around(document: Document, place: tuple[int, int]) -> dict[str, Any]:
    """What stands before a place and after it, as a request has it."""
    prefix, suffix = document.around(place, NEAR)
    return {"input_prefix": prefix, "input_suffix": suffix}


def _host(address: str) -> tuple[str | None, int | None]:
    """Host and port of an address; no host: it is a socket's path. Raises `UsageError`."""
    try:
        parts = urlsplit(address if "/" in address else f"http://{address}")
        if parts.scheme == "http" and parts.hostname:
            return parts.hostname, parts.port
    except ValueError:
        parts = None
    if parts is None or "://" in address or not parts.path:
        raise UsageError(
            f"{argument('--server')} {address!r} is not possible: give http://HOST:PORT or a "
            "socket's path"
        )
    check_files_can_be_sockets()
    return None, None


def _reason(answer: Any) -> Any:
    """What a server says of an error, in its words."""
    error = answer.get("error") if is_object(answer) else None
    return error.get("message", answer) if is_object(error) else answer
