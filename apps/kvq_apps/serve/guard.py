"""Checks the Host, the Origin and the key of a request before anything else of it is read.

A page in a browser can send requests to this machine. On a loopback address a foreign Host (a
rebound name) is refused. A foreign Origin gets no CORS headers and may not POST, and neither may a
page from another site. A body may have the type of a form, which `curl -d` sends, because browsers
send the origin with every form.

It also names the owner of a prompt. A prompt that is in a session already is read faster, and
`cached_tokens` says so. Without owners a client could find out what another client has sent. Where
the server needs keys, only a request with the same key finds a prompt; `cache_salt` (vLLM's name)
also keeps users of one key apart.
"""

import asyncio
import hashlib
import hmac
import re
from collections.abc import Callable, Mapping
from contextlib import suppress

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kvq_apps.serve.config import LOOPBACK_HOSTS, ServeConfig
from kvq_apps.serve.errors import RequestError

PUBLIC_PATHS = ("/", "/health", "/v1/health", "/v1/models", "/models", "/docs", "/openapi.json")
# `curl -d` sends JSON without a type or with the type of a form.
_JSON_TYPES = (None, "application/x-www-form-urlencoded", "application/json")
_JSON = "application/json"
# What browsers send for requests that do not come from a page of another site.
_SAME_SITES = (None, "same-origin", "none")
_PREFLIGHT_S = "600"
_HOST = re.compile(r"(?:\[([0-9A-Fa-f:]+)\]|([^\[\]:]+))(?::[0-9]{1,5})?")
_FIRST_REFUSAL = 400
# So many bodies of the largest size are dropped after a refusal, with so long between two parts.
_DROPPED_BODIES, _IDLE_S = 4, 1.0
_SALT_CHARACTERS = 16


# Returns the answer to a refused request for a path.
Refuse = Callable[[RequestError, str], Response]


class Guard:
    """Passes allowed requests on to `app`; `refuse` makes the answer to all others."""

    def __init__(self, app: ASGIApp, config: ServeConfig, refuse: Refuse) -> None:
        self._app = app
        self._config = config
        self._refuse = refuse

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        headers = Headers(scope=scope)
        most_bytes = _DROPPED_BODIES * self._config.body_bytes
        receive, send = _drained(receive, send, most_bytes, self._config.upload_s)
        origin, origins = headers.get("origin"), self._config.origins
        same_origin = f"http://{headers.get('host', '')}"
        allowed = origin in (same_origin, *origins) or (origin is not None and "*" in origins)
        send = _with_cors(send, origin) if allowed and origin is not None else send
        try:
            self._check_host(headers)
            local = origin is None and headers.get("sec-fetch-site") in _SAME_SITES
            self._check_origin(scope, allowed=allowed or local)
            if scope["method"] == "OPTIONS" and origin is not None:
                await self._preflight()(scope, receive, send)
                return
            self._check_key(scope, headers)
            self._check_body(headers)
        except RequestError as error:
            await self._refuse(error, scope["path"])(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _check_host(self, headers: Mapping[str, str]) -> None:
        host = headers.get("host", "")
        match = _HOST.fullmatch(host)
        name = (match[1] or match[2]).lower() if match else ""
        if self._config.loopback and name not in LOOPBACK_HOSTS:
            raise RequestError(
                f"the Host {host[:80]!r} is not this machine's loopback address; "
                "use http://127.0.0.1 or serve with --host",
                status=403,
                code="foreign_host",
            )

    def _check_origin(self, scope: Scope, *, allowed: bool) -> None:
        if not allowed and scope["method"] not in ("GET", "HEAD"):
            raise RequestError(
                "requests from this web page are not allowed; serve with --origin to allow it",
                status=403,
                code="foreign_origin",
            )

    def _check_key(self, scope: Scope, headers: Mapping[str, str]) -> None:
        key = self._config.api_key
        if key is None or scope["path"] in PUBLIC_PATHS:
            return
        sent_key = _key_of(headers)
        # Headers arrive as Latin-1; in this way they are the bytes that the client sent.
        right = hmac.compare_digest(sent_key.encode("latin-1").strip(), key.encode().strip())
        if not right:
            raise RequestError(
                "this server needs its API key as `Authorization: Bearer KEY` or `x-api-key: KEY`",
                status=401,
                code="invalid_api_key",
            )

    def _check_body(self, headers: Mapping[str, str]) -> None:
        content_type = headers.get("content-type")
        kind = None if content_type is None else content_type.partition(";")[0].strip().lower()
        if kind not in _JSON_TYPES:
            raise RequestError(
                f"a body of type {(kind or '')[:80]!r} is not read; send Content-Type: {_JSON}",
                status=415,
                code="unsupported_media_type",
            )
        length = headers.get("content-length", "0")
        if length.isdecimal() and int(length[:20]) > self._config.body_bytes:
            raise too_large(self._config.body_bytes)

    def _preflight(self) -> Response:
        return Response(
            status_code=204,
            headers={
                "Access-Control-Allow-Methods": "GET, POST, OPTIONS",
                # "*" never means Authorization.
                "Access-Control-Allow-Headers": "authorization, *",
                "Access-Control-Max-Age": _PREFLIGHT_S,
            },
        )


def _key_of(headers: Mapping[str, str]) -> str:
    """Returns the key of a request, in OpenAI's or Anthropic's header."""
    kind, _, key = headers.get("authorization", "").partition(" ")
    return key if kind.lower() == "bearer" else headers.get("x-api-key", "")


def owner_of(headers: Mapping[str, str], cache_salt: str, *, keyed: bool) -> str:
    """Returns the owner of a prompt as hex digits; empty where every client may find it again."""
    key = _key_of(headers) if keyed else ""
    if not key and not cache_salt:
        return ""
    text = f"{len(key)}:{key}{cache_salt}".encode("utf-8", errors="surrogatepass")
    return hashlib.sha256(text).hexdigest()[:_SALT_CHARACTERS]


def too_large(limit_bytes: int) -> RequestError:
    """Returns the error for a body over the limit."""
    return RequestError(
        f"the request's body is larger than {limit_bytes} bytes; send less text",
        status=413,
        code="request_too_large",
    )


def _drained(
    receive: Receive, send: Send, most_bytes: int, timeout_s: float
) -> tuple[Receive, Send]:
    """Drops what a client still sends of a request that is refused before it was read.

    If the connection were closed at once, the client would get a reset in place of the answer. So
    the answer is sent, then the rest is read and dropped, within `most_bytes` and `timeout_s`. The
    end of a refusal waits for that.
    """
    refused = ended = False

    async def received() -> Message:
        nonlocal ended
        message = await receive()
        ended = not message.get("more_body", False)
        return message

    async def sent(message: Message) -> None:
        nonlocal refused
        if message["type"] == "http.response.start":
            refused = message["status"] >= _FIRST_REFUSAL
        last = message["type"] == "http.response.body" and not message.get("more_body", False)
        if last and refused and not ended:
            await send({**message, "more_body": True})
            remaining_bytes = most_bytes
            with suppress(TimeoutError):
                async with asyncio.timeout(timeout_s):
                    while not ended and remaining_bytes > 0:
                        part = await asyncio.wait_for(received(), _IDLE_S)
                        remaining_bytes -= len(part.get("body", b""))
            message = {"type": "http.response.body"}
        await send(message)

    return received, sent


def _with_cors(send: Send, origin: str) -> Send:
    """Lets the page at `origin` read the answer; never with credentials."""

    async def sent(message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = MutableHeaders(scope=message)
            headers["Access-Control-Allow-Origin"] = origin
            headers.add_vary_header("Origin")
        await send(message)

    return sent
