"""Who may ask: the Host, Origin and key of a request, before anything of it is read.

A page in a browser can send requests to this machine. On a loopback address a foreign Host (a
rebound name) is refused, a foreign Origin gets no CORS headers and may not POST, and a body that
a form could send is not JSON.

And whose prompts a session may be reused for. A prompt that is found in a session is read faster,
and `cached_tokens` says so: a client could learn by trying what another one has sent. Where the
server asks for keys, what is sent with one key is found only with the same key; `cache_salt`
(vLLM's name) keeps users of one key apart too. Knows headers and that field, no session.
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

PUBLIC_PATHS = ("/", "/health", "/v1/models")
_JSON = "application/json"
_PREFLIGHT_S = "600"
_HOST = re.compile(r"(?:\[([0-9A-Fa-f:]+)\]|([^\[\]:]+))(?::[0-9]{1,5})?")
_FIRST_REFUSAL = 400
# What is dropped of a refused request: so many bodies of the largest size, while they come.
_DROPPED_BODIES, _IDLE_S = 4, 1.0
_SALT_CHARACTERS = 16

Refuse = Callable[[RequestError], Response]


class Guard:
    """Passes on to `app` what may pass; `refuse` makes the answer to everything else."""

    def __init__(self, app: ASGIApp, config: ServeConfig, refuse: Refuse) -> None:
        self._app = app
        self._config = config
        self._refuse = refuse

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One ASGI request."""
        if scope["type"] != "http":
            return
        headers = Headers(scope=scope)
        most_bytes = _DROPPED_BODIES * self._config.body_bytes
        unread = _Unread(receive, send, most_bytes, self._config.upload_s)
        receive, send = unread.receive, unread.send
        origin = headers.get("origin")
        allowed = origin is not None and self._origin_allowed(origin, headers)
        send = _with_cors(send, origin) if allowed and origin is not None else send
        try:
            self._check_host(headers)
            self._check_origin(scope, allowed=allowed or origin is None)
            if scope["method"] == "OPTIONS" and origin is not None:
                await self._preflight()(scope, receive, send)
                return
            self._check_key(scope, headers)
            self._check_body(headers)
        except RequestError as error:
            await self._refuse(error)(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _check_host(self, headers: Mapping[str, str]) -> None:
        host = headers.get("host", "")
        if self._config.loopback and _name(host) not in LOOPBACK_HOSTS:
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

    def _origin_allowed(self, origin: str, headers: Mapping[str, str]) -> bool:
        own = origin == f"http://{headers.get('host', '')}"
        return own or origin in self._config.origins or "*" in self._config.origins

    def _check_key(self, scope: Scope, headers: Mapping[str, str]) -> None:
        key = self._config.api_key
        if key is None or scope["path"] in PUBLIC_PATHS:
            return
        kind, _, given = headers.get("authorization", "").partition(" ")
        # Headers arrive as Latin-1; what a client sent are the key's own bytes.
        right = hmac.compare_digest(given.encode("latin-1").strip(), key.encode().strip())
        if kind.lower() != "bearer" or not right:
            raise RequestError(
                "this server needs its API key as `Authorization: Bearer KEY`",
                status=401,
                code="invalid_api_key",
            )

    def _check_body(self, headers: Mapping[str, str]) -> None:
        kind = headers.get("content-type")
        if kind is not None and kind.partition(";")[0].strip().lower() != _JSON:
            raise RequestError(
                f"a body of type {kind[:80]!r} is not read; send Content-Type: {_JSON}",
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


def owner_of(headers: Mapping[str, str], cache_salt: str, *, keyed: bool) -> str:
    """A name for who may find a prompt again: hex digits, empty where everyone may."""
    key = headers.get("authorization", "") if keyed else ""
    if not key and not cache_salt:
        return ""
    told = f"{len(key)}:{key}{cache_salt}".encode("utf-8", errors="surrogatepass")
    return hashlib.sha256(told).hexdigest()[:_SALT_CHARACTERS]


def too_large(limit_bytes: int) -> RequestError:
    """The answer to a body over the limit."""
    return RequestError(
        f"the request's body is larger than {limit_bytes} bytes; send less text",
        status=413,
        code="request_too_large",
    )


def _name(host: str) -> str:
    """The name in a Host header, without its port; empty for what is no such header."""
    found = _HOST.fullmatch(host)
    return (found[1] or found[2]).lower() if found else ""


class _Unread:
    """What a client still sends of a request that is refused before it was read.

    Were the connection closed on it, the client would meet a reset in place of the answer. So the
    answer leaves, then what comes is read and dropped, within `most_bytes` and `timeout_s`.
    """

    def __init__(self, receive: Receive, send: Send, most_bytes: int, timeout_s: float) -> None:
        self._receive, self._send = receive, send
        self._left_bytes, self._timeout_s = most_bytes, timeout_s
        self._refused = self._ended = False

    async def receive(self) -> Message:
        """The next part of the request."""
        message = await self._receive()
        self._ended = not message.get("more_body", False)
        return message

    async def send(self, message: Message) -> None:
        """Sends a part of the answer; the last one of a refusal once the client has sent all."""
        if message["type"] == "http.response.start":
            self._refused = message["status"] >= _FIRST_REFUSAL
        last = message["type"] == "http.response.body" and not message.get("more_body", False)
        if last and self._refused and not self._ended:
            await self._send({**message, "more_body": True})
            await self._drop()
            message = {"type": "http.response.body"}
        await self._send(message)

    async def _drop(self) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(self._timeout_s):
                while not self._ended and self._left_bytes > 0:
                    message = await asyncio.wait_for(self.receive(), _IDLE_S)
                    self._left_bytes -= len(message.get("body", b""))


def _with_cors(send: Send, origin: str) -> Send:
    """Lets the page at `origin` read the answer; never with credentials."""

    async def sent(message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = MutableHeaders(scope=message)
            headers["Access-Control-Allow-Origin"] = origin
            headers.add_vary_header("Origin")
        await send(message)

    return sent
