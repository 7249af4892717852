"""Completions from a running `kvq serve`, whose `/infill` follows a text by its edits, too.

Standard library only: nothing is loaded here, and another editor's requests share the weights.
"""

import json
from http.client import HTTPConnection, HTTPException
from select import select
from time import perf_counter
from typing import Any
from urllib.parse import urlsplit

from kvq.errors import BackendError, UsageError
from kvq_apps.completion.document import Document
from kvq_apps.completion.engine import (
    DEFAULT_TOKENS,
    Completion,
    Draft,
    surroundings,
)
from kvq_apps.completion.filters import shown
from kvq_runtime.generation import Cancel

# Characters around the cursor; the server leaves out what does not fit its context.
NEAR = 200_000
# How long a request waits before it asks whether it is still wanted.
POLL_S = 0.05
CONNECT_S = 2.0
HTTP_OK = 200


class ServedCompletions:
    """One greedy draft of `tokens` tokens at most from the server at `url`."""

    def __init__(self, url: str, *, tokens: int = DEFAULT_TOKENS) -> None:
        """Raises `UsageError` for an address that is none; nobody is asked yet."""
        parts = urlsplit(url if "://" in url else f"http://{url}")
        if parts.scheme != "http" or not parts.hostname:
            raise UsageError(f"--server {url!r} is not possible: give http://HOST:PORT")
        self._url, self._address = url, (parts.hostname, parts.port)
        self._tokens = tokens

    def complete(self, document: Document, place: tuple[int, int], *, cancel: Cancel) -> Completion:
        """Drafts that go on at `place`. Raises `BackendError` where nobody answers."""
        since = perf_counter()
        prefix, suffix = document.around(place, NEAR)
        body = {
            "input_prefix": prefix, "input_suffix": suffix,
            "n_predict": self._tokens, "stop": ["\n"], "temperature": 0.0,
        }  # fmt: skip
        answer = self._asked(body, cancel)
        if answer is None:
            return Completion(drafts=(), why_not="cancelled")
        text = shown(str(answer.get("content", "")), surroundings(document, place))
        own = answer.get("x_kvq") or {}
        cached = int(own.get("cached_tokens", 0))
        return Completion(
            drafts=(Draft(text=text, logprob=0.0),) if text else (),
            reused_tokens=cached,
            encoded_tokens=int(own.get("prompt_tokens", 0)) - cached,
            ms=(perf_counter() - since) * 1e3,
            why_not=None if text else "filtered",
        )

    def refresh(self, max_tokens: int, cancel: Cancel) -> int:
        """The server uses its own idle time."""
        return 0

    def close(self) -> None:
        """Connections live for one request only."""

    def _asked(self, body: dict[str, Any], cancel: Cancel) -> dict[str, Any] | None:
        """The answer to `body`; None once it is not wanted. Raises `BackendError`."""
        connection = HTTPConnection(*self._address, timeout=CONNECT_S)
        try:
            headers = {"Content-Type": "application/json"}
            connection.request("POST", "/infill", json.dumps(body).encode(), headers)
            while not select([connection.sock], [], [], POLL_S)[0]:
                if cancel():
                    return None
            response = connection.getresponse()
            answer = json.loads(response.read())
        except (OSError, HTTPException, ValueError) as error:
            raise BackendError(f"{self._url} does not answer: {error}") from error
        finally:
            connection.close()
        if response.status != HTTP_OK or not isinstance(answer, dict):
            raise BackendError(f"{self._url} refuses: {answer}")
        return answer
