"""Completions from a running `kvq serve`, whose `/infill` follows a text by its edits, too.

Standard library only: nothing is loaded here, and editors share the server's weights.
"""

import json
from collections.abc import Callable, Sequence
from contextlib import suppress
from http.client import HTTPConnection, HTTPException
from select import select
from time import perf_counter
from typing import Any
from urllib.parse import urlsplit

from kvq.errors import BackendError, UsageError, argument, reason_of
from kvq.json_values import is_array, is_object
from kvq_apps.completion.document import NamedText, TextDocument
from kvq_apps.completion.edit_history import NextEdit
from kvq_apps.completion.suggestions import (
    BLOCK_TOKENS,
    DEFAULT_DRAFTS,
    DEFAULT_TOKENS,
    Completion,
    Steps,
    cursor_context,
    filter_suggestions,
    whole_lines,
)
from kvq_apps.serve.protocol import check_answer
from kvq_apps.serve.server_connection import UnixConnection, check_files_can_be_sockets

# Characters around the cursor; the server leaves out what does not fit its context.
NEAR = 200_000
# How long a request waits before it checks whether it is still wanted.
POLL_S = 0.05
CONNECT_S = 2.0
HTTP_OK = 200


class RemoteCompleter:
    """Asks the server at `address` for up to `drafts` suggestions of at most `tokens` tokens.

    The first is the greedy one; the others begin with the next likeliest tokens. A server that does
    not know `x_kvq.distinct`, such as llama-server, writes the greedy one several times; it is
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
        """Takes `address`: http://HOST:PORT, or the path of a unix socket.

        Raises `UsageError` for another address. Sends no request yet.
        """
        self._address = address
        self._host, self._port = _host(address)
        self._drafts, self._tokens, self._exact = drafts, tokens, exact
        self._headers = {"Content-Type": "application/json"}
        if api_key:
            self._headers["Authorization"] = f"Bearer {api_key}"

    def complete(
        self,
        document: TextDocument,
        place: tuple[int, int],
        *,
        other_parts: Sequence[NamedText] = (),
        cancel: Callable[[], bool],
    ) -> Completion:
        """Returns suggestions for `place`. Raises `BackendError` where no server answers."""
        since = perf_counter()
        context = cursor_context(document, place)
        body: dict[str, Any] = {
            "n_predict": self._tokens, "n_cmpl": self._drafts, "stop": ["\n"], "temperature": 0.0,
            "x_kvq": {"distinct": True, "exact": self._exact, "steps": True},
        }  # fmt: skip
        if context.indent:
            body |= {"n_predict": BLOCK_TOKENS, "n_cmpl": 1, "stop": [], "n_indent": context.indent}
        answers = self._request(_text_fields(document, place, other_parts) | body, cancel)
        if answers is None:
            return Completion(drafts=(), why_not="cancelled")
        texts = ((_text(answer, context.indent), _steps(answer)) for answer in answers)
        drafts = filter_suggestions(context, texts)
        kvq_fields: dict[str, Any] = answers[0].get("x_kvq") or {}
        cached = int(kvq_fields.get("cached_tokens", 0))
        return Completion(
            drafts=tuple(drafts),
            reused_tokens=cached,
            encoded_tokens=int(kvq_fields.get("prompt_tokens", 0)) - cached,
            ms=(perf_counter() - since) * 1e3,
            why_not=None if drafts else "filtered",
        )

    def read(
        self,
        document: TextDocument,
        place: tuple[int, int],
        *,
        other_parts: Sequence[NamedText] = (),
        cancel: Callable[[], bool],
        progress: Callable[[int, int], None] = lambda done, total: None,
    ) -> bool:
        """Makes the server read the text around `place`; returns False on a cancel.

        The server reports no progress. A server that does not answer is no error here: the next
        completion reports it.
        """
        text = _text_fields(document, place, other_parts)
        body = text | {"n_predict": 0, "x_kvq": {"exact": self._exact}}
        with suppress(BackendError):
            return self._request(body, cancel) is not None
        return True

    def next_edit(self, *_: object, **__: object) -> NextEdit:
        """Returns none: a server is only asked for completions."""
        return NextEdit(
            why_not="with --server there are none; without it kvq lsp loads the model itself",
            impossible=True,
        )

    def close(self) -> None:
        """Does nothing: connections live for one request only."""

    def _request(
        self, body: dict[str, Any], cancel: Callable[[], bool]
    ) -> Sequence[dict[str, Any]] | None:
        """Returns the answers to `body`; None on a cancel. Raises `BackendError`."""
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
            raise BackendError(f"{self._address} does not answer: {reason_of(error)}") from error
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


def _text_fields(
    document: TextDocument, place: tuple[int, int], other_parts: Sequence[NamedText]
) -> dict[str, Any]:
    """Returns the text before and after a place, and of other files, as fields of a request."""
    prefix, suffix = document.text_around(place, NEAR)
    extra = [{"filename": name, "text": text} for name, text in other_parts]
    return {"input_prefix": prefix, "input_suffix": suffix, "input_extra": extra}


def _text(answer: dict[str, Any], indent: int) -> str:
    """Returns an answer's text; of a block's body that was cut at its limit, the whole lines."""
    text = str(answer.get("content", ""))
    return whole_lines(text) if indent and answer.get("stop_type") == "limit" else text


def _host(address: str) -> tuple[str | None, int | None]:
    """Returns host and port; host None: the address is a socket's path. Raises `UsageError`."""
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


def _steps(answer: dict[str, Any]) -> Steps:
    """Returns how likely each beginning of an answer's text is; none where nobody says."""
    kvq_fields: Any = answer.get("x_kvq")
    steps = kvq_fields.get("steps") if is_object(kvq_fields) else None
    pairs = steps if is_array(steps) else ()
    return tuple((int(end), float(logprob)) for end, logprob in pairs)


def _reason(answer: Any) -> Any:
    error = answer.get("error") if is_object(answer) else None
    return error.get("message", answer) if is_object(error) else answer
